"""A host whose clock is wrong."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from ckptstore.clock import SystemClock


def step_clock(days: float) -> None:
    """Let this process believe that it is so many days later. What counts seconds only goes on as it did."""
    if not days:
        return
    ahead, right = timedelta(days=days), time.time
    SystemClock.now = lambda self: datetime.now(UTC) + ahead  # type: ignore[method-assign]  # noqa: ARG005
    time.time = lambda: right() + ahead.total_seconds()
