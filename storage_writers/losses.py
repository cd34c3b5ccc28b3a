"""What a rank knows when another one is gone: torch's collectives raise a bare RuntimeError then, which says little."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from ckptstore.errors import CkptStoreError, CommitUnknownError, DisagreementError
from ckptstore.protocol.fold import Committed

_LOOK = "Look for the first rank that died"
_READ = "Run `ckptstore log URL`; a job that starts again resumes from what is committed."
_RAISES = "torch.distributed.distributed_c10d"


@dataclass
class Progress:
    """How far a save has come on one rank.

    Args:
        name: The checkpoint's.
        rank: Of this process; 0 commits.
        handed_in: This rank has handed in what it wrote: from now on rank 0 may commit without asking it again.
        ended: The commit, on rank 0; or why this rank failed.
    """

    name: str
    rank: int
    handed_in: bool = False
    ended: Committed | BaseException | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Remember what is raised inside: the others may not hear of it."""
        try:
            yield
        except BaseException as error:
            self.ended = error
            raise


def is_loss(error: BaseException) -> bool:
    """Say whether a collective raised `error`: a rank is gone, or did not come in time. It has no type of its own."""
    if not isinstance(error, RuntimeError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == _RAISES


def loss_in_save(progress: Progress | None) -> CkptStoreError:
    """Return what this rank may say of a save in which it lost another one: never more than it knows (I5).

    Args:
        progress: How far the save had come; None if that is not known.
    """
    if progress is None:
        return CommitUnknownError(
            "Other ranks were lost in a save. Whether it was committed is not known here.", hint=f"{_LOOK}. {_READ}"
        )
    name, rank, ended = progress.name, progress.rank, progress.ended
    if isinstance(ended, CkptStoreError):
        return ended
    if isinstance(ended, Committed):
        return CommitUnknownError(
            f"Rank {rank} committed {name} in slot {ended.seq} and then lost other ranks, which may not know of it.",
            hint=f"{_LOOK}. A job that starts again resumes from this checkpoint.",
            rank=rank,
            seq=ended.seq,
        )
    if not progress.handed_in or (rank == 0 and ended is None):
        return DisagreementError(
            f"Rank {rank} lost other ranks in the save of {name}. Nothing was committed.",
            hint=f"{_LOOK}, and start the job again.",
            rank=rank,
        )
    return CommitUnknownError(
        f"Rank {rank} lost other ranks in the save of {name}. Whether it was committed is not known here.",
        hint=f"{_LOOK}. {_READ}",
        rank=rank,
    )


def loss_in_load(failure: Exception | None) -> CkptStoreError:
    """Return what this rank may say of a load in which it lost another one.

    Args:
        failure: Why it had failed on this rank before, if it had.
    """
    if isinstance(failure, CkptStoreError):
        return failure
    return DisagreementError(
        "Other ranks were lost in a load. The target may be a mixture.",
        hint=f"{_LOOK}, and start the job again.",
    )
