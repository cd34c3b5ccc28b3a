"""What several drills of saves ask: exactly these are committed, and each is whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptstore.checkpoint import Checkpoint
from ckptstore.drills.place import Place, expect
from ckptstore.drills.told import FINE, Ended


def expect_whole(place: Place, marks: Sequence[int], *, after: str) -> None:
    """Check that `step-<mark>` of exactly these marks may be selected, newest first, and holds nothing else.

    Raises:
        NotAsPromised: Another one may, or one is damaged or a mixture.
    """
    opened = place.opened()
    found, wanted = [each.checkpoint_id for each in opened.checkpoints()], [f"step-{mark}" for mark in marks]
    expect(found == wanted, f"After {after}, committed are {found}, not {wanted}.")
    damaged = [verdict.findings[0].message for verdict in opened.verify_kept(level="full") if verdict.findings]
    expect(not damaged, f"After {after}, a verification found: {damaged[:1]}")
    for mark in marks:
        expect_marked(opened.get(f"step-{mark}"), mark)


def expect_marked(checkpoint: Checkpoint, mark: int) -> None:
    """Check that every number in a checkpoint is its mark.

    Raises:
        NotAsPromised: One is not.
    """
    for name in checkpoint.keys:
        expect(
            bool(np.all(checkpoint.read(name) == mark)), f"{name} of {checkpoint.checkpoint_id} is not what was saved."
        )


def expect_kinds(told: Sequence[Sequence[Ended]], kinds: Sequence[str]) -> None:
    """Check how the saves of each rank ended, one after the other.

    Raises:
        NotAsPromised: One ended otherwise.
    """
    for rank, saves in enumerate(told):
        for number, (done, kind) in enumerate(zip(saves, kinds, strict=True), 1):
            expect(done.kind == kind, f"Save {number} of rank {rank} ended as {done}; promised is {kind}.")
            expect(kind == FINE or bool(done.hint), f"Save {number} of rank {rank} does not say what to do: {done}")
