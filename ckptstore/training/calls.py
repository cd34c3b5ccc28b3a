"""One save and one resume, for those who own their loop; `Checkpointer` does both for those who do not."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist

import storage_writers as sw
from ckptstore.errors import InvalidInputError
from ckptstore.events import Observer, silent
from ckptstore.maintenance.retention import Keep
from ckptstore.options import LogOptions, TransferOptions, check_flags, check_kinds
from ckptstore.protocol.verify import Level
from ckptstore.training import resuming, saving
from ckptstore.training.asked import Asked
from ckptstore.training.compat import Matrix
from ckptstore.training.gate import names_given
from ckptstore.training.meeting import Meeting
from ckptstore.training.report import ResumeReport
from ckptstore.training.state import TrainingState
from ckptstore.training.told import tell_resumed


def save(  # noqa: PLR0913  (a face takes written-out keywords)
    state: TrainingState,
    writer: sw.CkptStoreWriter,
    *,
    checkpoint_id: str | None = None,
    metrics: Mapping[str, float] | None = None,
    tags: Sequence[str] = (),
    keep: Keep | None = None,
    background: bool = False,
    process_group: dist.ProcessGroup | None = None,
    allow_one_rank: bool = False,
) -> sw.SaveFuture | None:
    """Save a training state; in the background, return as soon as it may be changed. Collective.

    Args:
        state: Is not changed.
        writer: Of the run, and of the same ranks.
        checkpoint_id: The name; by default after the step.
        metrics: What was measured, by name.
        tags: Labels.
        keep: What is to be kept; it is recorded, and deletes nothing itself.
        background: Save while the training goes on.
        process_group: The ranks; None: all. The save uses a gloo group of its own of the same ranks, never this one.
        allow_one_rank: This process is alone, though others run.

    Returns:
        What a save in the background ends in; None if it has ended.

    Raises:
        UnsupportedError: A value cannot be stored; its place is named. On all ranks, before anything is uploaded.
        DisagreementError: Ranks hold different values of what must be the same.
        CkptStoreError: See `storage_writers.save` and `storage_writers.async_save`.

    If killed: the whole checkpoint or none of it.
    """
    _check_state(state)
    check_flags(background=background, allow_one_rank=allow_one_rank)
    check_kinds(keep=(keep, Keep))
    meeting = Meeting(process_group, one_rank=allow_one_rank)
    said = saving.Said(metrics, tags, keep, checkpoint_id)
    return saving.save(state, writer, meeting, said, background=background)


def resume(  # noqa: PLR0913  (the same)
    state: TrainingState,
    url: str | os.PathLike[str],
    *,
    checkpoint_id: str | None = None,
    step: int | None = None,
    seq: int | None = None,
    only: Collection[str] | None = None,
    level: Level = "exists",
    allow: Collection[str] = (),
    matrix: Matrix | None = None,
    process_group: dist.ProcessGroup | None = None,
    allow_one_rank: bool = False,
    engine: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    transfer: TransferOptions | None = None,
    log: LogOptions | None = None,
    observer: Observer = silent,
) -> ResumeReport:
    """Let a training state be what was saved, or report that nothing was. Collective.

    Args:
        state: Is changed only after everything that can be checked before was checked, on all ranks.
        url: Root of the run.
        checkpoint_id: One checkpoint by its name; without it, `step` and `seq` the newest that is whole.
        step: The same by its global step.
        seq: The same by its position in the log.
        only: Components to take, such as `("model",)`; the rest stays as it is.
        level: How deep a checkpoint is verified before it is chosen: `exists`, `etag` or `full`.
        allow: Names of fingerprints, components and facts that may differ.
        matrix: Which changes of topology may be resumed.
        process_group: The ranks; None: all.
        allow_one_rank: This process is alone, though others run.
        engine: What moves the bytes, where a scheme has several.
        storage_options: Of the store's engine.
        transfer: How bytes are moved.
        log: Who must have signed the run's records.
        observer: Hears of how it ended.

    Raises:
        NotFoundError: There is no such checkpoint. UncommittedError: it was never committed.
        IncompatibleStateError: It may not be loaded here; every difference is named, and what would open the way.
        ResumeError: There are checkpoints and none is whole, or what was restored is not what was saved.
        IntegrityError: The log is damaged, or the one that was asked for.
        DisagreementError: A rank did not come, or was built otherwise.
        InvalidInputError: `only` names what the state does not have, or what each rank has for itself.
    """
    _check_state(state)
    check_flags(allow_one_rank=allow_one_rank)
    check_kinds(matrix=(matrix, Matrix), log=(log, LogOptions))
    asked = Asked(
        os.fspath(url),
        checkpoint_id=checkpoint_id,
        step=step,
        seq=seq,
        only=None if only is None else tuple(sorted(names_given("only", only))),
        level=level,
        matrix=matrix,
        allow=names_given("allow", allow),
        engine=engine,
        storage_options=storage_options,
        transfer=transfer,
        log=log,
        observer=observer,
    )
    began, meeting = time.monotonic(), Meeting(process_group, one_rank=allow_one_rank)
    report = resuming.resume(state, asked, meeting)
    if not report.is_fresh:
        tell_resumed(observer, report, time.monotonic() - began, rank=meeting.rank, is_own=only is None)
    return report


def _check_state(state: TrainingState) -> None:
    if not isinstance(state, TrainingState):
        raise InvalidInputError(f"state must be a TrainingState, not {state!r:.80}.", hint="Make one of the model.")
