"""DCP's own calls, with our errors unwrapped."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ckptstore.events import SaveSkipped, tell
from storage_writers.given import check_given, naming_what_cannot_be_copied, whole
from storage_writers.outstanding import SaveFuture, SkippedSave
from storage_writers.planners import StrictLoadPlanner
from storage_writers.reader import CkptStoreReader
from storage_writers.save_planner import SavePlanner
from storage_writers.session import SaveSession, explain
from storage_writers.survivors import cause, interrupt_of, is_loss
from storage_writers.telling import telling_failed_restore
from storage_writers.writer import CkptStoreWriter


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
        StalledError: The async save before has not ended in time, or was given up.
        Exception: What a `state_dict()` of the user's raised, on the ranks where it did; the others miss them.
        CkptStoreError: The gravest of ours; its `rank` stands in the facts.
        CheckpointException: Only others failed.
        KeyboardInterrupt: It came to this rank. Once the save was committed, a note says in which slot.

    If killed: see `CkptStoreWriter.finish`.
    """
    check_given(state_dict, storage_writer, CkptStoreWriter)
    session = _session(storage_writer)
    session.forget()
    try:
        plain = _plain(state_dict)
    except BaseException:
        session.descriptions.take()  # it was said of this save
        raise
    with session.followed():
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
            _raise_interrupt(failed, process_group, no_dist=no_dist)
            ours = explain(failed, session.save)
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
        KeyboardInterrupt: It came to this rank. Targets may hold a mixture.
    """
    check_given(state_dict, storage_reader, CkptStoreReader)
    session = storage_reader._session  # noqa: SLF001  (its other side is here)
    asked = checkpoint_id if checkpoint_id is not None else session.asked[0]
    with telling_failed_restore(storage_reader._observer, None if asked is None else str(asked)):  # noqa: SLF001  (the same)
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
            _raise_interrupt(failed, process_group, no_dist=no_dist)
            ours = session.lost() if is_loss(failed) else cause(failed)
            if ours is None:
                raise
            raise ours from failed
        for key in sorted(elements, key=str):  # on all ranks in one order: a module may call collectives
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
) -> SaveFuture:
    """Copy the state to host memory and save it in the background, on the writer's own process group.

    One save of a writer is outstanding at a time; `when_busy` of the writer says what becomes of the next. Collective,
    like `save`.

    Args:
        state_dict: Saved as it is at the time of the call.
        checkpoint_id: The checkpoint's name.
        storage_writer: Keeps the outstanding save.
        planner: By default a `SavePlanner`.
        process_group: Of the background save; by default `storage_writer.process_group`. Never one that trains.

    Returns:
        A future whose `result()` and `exception()` give our error, unwrapped as by `save`. Of a save that was skipped,
        `skipped` is true and the result None.

    Raises:
        InvalidInputError: The state is no dict, or the writer is none of ours.
        UnsupportedError: A value cannot be copied, and it is named; the others miss this rank.
        StalledError: The save before has not ended in time, or was given up; the same on all ranks.
        BusyError: The save before has not ended, and `when_busy` is `raise`; the same on all ranks.
        CkptStoreError: The save before failed, and nobody has asked its future yet: the same on all ranks.
        Exception: What a `state_dict()` of the user's raised, on the ranks where it did; the others miss them.

    If killed: see `CkptStoreWriter.finish`.
    """
    check_given(state_dict, storage_writer, CkptStoreWriter)
    session = _session(storage_writer)
    session.forget()
    description = session.descriptions.take()
    with session.turn():
        if not session.settle(session.limits.when_busy):
            name = None if checkpoint_id is None else str(checkpoint_id)
            tell(storage_writer._observer, SaveSkipped(name))  # noqa: SLF001  (its other side is here)
            return SkippedSave()
        planner = planner or SavePlanner()
        with session.asking(description) as save:
            plain = _plain(state_dict)
            with naming_what_cannot_be_copied(plain):
                future = state_dict_saver.async_save(
                    plain,
                    checkpoint_id=checkpoint_id,
                    storage_writer=storage_writer,
                    planner=planner,
                    process_group=process_group if process_group is not None else storage_writer.process_group,
                )
            save.adopt(cast("Future[Metadata]", future), explain, planner=planner, kind=SaveFuture)
            if not session.fences:
                session.fence()
        return cast("SaveFuture", future)


def wait(storage_writer: CkptStoreWriter, *, seconds: float | None = None) -> None:
    """Wait until the writer's background save, if one is outstanding, has ended on all ranks. Collective, like `save`.

    Args:
        storage_writer: Keeps it.
        seconds: How long; by default the writer's `busy_timeout_seconds`.

    Raises:
        CkptStoreError: See `CkptStoreWriter.wait`.
    """
    _session(storage_writer).wait(seconds)


def _raise_interrupt(failed: BaseException, process_group: ProcessGroup | None, *, no_dist: bool) -> None:
    """Raise what interrupted this rank, if that is what failed: DCP wraps it like any failure."""
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    interrupt = interrupt_of(failed, 0 if alone else dist.get_rank(process_group))
    if interrupt is not None:
        raise interrupt from failed


def _session(storage_writer: CkptStoreWriter) -> SaveSession:
    return storage_writer._session  # noqa: SLF001  (its other side is here)


def _plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with each `Stateful` asked for its own, as DCP does: what that raises is not of DCP."""
    return {key: value.state_dict() if _is_stateful(value) else value for key, value in state_dict.items()}


def _is_stateful(value: Any) -> bool:
    """Ask tensors nothing: of 50,000 it takes half a second whether they have a protocol's methods."""
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)
