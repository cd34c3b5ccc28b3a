"""The private side of a writer: one save in the background at a time, and what was heard of the last one.

Beside the writer only this package's own calls (`calls.py`) use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckptstore.errors import CkptStoreError, UnsupportedError
from ckptstore.events import Observer, SaveAbandoned, silent, tell
from ckptstore.options import check_counts, check_seconds
from ckptstore.protocol.attempt import Description
from ckptstore.protocol.log import RunLog
from storage_writers import environment, ranks, settling, survivors, worker
from storage_writers.agreement import agree, in_our_words, work_seconds
from storage_writers.describing import Descriptions
from storage_writers.outstanding import Gate, Outstanding, call_of_dcp
from storage_writers.saving import Save, agreed
from storage_writers.settling import MAX_GIVEN_UP, End, Verdict, WhenBusy, check_when_busy
from storage_writers.staging import StagingPool


@dataclass(frozen=True)
class Limits:
    """What bounds the saves of a writer. See `CkptStoreWriter`."""

    when_busy: WhenBusy = "wait"
    busy_timeout_seconds: float = 1800.0
    commit_timeout_seconds: float = 3600.0
    staging_bytes: int | None = None

    def __post_init__(self) -> None:
        check_when_busy(self.when_busy)
        check_seconds(
            busy_timeout_seconds=self.busy_timeout_seconds, commit_timeout_seconds=self.commit_timeout_seconds
        )
        if self.staging_bytes is not None and self.staging_bytes != 0:
            check_counts(staging_bytes=self.staging_bytes)


class SaveSession:
    """What a writer keeps between DCP's calls. Picklable: with what its background save records, and nothing live.

    Args:
        group: Of the writer.
        one_rank: This process saves alone.
        seconds: How long a rank that does not come is waited for.
        limits: Of its saves.
        observer: Hears of saves that are given up.
        carried: What the next save records.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        one_rank: bool,
        seconds: float,
        limits: Limits,
        observer: Observer = silent,
        carried: Description | None = None,
    ) -> None:
        self.group, self._one_rank, self.seconds, self.limits = group, one_rank, seconds, limits
        self.descriptions = Descriptions(carried)
        self.outstanding: Outstanding | None = None
        """The background save, until all ranks know how it ended."""
        self.log: RunLog | None = None
        self.fences = 0
        """How many optimizers wait for the staging by themselves."""
        self._observer = observer
        self._pool: StagingPool | None = None
        self._refused: BaseException | None = None
        self._given_up: list[Outstanding] = []
        self._generation = 0
        self._has_staged = False
        self._here = threading.local()

    @property
    def save(self) -> Save | None:
        """The save that this thread began last; None after `forget`."""
        save: Save | None = getattr(self._here, "save", None)
        return save

    def forget(self) -> None:
        """Let go of what this thread saved before, so that `explain` speaks of nothing but the save that begins now."""
        self._here.save = None

    def peers(self) -> ranks.Peers:
        """Return who saves together, as it is now."""
        peers = ranks.peers_of(self.group, one_rank=self._one_rank)
        # A save that was given up may still be asking under the names that it knows.
        return dataclasses.replace(peers, channel=f"{peers.channel}/{self._generation}") if self._generation else peers

    def begin(
        self, checkpoint_id: str | os.PathLike[str] | None, place: Callable[[ranks.Peers], tuple[str, RunLog]]
    ) -> Save:
        """Begin a save on this thread: the one that was staged for it, or one that waits for that one's end.

        Raises:
            CkptStoreError: The ranks do not agree, or the save before failed and nobody was told; the same on all.
        """
        self.forget()
        staged = self.outstanding
        if staged is not None and not staged.begin():
            staged = None
        if staged is not None:
            description, gate = staged.description, staged.gate
        else:
            self.wait()
            description, gate = self.descriptions.take(), Gate(self.limits.commit_timeout_seconds)
        peers = self.peers()
        save = agreed(peers, checkpoint_id, description, lambda: place(peers), gate=gate, seconds=self.seconds)
        if staged is not None:
            save.staged, staged.save = staged.staged, save
        self._here.save = save
        return save

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin to copy a state for the save that DCP begins next; see `CkptStoreWriter.stage`."""
        if not getattr(self._here, "settled", False):
            # DCP cannot be told that there is nothing to save.
            self.settle("raise" if self.limits.when_busy == "skip" else self.limits.when_busy)
        description = self.descriptions.take()
        by_process = call_of_dcp().get("async_checkpointer_type") is AsyncCheckpointerType.PROCESS
        seconds = self.limits.commit_timeout_seconds
        with self.refusing():
            if self._pool is None:
                self._pool = StagingPool(
                    staging_bytes=self.limits.staging_bytes, local_ranks=environment.ranks_here(), shared=by_process
                )
            staged = self._pool.stage(state_dict)
            if by_process:
                _hand_over(staged, seconds)
        self.outstanding = Outstanding(
            description, staged, gate=Gate(seconds), is_root=self.peers().rank == 0, by_process=by_process
        )
        return staged.state

    def follow(self) -> None:
        """Learn of the future that DCP, which is calling us, has made for the save that was staged."""
        staged = self.outstanding
        if staged is not None and staged.future is None:
            call = call_of_dcp()
            if isinstance(future := call.get("upload_future"), Future):
                staged.adopt(future, explain, planner=call.get("planner"))

    def fence(self) -> None:
        """Wait until the caller's tensors may be changed."""
        staged = self.outstanding.staged if self.outstanding is not None else None
        if staged is not None:
            staged.fence(seconds=self.limits.commit_timeout_seconds)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Note what is raised: whoever asks here was told by it why the save of all ranks fails."""
        try:
            yield
        except BaseException as error:
            self._refused, self._has_staged = error, True
            raise
        self._has_staged = True

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Let `stage` on this thread go ahead: the ranks have met."""
        self._here.settled = True
        try:
            yield
        finally:
            self._here.settled = False

    def settle(self, when_busy: WhenBusy, *, seconds: float | None = None) -> bool:
        """Let all ranks do the same about the last background save. Collective.

        Returns:
            Whether it has ended; False only if a save is to be skipped.

        Raises:
            StalledError: It has not ended in time, on some rank.
            BusyError: It has not ended, and that is to be raised.
            DisagreementError: A rank did not come. It is outstanding still.
            CkptStoreError: It failed, and no rank where it did was told; the same on all ranks.
        """
        limit = self.limits.busy_timeout_seconds if seconds is None else seconds
        last = self._last(limit if when_busy == "wait" else 0.0)
        peers = self.peers()
        peers = dataclasses.replace(peers, channel=f"{peers.channel}/wait")
        within = self.seconds + work_seconds(peers)
        self._conclude(
            verdict := agree(peers, lambda: last, lambda ends: settling.judge(ends, when_busy, limit), seconds=within)
        )
        return not verdict.busy

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the last background save, if there ever was one; see `settle`."""
        if self._has_staged:
            self.settle("wait", seconds=seconds)

    def close(self) -> None:
        """Wait for the last background save, and free the memory in which states were staged; see `settle`."""
        try:
            self.wait()
        finally:
            if self.outstanding is None and self._pool is not None:
                pool, self._pool = self._pool, None
                pool.close()

    def _last(self, seconds: float) -> End:
        self._given_up = [save for save in self._given_up if not save.ended]
        # A group that the caller gave cannot be made anew, and a save that was given up may be in it.
        allowed = 1 if self.group is not None and self.group.size() > 1 else MAX_GIVEN_UP
        held = len(self._given_up) / allowed
        if self._refused is not None:
            return End(error=in_our_words(self._refused, "A save was not begun"), told=True, held=held)
        return settling.end_of(self.outstanding, seconds=seconds, held=held)

    def _conclude(self, verdict: Verdict) -> None:
        """Do what all ranks do."""
        last = self.outstanding
        if not verdict.busy:
            self.outstanding = self._refused = None
            if last is not None:
                last.tell()
                if last.future is None:
                    last.drop_state()
            if verdict.worker_lost:
                worker.forget()
            if verdict.given_up:
                self._leave_behind(last)
        if verdict.error is None:
            return
        cause = last.error if last is not None else None
        raise verdict.error from (verdict.error.__cause__ if cause is verdict.error else cause)

    def _leave_behind(self, last: Outstanding | None) -> None:
        """Use nothing again that a save which was given up may still be using."""
        self._generation += 1
        self._pool = self.log = None
        ranks.leave_background_group()
        if last is not None and not last.ended:
            self._given_up.append(last)
            name = last.save.name if last.save is not None else None
            tell(self._observer, SaveAbandoned(name, last.gate.seconds))

    def __reduce__(self) -> tuple[object, ...]:
        # DCP sends the writer to the process that saves from a thread of its own.
        staged, limits, carried = self.outstanding, self.limits, None
        if staged is not None and staged.begin():
            carried = staged.description
            limits = dataclasses.replace(limits, commit_timeout_seconds=max(staged.gate.left(), 0.001))
        return _copied, (self._one_rank, self.seconds, limits, carried)


def explain(error: BaseException, save: Save | None) -> CkptStoreError | None:
    """Return our error in what came out of DCP, or the one that says which ranks were lost; None if it is not ours."""
    if survivors.is_loss(error):
        return save.lost() if save is not None else None
    return survivors.cause(error)


def _hand_over(staged: Any, seconds: float) -> None:
    """Let another process read what is staged: all must be there, because it reads what it is sent at once."""
    if not staged.is_whole:
        staged.end()
        raise UnsupportedError(
            "staging_bytes is less than the state, and another process that saves needs all of it.",
            hint="Leave staging_bytes out, or save in a thread (AsyncCheckpointerType.THREAD).",
        )
    staged.wait_copied(seconds=seconds)


def _copied(one_rank: bool, seconds: float, limits: Limits, carried: Description | None) -> SaveSession:  # noqa: FBT001  (pickle's)
    return SaveSession(None, one_rank=one_rank, seconds=seconds, limits=limits, carried=carried)
