"""What DCP's own `async_save`, which is calling us, does not say: how it saves, and the future in which the save ends.

Nobody else hears of a failure. `storage_writers.async_save` needs none of this, unless an interrupt cuts it off from
the future of a save that runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckptstore.errors import InvalidInputError, UnsupportedError

_ASYNC_SAVE = inspect.unwrap(state_dict_saver.async_save).__code__
_RUN = _WorkItem.run.__code__
_STATE = "staging_future_or_state_dict"
_KIND, _FUTURE, _PLANNER = "async_checkpointer_type", "upload_future", "planner"


def saves_by_process() -> bool:
    """Return whether the `async_save` of DCP that stages now will save in another process.

    Raises:
        UnsupportedError: None calls us on this thread, or it is not the one that we know.
        InvalidInputError: It will save in a thread, on the group that trains.
    """
    call = _call()
    if _KIND not in call or _FUTURE not in _ASYNC_SAVE.co_varnames:
        raise unknown_torch()
    by_process = call[_KIND] is AsyncCheckpointerType.PROCESS
    meets_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not call["no_dist"]
    if meets_others and not by_process and call["process_group"] is None:
        raise InvalidInputError(
            "dcp.async_save would save in the background on the group that trains, and run into its collectives.",
            hint="Pass process_group=writer.process_group to dcp.async_save.",
        )
    return by_process


def future_and_planner() -> tuple[Future[Any], object]:
    """Return the future in which the save ends that DCP has begun, and the planner that it was given.

    Raises:
        UnsupportedError: See `saves_by_process`.
    """
    call = _call()
    future = call.get(_FUTURE)
    if not isinstance(future, Future):
        raise unknown_torch()
    return future, call.get(_PLANNER)


def future_run_here() -> Future[Any] | None:
    """Return the future of the work that this thread of an executor does, as `submit` returns it; None if it is none.

    Who calls `submit` does not get it if an interrupt comes while a thread for it is started.
    """
    return getattr(_variables(_RUN).get("self"), "future", None)


def state_saved_here() -> object:
    """Return what DCP was given to save by a background save that runs on this thread; None if none does.

    Raises:
        UnsupportedError: An executor of this Python does not tell.
    """
    work = _variables(_RUN).get("self")
    if work is None:
        return None
    if not hasattr(work, "kwargs"):
        raise unknown_torch()
    return work.kwargs.get(_STATE)


def unknown_torch() -> UnsupportedError:
    """Return the error of a save that nobody could follow."""
    return UnsupportedError(
        f"How torch {torch.__version__} calls a stager is not known, so nobody would hear how this save ends.",
        hint="Call storage_writers.async_save, on the thread that asks for the save.",
    )


def _call() -> Mapping[str, Any]:
    """Return the variables of DCP's `async_save` that is calling us on this thread; none if it is not."""
    return _variables(_ASYNC_SAVE)


def _variables(code: CodeType) -> Mapping[str, Any]:
    """Return the variables of the innermost call of this code that is under way on this thread; none if none is."""
    frame = sys._getframe(1)  # noqa: SLF001  (the documented way to the stack)
    while frame.f_code is not code:
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    return frame.f_locals
