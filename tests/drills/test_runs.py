"""Drills 1 and 5 to 8: something happens to a run that trains or saves."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["killed-rank", "other-world", "between-micro-steps", "silent-store", "short-run"])
def test_what_is_promised_holds(drilled, name):
    verdict = drilled(name)
    assert verdict.status == "passed", verdict.seen


@pytest.mark.parametrize(
    ("name", "sabotage", "seen"),
    [
        ("killed-rank", "in_place", "step-1"),
        ("other-world", "no_matrix", "was not refused"),
        ("between-micro-steps", "gradients_lost", "before it was killed it was"),
        ("silent-store", "endless_patience", "ended as TimeoutError"),
        ("short-run", "other_random_numbers", "before it was killed it was"),
    ],
)
def test_a_product_that_does_not_keep_it_fails(drilled, name, sabotage, seen):
    verdict = drilled(name, prepare=f"sabotage:{sabotage}")
    assert verdict.status == "failed"
    assert seen in verdict.seen
