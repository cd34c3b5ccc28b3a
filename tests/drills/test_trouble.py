"""Drills 9 to 16: other jobs, stores in trouble, collectors, signals and clocks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ckptstore.drills.catalog import named
from ckptstore.drills.runner import Conduct, run_drills

NAMES = (
    "two-jobs",
    "lost-reply",
    "expired-credentials",
    "no-room",
    "throttling",
    "collected-while-read",
    "asked-to-stop",
    "stepped-clock",
)


@pytest.fixture
def drilled_anywhere(tmp_path):
    """Run a drill on files, also one that is not applicable there: its faults come from above the store."""

    def drilled_anywhere(name, **conduct):
        drills = [replace(drill, not_on={}) for drill in named(name)]
        report = run_drills(str(tmp_path / "run"), drills, conduct=Conduct(**conduct))
        assert report.left_behind == ()
        return report.verdicts[name]

    return drilled_anywhere


@pytest.mark.parametrize("name", NAMES)
def test_what_is_promised_holds(drilled_anywhere, name):
    verdict = drilled_anywhere(name)
    assert verdict.status == "passed", verdict.seen
    assert verdict.seconds < 60


def test_the_verdict_says_which_job_took_the_run_over(drilled):
    seen = drilled("two-jobs").seen
    assert "job 'second-job'" in seen
    assert "unnamed" not in seen


@pytest.mark.parametrize(
    ("name", "sabotage", "seen"),
    [
        ("two-jobs", "no_fence", "promised is FencedError|did not end|have the terms|never said"),
        ("lost-reply", "no_read_back", "ended as CommitUnknownError"),
        ("expired-credentials", "refusals_are_weather", "ended as UnavailableError"),
        ("no-room", "commits_unseen", "ended as fine; promised is IntegrityError"),
        ("throttling", "no_limit_of_tries", "did not end"),
        ("collected-while-read", "no_pins", "The reader with a pin ended as"),
        ("asked-to-stop", "deaf", "ended with -15, not with 143"),
        ("stepped-clock", "own_clock", r"deleted \d objects within the grace"),
    ],
)
def test_a_product_that_does_not_keep_it_fails(drilled_anywhere, name, sabotage, seen):
    verdict = drilled_anywhere(name, prepare=f"sabotage_of_saves:{sabotage}", timeout_seconds=60.0)
    assert verdict.status == "failed"
    assert re.search(seen, verdict.seen)


def test_where_a_drill_means_nothing_it_says_why(drilled):
    verdict = drilled("expired-credentials")
    assert (verdict.status, verdict.seen) == ("not applicable", "Files have no credentials that end.")
