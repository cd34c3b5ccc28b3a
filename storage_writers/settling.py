"""Before the next save, the ranks say how the last one ended, and all do the same about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckptstore.errors import BusyError, CkptStoreError, DisagreementError, InvalidInputError, StalledError
from ckptstore.options import check_counts, check_seconds
from storage_writers.agreement import gravest, in_our_words
from storage_writers.outstanding import Outstanding

WhenBusy = Literal["wait", "skip", "raise"]
"""What becomes of a save while another is in flight."""


@dataclass(frozen=True)
class Limits:
    """What bounds the saves of a writer. See `CkptStoreWriter`.

    Raises:
        InvalidInputError: A value is outside of what is allowed.
    """

    when_busy: WhenBusy = "wait"
    busy_timeout_seconds: float = 1800.0
    commit_timeout_seconds: float = 3600.0
    staging_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.when_busy not in get_args(WhenBusy):
            raise InvalidInputError(
                f"when_busy must be one of {', '.join(get_args(WhenBusy))}, not {self.when_busy!r:.80}.",
                hint="Pass when_busy='wait', or leave it out.",
                option="when_busy",
            )
        check_seconds(
            busy_timeout_seconds=self.busy_timeout_seconds, commit_timeout_seconds=self.commit_timeout_seconds
        )
        if self.staging_bytes is not None and self.staging_bytes != 0:
            check_counts(staging_bytes=self.staging_bytes)


MAX_GIVEN_UP = 2
"""How many saves that were given up may hold a thread and memory: then nothing is staged any longer."""


@dataclass(frozen=True)
class End:
    """How the last save ended on a rank.

    Args:
        ended: It has, or was given up.
        error: What went wrong.
        told: Somebody on this rank was told.
        given_up: Its time was over; its thread may still run.
        worker_lost: The process that saved cannot save again.
        held: Saves that were given up before and have not ended, as a share of what is allowed.
    """

    ended: bool = True
    error: CkptStoreError | None = None
    told: bool = False
    given_up: bool = False
    worker_lost: bool = False
    held: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What all ranks do.

    Args:
        error: Is raised.
        busy: The last save is outstanding still.
        given_up: It was given up; nothing that it holds is used again.
        worker_lost: The process that saves is replaced on all ranks.
        apart: Ranks are in different calls; those raise that are in an earlier one.
    """

    error: CkptStoreError | None = None
    busy: bool = False
    given_up: bool = False
    worker_lost: bool = False
    apart: bool = False


def end_of(last: Outstanding | None, *, seconds: float, held: float) -> End:
    """Wait for the last save and say how it ended here.

    Args:
        last: None if there is none.
        seconds: How long it is waited for.
        held: See `End`.
    """
    if last is None:
        return End(held=held)
    if last.future is None:  # DCP raised what was wrong
        last.refuse(CkptStoreError("An async save was not begun."))
    try:
        error = last.wait(seconds)
    except TimeoutError:
        return End(ended=False, held=held)
    ours = None if error is None else in_our_words(error, f"{last.name} failed")
    return End(error=ours, told=last.told, given_up=not last.ended, worker_lost=last.worker_lost, held=held)


def apart(calls: Sequence[int | None], latest: int) -> Verdict | None:
    """Return what ranks do that meet in different calls, as each counts them or does not know; None if it is one."""
    behind = [rank for rank, call in enumerate(calls) if call is not None and call != latest]
    if not behind:
        return None
    error = DisagreementError(
        f"Ranks are in different calls: {len(calls) - len(behind)} in call {latest}, the others in an earlier one.",
        hint="A call was interrupted on some ranks alone: it failed, and the next one meets again.",
        ranks=behind,
    )
    return Verdict(error, busy=True, apart=True)


def judge(ends: Sequence[End], when_busy: WhenBusy, seconds: float, *, before: Sequence[End] = ()) -> Verdict:
    """Return what all ranks do about the last save.

    Args:
        ends: How it ended, by rank.
        when_busy: What to do if it has not, somewhere.
        seconds: How long it was waited for.
        before: How another writer's ended, which is not told here; by rank.
    """
    for each in (before, ends):
        if not all(end.ended for end in each):
            return Verdict(_busy(each, when_busy, seconds), busy=True)
    given_up = any(end.given_up for end in (*before, *ends))
    error = _owed(ends)
    if error is None and any(end.held >= 1 for end in ends):
        error = BusyError(
            "Saves that were given up have not ended, and hold threads and memory.",
            hint="Restart this job: the store, or the file system under it, does not answer.",
            ranks=[rank for rank, end in enumerate(ends) if end.held >= 1],
        )
    return Verdict(error, given_up=given_up, worker_lost=any(end.worker_lost for end in (*before, *ends)))


def _busy(ends: Sequence[End], when_busy: WhenBusy, seconds: float) -> CkptStoreError | None:
    ranks = [rank for rank, end in enumerate(ends) if not end.ended]
    if when_busy == "skip":
        return None
    if when_busy == "raise":
        hint = "Call writer.wait() first, or pass when_busy='wait'."
        return BusyError("The async save before has not ended.", hint=hint, ranks=ranks)
    return StalledError(
        f"The async save before has not ended within {seconds:g} s.",
        hint="Save less often, or look at what the store is doing.",
        ranks=ranks,
    )


def _owed(ends: Sequence[End]) -> CkptStoreError | None:
    """Return what all ranks must be told: if the save failed, and nobody was told where it did."""
    root = ends[0]
    if root.ended and not root.given_up and root.error is None and any(end.given_up for end in ends):
        return None  # it was committed; another rank's thread hangs
    failed = [end for end in ends if end.error is not None]
    if not failed or any(end.told for end in failed):
        return None
    certain = [end.error for end in failed if not end.given_up] if not root.given_up else [root.error]
    return gravest([error for error in certain if error is not None] or [end.error for end in failed if end.error])
