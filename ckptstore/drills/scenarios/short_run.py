"""Drill 8: a run is killed, and the steps that it had done since its last save are done again."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import goes_on

AT, PROOF_STEPS = (4, 0), 3


def short_run(place: Place) -> str:
    """Kill a run some steps after a save, and resume: loss, weights and samples are those of the run before it died."""
    gone = goes_on(place, at=AT, until=AT[0] + PROOF_STEPS, shape={"dropout": 0.1}, proof_steps=PROOF_STEPS)
    expect(gone.proof == "proved", f"The proof of the resume says {gone.proof}.")
    return f"{gone.batches} steps after step {AT[0]} were done again, with the same losses, weights and samples."
