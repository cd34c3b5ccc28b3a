"""Drill 5: the run goes on with another number of ranks."""

from __future__ import annotations

import math

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import TRAIN, check_resumed, rows_of

TOLERANCE = 1e-4
"""Relative: sums of float32 in another order."""
FORBIDDEN = [{"from": {"dp": 2, "fsdp": 2, "zero": 3}, "to": {"dp": 3, "fsdp": 3, "zero": 3}, "status": "forbidden"}]


def other_world(place: Place) -> str:
    """Resume two ranks' checkpoint on one and on three: every value is right, and the matrix is obeyed."""
    with place.ranks(2, TRAIN, until=2, every_steps=2) as ranks:
        digest = ranks.results()[0]["digest"]
    (saved,) = place.opened().checkpoints()
    with place.ranks(3, TRAIN, until=0, matrix=FORBIDDEN) as ranks:
        for rank, outcome in enumerate(ranks.outcomes()):
            refused = outcome.error is not None and "IncompatibleStateError" in outcome.error.kinds
            expect(refused, f"The matrix forbids it, and rank {rank} was not refused for that: {outcome}.")
    losses = {}
    for world_size in (2, 1, 3):
        with place.ranks(world_size, TRAIN, until=4, every_steps=100, shape={"seed": 7}) as ranks:
            check_resumed(ranks.results(), saved, digest)
            losses[world_size] = [row.loss for row in rows_of(ranks)]
    for world_size in (1, 3):
        close = [math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(losses[2], losses[world_size], strict=True)]
        expect(all(close), f"Losses of {world_size} ranks are {losses[world_size]}, those of 2 were {losses[2]}.")
    return (
        "What 2 ranks saved, 1 and 3 have bit by bit, with the same losses after; what the matrix forbids is refused."
    )
