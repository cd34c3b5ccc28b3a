"""A collector, on a host of its own."""

from __future__ import annotations

from ckptstore.drills.clocks import step_clock
from ckptstore.drills.place import Place
from ckptstore.drills.told import Gone
from ckptstore.drills.worker import Voice
from ckptstore.maintenance.retention import Keep


def collect(voice: Voice, place: Place, *, last: int, grace_seconds: float = 0.0, days: float = 0.0) -> Gone:
    """Keep the last checkpoints, and collect the others, on a host whose clock is so many days ahead.

    If killed: see `CheckpointStore.collect`.
    """
    del voice
    step_clock(days)
    opened, keep = place.opened(), Keep(last=last)
    names = {each.seq: each.checkpoint_id for each in opened.checkpoints()}
    plan = opened.plan_collection(keep=keep, grace_seconds=grace_seconds)
    report = opened.collect(digest=plan.digest, keep=keep, grace_seconds=grace_seconds)
    failed = [f"{key}: {error.message}" for key, error in report.failed.items()]
    needed = [each for each in report.deleted if not each.key.endswith("/COMMITTED")]  # a hint, which needs no grace
    return Gone([names[seq] for seq in report.retired], len(needed), failed)
