"""Drill 6: a run is killed after a save between two micro-steps."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import goes_on

MICRO_STEPS = 3
AT = (1, 2)
"""One step is done, and two batches of the next are in the gradients."""


def between_micro_steps(place: Place) -> str:
    """Save with gradients accumulated, and resume: not one batch is lost or counted twice."""
    gone = goes_on(place, at=AT, until=4, shape={"micro_steps": MICRO_STEPS})
    found = gone.resumed["step"], gone.resumed["micro_step"]
    expect(found == AT, f"Saved at step and micro-step {AT}, resumed at {found}.")
    return f"Saved after {AT[1]} of {MICRO_STEPS} micro-steps; the {gone.batches} batches after it were the same again."
