"""DCP's own calls, with our errors unwrapped."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ckptstore.errors import CkptStoreError, StalledError
from storage_writers.agreement import agree, at_rank, gravest, in_our_words, work_seconds
from storage_writers.given import check_given, naming_what_cannot_be_copied, whole
from storage_writers.planners import StrictLoadPlanner
from storage_writers.reader import CkptStoreReader, LoadSession
from storage_writers.save_planner import SavePlanner
from storage_writers.saving import SaveSession
from storage_writers.survivors import is_loss
from storage_writers.writer import CkptStoreWriter

OUTSTANDING_SECONDS = 1800.0
"""How long an async save waits for the one before."""


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: CkptStoreWriter,
    planner: AnySavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save as `dcp.save` does, after the writer's outstanding async save, if there is one.

    Raises:
        StalledError: The async save before has not ended.
        Exception: What a `state_dict()` of the user's raised, on the ranks where it did; the others miss them.
        CkptStoreError: The gravest of ours; its `rank` stands in the facts.
        CheckpointException: Only others failed.
        KeyboardInterrupt: It came to this rank once the save was committed; a note says in which slot.

    If killed: see `CkptStoreWriter.finish`.
    """
    check_given(state_dict, storage_writer, CkptStoreWriter)
    wait(storage_writer)
    session = _session(storage_writer)
    session.forget()
    plain = _plain_to_save(state_dict, session)
    try:
        return cast(
            "Metadata",
            state_dict_saver.save(
                plain if planner else whole(plain),
                checkpoint_id=checkpoint_id,
                storage_writer=storage_writer,
                planner=planner or SavePlanner(),
                process_group=process_group,
                no_dist=no_dist,
            ),
        )
    except (CheckpointException, RuntimeError) as failed:
        ours = _ours(failed, session)
        if ours is None:
            raise
        if session.save is not None and (interrupt := session.save.interrupt) is not None:
            interrupt.add_note(ours.message)  # it was held back until the commit was decided
            raise interrupt from None
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
        Exception: What a `state_dict()` or `load_state_dict()` of the user's raised, on the ranks where it did.
        CkptStoreError: The gravest of ours; its `rank` stands in the facts.
        CheckpointException: Only others failed.
    """
    check_given(state_dict, storage_reader, CkptStoreReader)
    session = storage_reader._session  # noqa: SLF001  (its other side is here)
    session.forget()
    elements = dict(state_dict)
    plain = _plain(elements)
    try:
        state_dict_loader.load(
            plain if planner else whole(plain),
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner or StrictLoadPlanner(allow_missing=session.allow_missing),
            process_group=process_group,
            no_dist=no_dist,
        )
    except (CheckpointException, RuntimeError) as failed:
        ours = _ours(failed, session)
        if ours is None:
            raise
        raise ours from failed
    for key in sorted(elements):
        if _is_stateful(elements[key]):
            elements[key].load_state_dict(plain[key])
        else:
            state_dict[key] = plain[key]


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: CkptStoreWriter,
    planner: AnySavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    wait_seconds: float = OUTSTANDING_SECONDS,
) -> Future[Metadata]:
    """Copy the state to host memory and save it in the background, on the writer's own process group.

    One save of a writer is outstanding at a time: this call first waits for the one before. Collective, like `save`.

    Args:
        state_dict: Saved as it is at the time of the call.
        checkpoint_id: The checkpoint's name.
        storage_writer: Keeps the outstanding save.
        planner: By default a `SavePlanner`.
        process_group: Of the background save; by default `storage_writer.process_group`. Never one that trains.
        wait_seconds: How long the save before is waited for.

    Returns:
        A future whose `result()` and `exception()` give our error, unwrapped as by `save`.

    Raises:
        InvalidInputError: The state is no dict, or the writer is none of ours.
        UnsupportedError: A value cannot be copied, and it is named; the others miss this rank.
        StalledError: The save before has not ended in time.
        CkptStoreError: The save before failed, and nobody has asked its future yet: the same on all ranks.
        Exception: What a `state_dict()` of the user's raised, on the ranks where it did; the others miss them.

    If killed: see `CkptStoreWriter.finish`.
    """
    check_given(state_dict, storage_writer, CkptStoreWriter)
    wait(storage_writer, seconds=wait_seconds)
    session = _session(storage_writer)
    session.forget()
    group = process_group if process_group is not None else storage_writer.process_group
    outer = session.outstanding = SaveFuture(session)  # on every rank that calls, however it fares: see `wait`
    try:
        plain = _plain_to_save(state_dict, session)
        with naming_what_cannot_be_copied(plain):
            inner = state_dict_saver.async_save(
                plain,
                checkpoint_id=checkpoint_id,
                storage_writer=storage_writer,
                planner=planner or SavePlanner(),
                process_group=group,
            )
    except BaseException as error:
        outer.set_exception(error)
        outer.asked = True
        raise
    cast("Future[Metadata]", inner).add_done_callback(outer.follow)
    return outer


def wait(storage_writer: CkptStoreWriter, *, seconds: float = OUTSTANDING_SECONDS) -> None:
    """Wait until the writer's async save, if one is outstanding, has ended on all ranks. Collective, like `save`.

    Raises:
        StalledError: It has not ended on some rank within `seconds`.
        DisagreementError: A rank did not come. The save is outstanding still.
        CkptStoreError: It failed on some rank, and no such rank has asked its future yet; the same on all ranks.
        CheckpointException: The same, and what failed on this rank is none of ours.
    """
    session = _session(storage_writer)
    outstanding = session.outstanding
    if outstanding is None:
        return
    error, stalled = None, None
    try:
        error = outstanding.ended(seconds)
    except TimeoutError:
        stalled = StalledError(
            f"The async save before has not ended within {seconds:g} s.",
            hint="Save less often, or look at what the store is doing.",
        )

    def mine() -> _End:
        if stalled is not None:
            raise stalled
        return (error if error is None else in_our_words(error, "The async save before failed")), outstanding.asked

    peers = session.peers()
    peers = dataclasses.replace(peers, channel=f"{peers.channel}/wait")
    owed = agree(peers, mine, _owed, seconds=session.seconds + work_seconds(peers))
    session.outstanding = None
    if owed is None:
        return
    if error is None:
        raise owed
    if peers.store is None or not isinstance(error, CkptStoreError):
        raise error
    raise owed from error


_End = tuple[CkptStoreError | None, bool]
"""How a save ended on a rank, and whether somebody there has asked."""


def _owed(ends: Sequence[_End]) -> CkptStoreError | None:
    """Return what all ranks must be told: if a save failed, and nobody asked where it did."""
    failed = [(error, asked) for error, asked in ends if error is not None]
    return gravest([error for error, _ in failed]) if failed and not any(asked for _, asked in failed) else None


class SaveFuture(Future[Metadata]):
    """A save under way. It cannot be cancelled: the other ranks are saving too."""

    def __init__(self, session: SaveSession) -> None:
        super().__init__()
        self._session = session
        self.asked = False
        """Whether somebody has been told how it ended."""
        self.set_running_or_notify_cancel()

    def follow(self, inner: Future[Metadata]) -> None:
        """End as `inner` did."""
        error = inner.exception()
        if error is None:
            self.set_result(inner.result())
            return
        ours = _ours(error, self._session)
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
        error = self.ended(timeout)
        self.asked = True
        return error

    def ended(self, timeout: float | None) -> BaseException | None:
        """Return what went wrong, or None, telling nobody."""
        return super().exception(timeout)


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


def _ours(error: BaseException, session: SaveSession | LoadSession) -> CkptStoreError | None:
    """Return our error in what came out of DCP, or the one that says which ranks were lost; None if it is not ours."""
    return session.lost() if is_loss(error) else cause(error)


def _session(storage_writer: CkptStoreWriter) -> SaveSession:
    return storage_writer._session  # noqa: SLF001  (its other side is here)


def _plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with each `Stateful` asked for its own, as DCP does: what that raises is not of DCP."""
    return {key: value.state_dict() if _is_stateful(value) else value for key, value in state_dict.items()}


def _is_stateful(value: Any) -> bool:
    """Ask tensors nothing: of 50,000 it takes half a second whether they have a protocol's methods."""
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def _plain_to_save(state_dict: dict[str, Any], session: SaveSession) -> dict[str, Any]:
    try:
        return _plain(state_dict)
    except BaseException:
        session.descriptions.take_said()  # it was said of this save
        raise
