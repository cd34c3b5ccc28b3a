"""Drill 4: `latest.json` names what is not there."""

from __future__ import annotations

from dataclasses import replace

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import resumed_from, trained
from ckptstore.format.layout import LATEST_KEY
from ckptstore.format.records import MAX_RECORD_BYTES, decode_latest, encode_latest

BEYOND = 5
"""So many slots beyond the newest commit nothing was ever written."""


def lost_latest(place: Place) -> str:
    """Let the hint name a checkpoint that is missing, then delete it: each time the log has the newest one."""
    digest = trained(place, until=2)[0]["digest"]
    (newest,), store = place.opened().checkpoints(), place.store()
    hint = decode_latest(store.get(LATEST_KEY, max_bytes=MAX_RECORD_BYTES))
    missing = replace(hint, seq=hint.seq + BEYOND, checkpoint_id="step-12", global_step=12)
    for body, what in ((encode_latest(missing), "a hint to what is missing"), (None, "no hint")):
        store.delete(LATEST_KEY)
        if body is not None:
            store.put(LATEST_KEY, body)
        opened = place.opened()
        found = opened.latest()
        expect(found is not None and found.seq == newest.seq, f"With {what}, the latest is {found}.")
        lost_from = None if body is None else missing.seq
        expect(opened.lost_from == lost_from, f"With {what}, the log is said to have lost slot {opened.lost_from}.")
        resumed_from(place, newest, digest)
    return f"{newest.checkpoint_id} was found by the log and resumed, with a hint to what is missing and without one."
