"""Drill 15: the job is asked to stop, and killed half a minute later."""

from __future__ import annotations

import signal
import time

from ckptstore.checkpoint import Checkpoint
from ckptstore.drills.place import NotAsPromised, Place, expect
from ckptstore.drills.scenarios.runs import TRAIN, WORLD, trained

LIFE_SECONDS, NO_SECONDS = 30.0, 0.1
EXIT_CODE = 128 + signal.SIGTERM
NEVER = 1_000_000
STEP = "batch"
"""What a rank says after each step."""


def asked_to_stop(place: Place) -> str:
    """Send SIGTERM as a scheduler does, with time for a last save and with next to none: what is newest is whole."""
    latest, took = _stopped(place, every_steps=NEVER)
    resumed = trained(place, until=0)[0]["resumed"]
    expect(resumed["step"] == latest.global_step, f"Resumed was step {resumed['step']}, saved {latest.global_step}.")
    newest, _ = _stopped(place, every_steps=2, background=True, stop_seconds=NO_SECONDS)
    return (
        f"All ranks ended with {EXIT_CODE} after {took:.1f} s, {latest.checkpoint_id} was saved last and resumed; "
        f"with {NO_SECONDS} s to live, {newest.checkpoint_id} was the newest, and whole."
    )


def _stopped(place: Place, **options: object) -> tuple[Checkpoint, float]:
    """Train, send SIGTERM to every rank, and return the newest checkpoint and how long it took them to end.

    Raises:
        NotAsPromised: One did not end in time with the right code, or there is no checkpoint, or it is not whole.
    """
    with place.ranks(WORLD, TRAIN, until=NEVER, **options) as ranks:
        for rank in range(WORLD):
            ranks.hear(STEP, rank=rank)
        began = time.monotonic()
        for rank in range(WORLD):
            ranks.send(rank, signal.SIGTERM)
        outcomes = ranks.outcomes(seconds=LIFE_SECONDS)
        took = time.monotonic() - began
    for rank, outcome in enumerate(outcomes):
        expect(outcome.died == EXIT_CODE, f"Rank {rank} ended with {outcome.died}, not with {EXIT_CODE}.")
    opened = place.opened()
    if (latest := opened.latest()) is None:
        raise NotAsPromised("There was time for a last save, and there is none.")
    expect(opened.verify(latest, level="full").ok, f"{latest.checkpoint_id}, the newest, is damaged.")
    return latest, took
