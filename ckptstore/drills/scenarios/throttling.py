"""Drill 13: the store refuses requests because they are too many."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.scenarios.whole import expect_kinds, expect_whole
from ckptstore.drills.told import FINE

SAVE = "ckptstore.drills.trouble:save_in_a_storm"
IN_TIME_SECONDS = 15.0
"""What is given up after 5 seconds, and after 12 tries of each request, must be known by then."""
END_SECONDS = 45.0
MOST_TRIES, MOST_THREADS = 200, 2


def throttling(place: Place) -> str:
    """Refuse a quarter of all requests, then all: saves end well, or in time with an error; then all is well again."""
    with place.ranks(WORLD, SAVE) as ranks:
        told = ranks.results(seconds=END_SECONDS)
    saves = len(told[0].some)
    expect_kinds([[*each.some, each.all, each.calm] for each in told], [*[FINE] * saves, "UnavailableError", FINE])
    for rank, each in enumerate(told):
        expect(
            each.all.seconds < IN_TIME_SECONDS, f"Rank {rank} waited {each.all.seconds:.1f} s for a save that failed."
        )
        expect(each.tries <= MOST_TRIES, f"Rank {rank} sent {each.tries} requests while all were refused.")
        expect(each.threads <= MOST_THREADS, f"Rank {rank} has {each.threads} threads more since.")
    expect_whole(place, [saves + 2, *range(saves, 0, -1)], after="the storm")
    tries, seconds = sum(each.tries for each in told), max(each.all.seconds for each in told)
    return (
        f"{saves} saves in the storm ended well; with all refused, one failed after {seconds:.1f} s and {tries} tries."
    )
