"""Drill 1: a rank is killed while it writes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ckptstore.drills.place import NotAsPromised, Place, expect
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.stops import Stop

SAVE = "ckptstore.drills.saves:save"
SURVIVE_SECONDS = 25.0
MARKS = 10**9


class Moment(NamedTuple):
    """When a rank is killed.

    Args:
        when: For people.
        stop: Where it is then.
        commits: The commit stands by then, so its checkpoint is whole.
        alone: The others live on, and must learn of it; else they are killed too, as a launcher does.
    """

    when: str
    stop: Stop
    commits: bool = False
    alone: bool = False


COMMIT = Stop(0, "put", "log/", number=2)
"""What a job puts into the log first is its claim."""

MOMENTS = (
    Moment("with a part of its shard sent", Stop(1, "write", "data/")),
    Moment("before its shard was complete", Stop(1, "complete", "data/", before=True)),
    Moment("after its shard was complete", Stop(1, "complete", "data/"), alone=True),
    Moment("before it sent the commit", replace(COMMIT, before=True)),
    Moment("after the commit was stored", COMMIT, commits=True, alone=True),
)


def killed_rank(place: Place) -> str:
    """Kill a rank at several moments of a save: what is selected is whole each time, and the next job goes on."""
    saved(place, mark=1)
    whole = 1
    for number, moment in enumerate(MOMENTS):
        mark = number + 2
        _kill(place, mark, moment)
        whole = mark if moment.commits else whole
        check_whole(place, whole, f"a rank was killed {moment.when}")
    last = len(MOMENTS) + 2
    saved(place, mark=last)
    check_whole(place, last, "the next job saved")
    return f"A rank was killed {len(MOMENTS)} times in a save: {', '.join(each.when for each in MOMENTS)}."


def saved(place: Place, *, mark: int) -> None:
    """Save on ranks that live."""
    with place.ranks(WORLD, SAVE, mark=mark) as ranks:
        ranks.results()


def check_whole(place: Place, mark: int, after: str) -> None:
    """Check that what a reader selects is what was saved under `mark`, every number of it.

    Raises:
        NotAsPromised: It is another one, or a mixture, or damaged.
    """
    opened = place.opened()
    latest = opened.latest()
    if latest is None or latest.checkpoint_id != f"step-{mark}":
        raise NotAsPromised(f"After {after}, the latest is {latest and latest.checkpoint_id}, not step-{mark}.")
    for name in ("weights", "bias"):
        found = latest.read(name)
        wanted = np.arange(len(found)) + mark * MARKS if name == "weights" else np.full(len(found), mark)
        expect(np.array_equal(found, wanted), f"After {after}, {name} of step-{mark} is not what was saved.")
    damaged = [verdict.findings[0].message for verdict in opened.verify_kept(level="full") if verdict.findings]
    expect(not damaged, f"After {after}, a verification found: {damaged[:1]}")


def _kill(place: Place, mark: int, moment: Moment) -> None:
    killed = moment.stop.rank
    with place.ranks(WORLD, SAVE, mark=mark, stops=moment.stop) as ranks:
        ranks.hear("stopped", rank=killed)
        ranks.kill(killed)
        for rank, outcome in enumerate(ranks.outcomes(seconds=SURVIVE_SECONDS) if moment.alone else ()):
            ended_well = outcome.error is None and outcome.died is None
            expect(rank == killed or not ended_well, f"Rank {rank} took the save for done, without rank {killed}.")
