"""DCP's own calls, with our errors unwrapped."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, MutableMapping
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckptstore.errors import CkptStoreError, InvalidInputError, StalledError, UnsupportedError
from storage_writers.agreement import at_rank, gravest
from storage_writers.planners import StrictLoadPlanner
from storage_writers.reader import CkptStoreReader
from storage_writers.writer import CkptStoreWriter

OUTSTANDING_SECONDS = 1800.0
"""How long an async save waits for the one before."""


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: CkptStoreWriter,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save as `dcp.save` does, after the writer's outstanding async save, if there is one.

    Raises:
        StalledError: The async save before has not ended.
        CkptStoreError: The gravest of ours; its `rank` stands in the facts.
        CheckpointException: Only others failed.

    If killed: see `CkptStoreWriter.finish`.
    """
    _check(state_dict, storage_writer, CkptStoreWriter)
    wait(storage_writer)
    storage_writer.forget()
    try:
        return cast(
            "Metadata",
            state_dict_saver.save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=storage_writer,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            ),
        )
    except (CheckpointException, RuntimeError) as failed:
        ours = _ours(failed, storage_writer)
        if ours is None:
            raise
        raise ours from failed


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: CkptStoreReader,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load as `dcp.load` does, with a planner that leaves the target whole until everything is checked.

    Raises:
        CkptStoreError: The gravest of ours; its `rank` stands in the facts.
        CheckpointException: Only others failed.
    """
    _check(state_dict, storage_reader, CkptStoreReader)
    storage_reader.forget()
    try:
        state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner or StrictLoadPlanner(allow_missing=storage_reader.allow_missing),
            process_group=process_group,
            no_dist=no_dist,
        )
    except (CheckpointException, RuntimeError) as failed:
        ours = _ours(failed, storage_reader)
        if ours is None:
            raise
        raise ours from failed


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: CkptStoreWriter,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    wait_seconds: float = OUTSTANDING_SECONDS,
) -> Future[Metadata]:
    """Copy the state to host memory and save it in the background, on the writer's own process group.

    One save of a writer is outstanding at a time: this call first waits for the one before. Collective, like `save`.

    Args:
        state_dict: Saved as it is at the time of the call.
        checkpoint_id: The checkpoint's name.
        storage_writer: Keeps the outstanding save.
        planner: DCP's.
        process_group: Of the background save; by default `storage_writer.process_group`. Never one that trains.
        wait_seconds: How long the save before is waited for.

    Returns:
        A future whose `result()` and `exception()` give our error, unwrapped as by `save`.

    Raises:
        UnsupportedError: A value cannot be copied; it is named. The other ranks hear that this one did not come.
        StalledError: The save before has not ended in time.
        CkptStoreError: The save before failed, and nobody has asked its future yet.

    If killed: see `CkptStoreWriter.finish`.
    """
    _check(state_dict, storage_writer, CkptStoreWriter)
    wait(storage_writer, seconds=wait_seconds)
    storage_writer.forget()
    group = process_group if process_group is not None else storage_writer.process_group
    with storage_writer.handing_over(), _naming_what_cannot_be_copied(state_dict):
        inner = state_dict_saver.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=group,
        )
    outer = SaveFuture(storage_writer)
    cast("Future[Metadata]", inner).add_done_callback(outer.follow)
    storage_writer.outstanding = outer
    return outer


def wait(storage_writer: CkptStoreWriter, *, seconds: float = OUTSTANDING_SECONDS) -> None:
    """Wait until the writer's async save, if one is outstanding, has ended on this rank.

    Raises:
        StalledError: It has not, within `seconds`.
        CkptStoreError: It failed, and nobody has asked its future yet.
    """
    outstanding = storage_writer.outstanding
    if outstanding is None:
        return
    told = outstanding.asked
    try:
        error = outstanding.exception(timeout=seconds)
    except TimeoutError:
        raise StalledError(
            f"The async save before has not ended within {seconds:g} s.",
            hint="Save less often, or look at what the store is doing.",
        ) from None
    storage_writer.outstanding = None
    if error is not None and not told:
        raise error


class SaveFuture(Future[Metadata]):
    """A save under way. It cannot be cancelled: the other ranks are saving too."""

    def __init__(self, storage_writer: CkptStoreWriter) -> None:
        super().__init__()
        self._storage_writer = storage_writer
        self.asked = False
        """Whether somebody has been told how it ended."""
        self.set_running_or_notify_cancel()

    def follow(self, inner: Future[Metadata]) -> None:
        """End as `inner` did."""
        error = inner.exception()
        if error is None:
            self.set_result(inner.result())
            return
        ours = _ours(error, self._storage_writer)
        if ours is not None and ours is not error:
            ours.__cause__ = error
        self.set_exception(ours or error)

    def result(self, timeout: float | None = None) -> Metadata:
        """Return DCP's metadata, or raise what went wrong."""
        result = self.exception(timeout)
        if result is not None:
            raise result
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong, or None."""
        error = super().exception(timeout)
        self.asked = True
        return error


def cause(error: BaseException) -> CkptStoreError | None:
    """Return our error in what DCP raised: the gravest, of the lowest rank; None if there is none of ours.

    Fenced goes before an unknown commit, before damage, before the rest; a rank that did not come is last, because it
    is often only the echo of what happened there. Its rank stands in the facts.
    """
    if isinstance(error, CkptStoreError):
        return error
    if not isinstance(error, CheckpointException):
        return None
    failures = sorted(error.failures.items())
    ours = [at_rank(each, rank) for rank, (each, _) in failures if isinstance(each, CkptStoreError)]
    return gravest(ours) if ours else None


def _ours(error: BaseException, side: CkptStoreWriter | CkptStoreReader) -> CkptStoreError | None:
    """Return our error in what came out of DCP, or the one that says which ranks were lost; None if it is not ours.

    A bare RuntimeError is one of DCP's own collectives: all else that fails after the begin comes in a
    CheckpointException.
    """
    return side.lost() if isinstance(error, RuntimeError) else cause(error)


def _check(state_dict: object, side: object, kind: type) -> None:
    """Check what would otherwise end in an AttributeError.

    Raises:
        InvalidInputError: The state is no dict, or the writer or reader is none of ours.
    """
    if not isinstance(state_dict, MutableMapping):
        raise InvalidInputError(
            f"A state must be a dict, not {state_dict!r:.80}.", hint="Pass {'model': model.state_dict(), ...}."
        )
    if not isinstance(side, kind):
        raise InvalidInputError(
            f"This needs a {kind.__name__}, not {side!r:.80}.", hint=f"Pass storage_writers.{kind.__name__}(URL)."
        )


@contextlib.contextmanager
def _naming_what_cannot_be_copied(state_dict: dict[str, Any]) -> Iterator[None]:
    """Let out what the copy of a state into host memory raises as ours, with the key."""
    try:
        yield
    except CkptStoreError:
        raise
    except Exception as error:
        key = next((key for key, value in flatten_state_dict(state_dict)[0].items() if not _copies(value)), None)
        raise UnsupportedError(
            f"The value of {key} cannot be copied for a background save: {type(error).__name__}: {error!s:.300}",
            hint="Leave it out of the state, or store plain values instead.",
            key=key,
        ) from error


def _copies(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    try:
        copy.deepcopy(value)
    except Exception:  # noqa: BLE001  (whatever a value of the user's raises)
        return False
    return True
