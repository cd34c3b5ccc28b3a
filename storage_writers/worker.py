"""The process in which DCP saves (`AsyncCheckpointerType.PROCESS`), as seen from the one that trains.

DCP keeps one a process, and never starts another: after it has died every later save fails.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException

from ckptstore.errors import CkptStoreError, CommitUnknownError, UnavailableError

if TYPE_CHECKING:
    from storage_writers.outstanding import Outstanding


def explained(error: BaseException, save: Outstanding) -> CkptStoreError | None:
    """Return what it means that DCP's worker failed with something that no save raises: it is lost, or cut off."""
    if isinstance(error, CheckpointException | CkptStoreError):
        return None
    save.worker_lost = True
    what = f"The process that wrote {save.name} failed or was killed: {type(error).__name__}: {error!s:.300}."
    if save.is_root:
        return CommitUnknownError(f"{what} Whether it was committed is not known.")
    return UnavailableError(what, hint="Save again: a new process is started. It must be able to import what it saves.")


def kill() -> None:
    """Kill this process's worker, if there is one."""
    process: Any = getattr(executor._CHECKPOINT_PROCESS, "_save_process", None)  # noqa: SLF001  (it has no other name)
    if process is not None:
        process.kill()


def forget() -> None:
    """Let DCP start another worker, here; on all ranks together, because they come from one group."""
    kill()
    with contextlib.suppress(OSError):
        executor._CHECKPOINT_PROCESS = None  # noqa: SLF001  (it has no other name)
