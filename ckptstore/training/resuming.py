"""The way back: from the newest committed checkpoint that is whole to a state that may train. See `flow` for one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import storage_writers as sw
from ckptstore import Checkpoint, CheckpointStore
from ckptstore.errors import (
    CkptStoreError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ResumeError,
)
from ckptstore.training.asked import Asked
from ckptstore.training.flow import Flow
from ckptstore.training.meeting import Meeting
from ckptstore.training.report import PassedOver, ResumeReport
from ckptstore.training.state import TrainingState
from ckptstore.training.told import consumed
from storage_writers.telling import tell_restore_failed, telling_failed_restore


def resume(state: TrainingState, asked: Asked, meeting: Meeting) -> ResumeReport:
    """Let `state` be what was saved, or say that nothing was. Collective, and nothing is written.

    After going back to one checkpoint, the newer ones stay selectable: who goes on to save calls
    `CheckpointStore.rollback` and `storage_writers.begin_incarnation` before, as `Checkpointer.resume` does.

    Args:
        state: Is changed only after everything that can be checked before was checked, on all ranks.
        asked: From what.
        meeting: The ranks.

    Raises:
        NotFoundError: There is no such checkpoint. UncommittedError: it was never committed.
        ConflictError: It was retired meanwhile.
        IncompatibleStateError: It may not be loaded here; every difference is named, and what would open the way.
        ResumeError: There are checkpoints and none is whole, or what was restored is not what was saved.
        IntegrityError: The log is damaged, or was lost, or the one that was asked for is damaged.
        DisagreementError: A rank did not come, or was built otherwise.
        InvalidInputError: `only` names what the state does not have, or what each rank has for itself.
    """
    with telling_failed_restore(asked.observer, asked.checkpoint_id):
        return _resumed(state, asked, meeting)


def _resumed(state: TrainingState, asked: Asked, meeting: Meeting) -> ResumeReport:
    meeting.all_do("asked", lambda: _check_only(state, asked.only))
    store = meeting.all_do("open", asked.open)
    candidates = meeting.led("candidates", lambda: _candidates(store, asked))
    passed_over: list[PassedOver] = []
    untouched = True
    for seq in candidates:
        checkpoint = meeting.all_do("get", partial(store.get, seq=seq))
        flow = Flow(state, asked, meeting, store, checkpoint)
        try:
            report = _run(flow)
        except IntegrityError as error:
            if asked.is_one:
                raise
            at = flow.checkpoint
            tell_restore_failed(asked.observer, error, checkpoint_id=at.checkpoint_id)
            passed_over.append(PassedOver(at.checkpoint_id, at.seq, at.global_step, error.message))
            untouched = untouched and error.facts.get("untouched", True) is True
            continue
        except CkptStoreError as error:
            if untouched:
                raise
            raise _mixed(error, passed_over) from error
        report.passed_over = tuple(passed_over)
        report.steps_lost = _steps_lost(passed_over, report.global_step)
        if passed_over or asked.is_one:  # else it is the newest
            report.samples_lost = meeting.led("lost", partial(_samples_lost, store, checkpoint))
        return report
    if passed_over:
        mixed = "" if untouched else " The state may hold a mixture of them now: build it anew before it trains."
        raise ResumeError(
            f"None of the {len(passed_over)} checkpoints of {store.url} is whole: {passed_over[0].reason}{mixed}",
            hint=f"Run `ckptstore verify {store.url} --all --level full`.",
            damaged=[each.checkpoint_id for each in passed_over],
            untouched=untouched,
        )
    return ResumeReport(world_size=meeting.world_size)


def _run(flow: Flow) -> ResumeReport:
    try:
        return flow.run()
    except ConflictError as error:  # it was retired while it was loaded
        error.hint = f"Build the state anew and resume again. {error.hint}"
        raise
    except (IntegrityError, NotFoundError):
        flow.meeting.led("kept", partial(_check_kept, flow.store, flow.checkpoint))
        raise


def _check_kept(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Raise ConflictError if it was retired meanwhile: then it is not damaged."""
    try:
        store.get(seq=checkpoint.seq)
    except NotFoundError as gone:
        raise ConflictError(
            f"{checkpoint.exact_name} was retired while it was resumed, so its bytes may be gone. {gone.message}",
            hint="Build the state anew and resume again. A pin keeps a checkpoint for as long as it is read.",
            seq=checkpoint.seq,
        ) from gone


