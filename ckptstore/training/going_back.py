"""A run that goes back to an older checkpoint: what is newer is set aside before the training goes on."""

from __future__ import annotations

from ckptstore.errors import InvalidInputError
from ckptstore.training.flow import Asked
from ckptstore.training.report import ResumeReport


def check_target(asked: Asked) -> None:
    """Check, before anything is loaded, that the run can go back to what was asked for.

    Raises:
        InvalidInputError: It is set aside itself.
        CkptStoreError: See `CheckpointStore.get`.
    """
    store = asked.open()
    target = store.get(asked.checkpoint_id, step=asked.step, seq=asked.seq)
    if target.seq not in {each.seq for each in store.checkpoints()}:
        name = f"{target.checkpoint_id}@{target.seq}"
        raise InvalidInputError(
            f"{name} is set aside, so the run cannot go on from it.",
            hint=f"Run `ckptstore restore {asked.url} {name}` first, or go back to another one.",
            seq=target.seq,
        )


def set_aside_above(asked: Asked, report: ResumeReport) -> tuple[str, ...]:
    """Let the checkpoint that was resumed be the latest; return the names of those that were newer.

    Raises:
        CkptStoreError: See `CheckpointStore.rollback`.

    If killed: all of them are set aside or none.
    """
    store = asked.open()
    seqs = store.rollback(f"{report.checkpoint_id}@{report.seq}", note="The training went back before it.")
    return tuple(f"{store.get(seq=seq).checkpoint_id}@{seq}" for seq in seqs)
