"""Drill 9: two jobs write to one run."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.scenarios.whole import expect_kinds, expect_marked
from ckptstore.format.records import Claim, Commit

SAVE = "ckptstore.drills.marked:save_until_refused"
FIRST, SECOND = "first-job", "second-job"
MARK = 1000
"""The first of the second job."""
IN_TIME_SECONDS = 20.0


def two_jobs(place: Place) -> str:
    """Start a second job while the first one saves: the first is fenced, for good, and the second goes on."""
    with place.ranks(WORLD, SAVE, job=FIRST, first=1) as old:
        for _ in range(2):
            old.hear("saved")
        with place.ranks(WORLD, SAVE, job=SECOND, first=MARK) as new:
            new.hear("saved")
            told = old.results(seconds=IN_TIME_SECONDS)
            expect_kinds(told, ["FencedError", "FencedError"])
            for _ in range(2):
                new.hear("saved")
            mark = new.hear("saved")
    opened = place.opened()
    records = [entry.record for entry in opened.records()]
    jobs = [record.job for record in records if isinstance(record, Claim)]
    terms = [record.term for record in records if isinstance(record, Claim)]
    expect(terms == [1, 2], f"The claims in the log have the terms {terms}, not 1 and 2.")
    expect(jobs == [FIRST, SECOND], f"The claims in the log are of {jobs}, not of {[FIRST, SECOND]}.")
    claimed = max(seq for seq, record in enumerate(records) if isinstance(record, Claim))
    late = [seq for seq, record in enumerate(records) if isinstance(record, Commit) and record.term < terms[-1]]
    expect(max(late) < claimed, f"The first job committed in slot {max(late)}, above the claim in {claimed}.")
    latest = opened.latest()
    expect(latest is not None and latest.commit.term == terms[-1], f"The latest is {latest}, of the first job.")
    for checkpoint in opened.checkpoints():
        expect_marked(checkpoint, int(checkpoint.checkpoint_id.removeprefix("step-")))
    return f"The first job was fenced on every rank ({told[0][0].message}); the second saved on, to step-{mark}."