def resume_or_begin(
    state: TrainingState, own: Asked, other: Asked | None, meeting: Meeting, lost_from: int | None
) -> tuple[ResumeReport, Asked]:
    """Resume from this run; where it has nothing of its own, from another one. Return from which.

    Args:
        state: See `resume`.
        own: This run.
        other: The other one, if there is one.
        meeting: The ranks.
        lost_from: The slot from which on this run had lost records before it was claimed, or None.

    Raises:
        CkptStoreError: See `resume`.
    """
    report = resume(state, own, meeting)
    report.lost_from = report.lost_from if lost_from is None else lost_from
    if other is None or not report.is_fresh:
        return report, own
    return resume(state, other, meeting), other


def _check_only(state: TrainingState, only: Sequence[str] | None) -> None:
    if only is None:
        return
    known = {*state.parts, *(name.partition(".")[0] for name in state.parts)}
    if unknown := sorted({*only} - known):
        raise InvalidInputError(
            f"only= names {', '.join(unknown)[:200]}, which cannot be taken: the state has no such part, or each rank "
            "has its own.",
            hint=f"Name some of {', '.join(state.parts)}.",
            unknown=unknown,
        )
    if not only:
        raise InvalidInputError("only=() takes nothing.", hint=f"Name some of {', '.join(state.parts)}.")


def _candidates(store: CheckpointStore, asked: Asked) -> list[int]:
    if asked.is_one:
        return [store.get(asked.checkpoint_id, step=asked.step, seq=asked.seq).seq]
    if store.latest() is None:
        return []
    return [each.seq for each in store.checkpoints()]


def _mixed(error: CkptStoreError, passed_over: Sequence[PassedOver]) -> CkptStoreError:
    """Return the same error, which says too what was loaded before."""
    names = ", ".join(each.checkpoint_id for each in passed_over)
    said = type(error)(
        f"{error.message} The state may hold tensors of {names}, damaged and passed over before: build it anew before "
        "it trains.",
        hint=error.hint,
    )
    said.facts = {**error.facts, "untouched": False, "damaged": [each.checkpoint_id for each in passed_over]}
    return said


def _steps_lost(passed_over: list[PassedOver], step: int | None) -> int | None:
    if not passed_over:
        return 0
    newest = passed_over[0].global_step
    return None if newest is None or step is None else max(0, newest - step)


def _samples_lost(store: CheckpointStore, at: Checkpoint) -> int | None:
    """Return by how many samples the run was ahead of `at`, as far as its checkpoints say; None if they do not.

    Nor if they cannot be read now: the state is loaded, and that stands.
    """
    here = consumed(at.committed)
    if here is None:
        return None
    try:
        newer = [consumed(each.committed) for each in store.checkpoints() if each.seq > at.seq]
    except CkptStoreError:
        return None
    return max((each - here for each in newer if each is not None and each > here), default=0)


def check_target(asked: Asked) -> None:
    """Check, before anything is loaded, that the run can go back to what was asked for.

    Raises:
        InvalidInputError: It is set aside itself.
        CkptStoreError: See `CheckpointStore.get`.
    """
    store = asked.open()
    target = store.get(asked.checkpoint_id, step=asked.step, seq=asked.seq)
    if target.seq not in {each.seq for each in store.checkpoints()}:
        name = target.exact_name
        raise InvalidInputError(
            f"{name} is set aside, so the run cannot go on from it.",
            hint=f"Run `ckptstore restore {asked.url} {name}` first, or go back to another one.",
            seq=target.seq,
        )


def go_back(asked: Asked, report: ResumeReport, meeting: Meeting) -> None:
    """Let the checkpoint that was resumed be the latest, and what is saved from now on be of a new incarnation.

    Collective. The report says then what was newer.

    Raises:
        CkptStoreError: See `CheckpointStore.rollback`.

    If killed: all newer ones are set aside, or none.
    """

    def set_aside_above() -> tuple[str, ...]:
        store = asked.open()
        seqs = store.rollback(store.get(seq=report.seq), note="The training went back before it.")
        return tuple(store.get(seq=seq).exact_name for seq in seqs)

    report.set_aside = meeting.led("go back", set_aside_above)
    meeting.all_do("incarnation", lambda: sw.begin_incarnation(asked.root()))
