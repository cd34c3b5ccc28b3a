"""Drill 16: the clock of a host is wrong by a day."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.whole import expect_kinds, expect_whole
from ckptstore.drills.told import FINE, Gone

SAVE, COLLECT = "ckptstore.drills.marked:save", "ckptstore.drills.collector:collect"
DAYS = (1.0, 0.0, -1.0)
"""Of the hosts that save, one after the other."""
COLLECTORS_DAYS = (0.0, 1.0, -1.0)
"""The first one retires; the others find what was retired just now."""
GRACE_SECONDS = 3600.0


def stepped_clock(place: Place) -> str:
    """Save on hosts of yesterday, today and tomorrow, and collect there: order and graces are the store's."""
    for mark, days in enumerate(DAYS, 1):
        with place.ranks(1, SAVE, marks=[mark], days=days) as ranks:
            expect_kinds(ranks.results(), [FINE])
    marks = list(range(len(DAYS), 0, -1))
    expect_whole(place, marks, after="hosts with other clocks saved")
    latest = place.opened().latest()
    expect(latest is not None and latest.checkpoint_id == f"step-{marks[0]}", f"The latest is {latest}.")
    for days in COLLECTORS_DAYS:
        gone = _collected(place, grace_seconds=GRACE_SECONDS, days=days)
        expect(
            gone.deleted == 0,
            f"A collector whose clock is {days:+g} days off deleted {gone.deleted} objects within the grace.",
        )
    gone = _collected(place, grace_seconds=0.0, days=DAYS[-1])
    expect(gone.deleted > 0 and not gone.failed, f"Without a grace, {gone.deleted} objects were deleted. {gone.failed}")
    expect_whole(place, marks[:-1], after="a collection")
    return "The newest by the log is the latest, and a collector a day ahead left alone what was retired just now."


def _collected(place: Place, *, grace_seconds: float, days: float) -> Gone:
    with place.ranks(1, COLLECT, last=2, grace_seconds=grace_seconds, days=days) as ranks:
        gone: Gone = ranks.results()[0]
    return gone
