"""A host whose clock is wrong, and a collector that may run there."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from ckptstore.clock import SystemClock
from ckptstore.drills.place import Place
from ckptstore.drills.told import Gone
from ckptstore.drills.worker import Voice
from ckptstore.maintenance.retention import Keep


def step_clock(days: float) -> None:
    """Let this process believe that it is so many days later. What counts seconds only goes on as it did."""
    if not days:
        return
    ahead, right = timedelta(days=days), time.time
    SystemClock.now = lambda self: datetime.now(UTC) + ahead  # type: ignore[method-assign]  # noqa: ARG005
    time.time = lambda: right() + ahead.total_seconds()


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
    return Gone([names[seq] for seq in report.retired], len(report.deleted), failed)
