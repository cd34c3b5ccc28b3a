"""The private side of a writer: one save in the background at a time, and what was heard of the last one.

Beside the writer only this package's own calls (`calls.py`) use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ckptstore.errors import CkptStoreError, DisagreementError, StalledError, UnsupportedError
from ckptstore.events import Observer, SaveAbandoned, silent, tell
from ckptstore.protocol.attempt import Description
from ckptstore.protocol.log import RunLog
from storage_writers import environment, ranks, settling, survivors, worker
from storage_writers.agreement import agree, work_seconds
from storage_writers.dcp_frames import future_and_planner, saves_by_process, state_saved_here
from storage_writers.describing import Descriptions
from storage_writers.gates import Gate
from storage_writers.outstanding import GRACE_SECONDS, Outstanding
from storage_writers.saving import Save, agreed
from storage_writers.settling import MAX_GIVEN_UP, End, Limits, Verdict, WhenBusy
from storage_writers.staging import StagingPool
from storage_writers.telling import Telling
from storage_writers.tracks import Track, track_of


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
        self._late: tuple[dict[str, Any], Gate] | None = None
        """Of the last one that was refused before its thread came to it: what DCP saves, and that it may not commit."""
        self.log: RunLog | None = None
        self.fences = 0
        """How many optimizers wait for the staging by themselves."""
        self._observer = observer
        self._pool: StagingPool | None = None
        self._alone = Track()
        self._has_asked = False
        self._here = threading.local()
        self._turn = threading.RLock()
        self._process = os.getpid()

    @property
    def save(self) -> Save | None:
        """The save that this thread began last; None after `forget`."""
        save: Save | None = getattr(self._here, "save", None)
        return save

    def forget(self) -> None:
        """Let go of what this thread saved before, so that `explain` speaks of nothing but the save that begins now."""
        self._here.save = None
        self._leave_parent()

    def _leave_parent(self) -> None:
        """Have nothing to do, after a fork, with a save of the process that was forked: its threads are not here."""
        if self._process != os.getpid():
            self._process, self._turn, self._alone = os.getpid(), threading.RLock(), Track()
            self._pool = self.outstanding = self._late = None
            self._has_asked = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let calls of several threads go one after the other, and count them.

        Raises:
            StalledError: The one of another thread does not end.
        """
        self._leave_parent()
        seconds, turn = self.limits.busy_timeout_seconds, self._turn
        if not turn.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise StalledError(
                f"A call of this writer on another thread has not ended within {seconds:g} s.",
                hint="Save from one thread, or look at what the store is doing.",
            )
        try:
            self._meeting()[1].count()
            yield
        finally:
            turn.release()

    def peers(self) -> ranks.Peers:
        """Return who saves together, as it is now."""
        return self._meeting()[0]

    def _meeting(self) -> tuple[ranks.Peers, Track]:
        """Return who saves together, and the track of their saves."""
        peers = ranks.peers_of(self.group, one_rank=self._one_rank)
        track = track_of(peers, alone=self._alone)
        # A save that was given up may still be asking under the names that it knows.
        channel = f"{peers.channel}/{track.generation}" if track.generation else peers.channel
        return dataclasses.replace(peers, channel=channel), track

    def begin(
        self, checkpoint_id: str | os.PathLike[str] | None, place: Callable[[ranks.Peers], tuple[str, RunLog]]
    ) -> Save:
        """Begin a save on this thread: the one that was staged for it, or one that waits for that one's end.

        Raises:
            CkptStoreError: The ranks do not agree, or the save before failed and nobody was told; the same on all.
        """
        self.forget()
        staged = self._begun_here()
        if staged is not None:
            description, gate, telling = staged.description, staged.gate, staged.telling
            telling.begin()
        else:
            description = self.descriptions.take()
            if self._has_asked or self._meeting()[1].used:
                self.settle("wait")
            gate, telling = Gate(self.limits.commit_timeout_seconds), self._told_in_foreground()
        peers = self.peers()
        try:
            save = agreed(peers, checkpoint_id, description, lambda: place(peers), gate=gate, seconds=self.seconds)
        except BaseException as error:
            telling.end(error)
            raise
        save.telling, telling.name = telling, save.name
        if staged is not None:
            save.staged, staged.save = staged.staged, save
        self._here.save = save
        return save

    def _begun_here(self) -> Outstanding | None:
        """Return the background save that this thread runs, once; None if it runs none.

        Raises:
            StalledError: It was refused before.
        """
        if self._late is not None and state_saved_here() is self._late[0]:
            self._late[1].check()
        save = self.outstanding
        return save if save is not None and save.begin() else None

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Tell how the save in the foreground ends that begins within."""
        self._here.is_followed, self._here.telling = True, None
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            telling: Telling | None = self._here.telling
            self._here.is_followed = False
            if telling is not None:
                telling.end(error)

    def _told_in_foreground(self) -> Telling:
        """Return what is told of a save that begins now on this thread.

        DCP's own `save` calls nothing when it ends, except on rank 0 if it came to the commit.
        """
        before: Telling | None = getattr(self._here, "telling", None)
        if before is not None:
            before.end(CkptStoreError("DCP's call failed before anything was committed."))
        is_told = getattr(self._here, "is_followed", False) or self.peers().rank == 0
        telling = self._here.telling = Telling(self._observer if is_told else silent)
        return telling

    @contextlib.contextmanager
    def asking(self, description: Description) -> Iterator[Outstanding]:
        """Begin a background save of this thread, once the ranks have settled; refuse it with what is raised."""
        self._here.asked = save = self._ask(description, by_process=False)
        try:
            with save.refusing():
                yield save
        finally:
            self._here.asked = None

    def _ask(self, description: Description, *, by_process: bool) -> Outstanding:
        peers, track = self._meeting()
        self.outstanding = track.last = Outstanding(
            description,
            Gate(self.limits.commit_timeout_seconds),
            is_root=peers.rank == 0,
            by_process=by_process,
            generation=track.generation,
            telling=Telling(self._observer, background=True),
        )
        self._has_asked = track.used = True
        return self.outstanding

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin to copy a state for the save that DCP begins next; see `CkptStoreWriter.stage`."""
        save: Outstanding | None = getattr(self._here, "asked", None)
        if save is None:
            by_process, description = saves_by_process(), self.descriptions.take()
            # DCP cannot be told that there is nothing to save.
            self.settle("raise" if self.limits.when_busy == "skip" else self.limits.when_busy)
            save = self._ask(description, by_process=by_process)
        with save.refusing(), save.telling.waiting():
            if self._pool is None:
                self._pool = StagingPool(
                    staging_bytes=self.limits.staging_bytes,
                    local_ranks=environment.ranks_here(),
                    shared=save.by_process,
                )
            save.staged = staged = self._pool.stage(state_dict)
            save.state = staged.state
            if save.by_process:
                _hand_over(staged, self.limits.commit_timeout_seconds)
        return staged.state

    def follow(self) -> bool:
        """Learn of the future of the save that DCP, which is calling us, has begun; return whether it waits for us."""
        if getattr(self._here, "asked", None) is not None:
            return False  # whoever asks will have the future, and waits then
        save = self.outstanding
        if save is not None and save.future is None:
            with save.refusing():
                future, planner = future_and_planner()
                save.adopt(future, explain, planner=planner)
        return not self.fences

    def fence(self) -> None:
        """Wait until the caller's tensors may be changed; who does not hear that they may has refused the save."""
        save = self.outstanding if self._process == os.getpid() else None
        staged = save.staged if save is not None else None
        if save is not None and staged is not None:
            with save.refusing(), save.telling.waiting():
                staged.fence(seconds=round(max(0.0, save.gate.left() + GRACE_SECONDS), 1))
            save.telling.staged()

    def settle(self, when_busy: WhenBusy) -> bool:
        """Let all ranks do the same about the last background save before another begins. Collective.

        It may be another writer's. How that ended is for that one to say.

        Returns:
            Whether it has ended; False only if a save is to be skipped.

        Raises:
            StalledError: It has not ended in time, on some rank.
            BusyError: It has not ended, and that is to be raised.
            DisagreementError: A rank did not come. It is outstanding still.
            CkptStoreError: This writer's failed, and no rank where it did was told; the same on all ranks.
        """
        other = self._meeting()[1].last
        return self._settle(when_busy, self.limits.busy_timeout_seconds, None if other is self.outstanding else other)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for this writer's last background save, if there ever was one; see `settle`."""
        self._leave_parent()
        if self._has_asked:
            with self.turn():
                self._settle("wait", self.limits.busy_timeout_seconds if seconds is None else seconds, None)

    def _settle(self, when_busy: WhenBusy, limit: float, other: Outstanding | None) -> bool:
        peers, track = self._meeting()
        # A group that the caller gave cannot be made anew, and a save that was given up may be in it.
        allowed = 1 if self.group is not None and self.group.size() > 1 else MAX_GIVEN_UP
        held, seconds = track.held() / allowed, limit if when_busy == "wait" else 0.0
        before, last = (settling.end_of(save, seconds=seconds, held=held) for save in (other, self.outstanding))
        meeting = dataclasses.replace(peers, channel=f"{peers.channel}/wait")
        within = self.seconds + work_seconds(peers)

        def judge(of_ranks: Sequence[tuple[int | None, End, End]]) -> tuple[int, Verdict]:
            calls, others, ours = zip(*of_ranks, strict=True)
            latest = max((call for call in calls if call is not None), default=0)
            return latest, settling.apart(calls, latest) or settling.judge(ours, when_busy, limit, before=others)

        verdict = Verdict(busy=True, apart=True)
        while verdict.apart:
            try:
                latest, verdict = agree(meeting, lambda: (track.calls, before, last), judge, seconds=within)
            except DisagreementError:
                track.calls = None  # who did not come may have left out this call, or be in a later one
                raise
            if track.calls is None:
                track.calls = latest
            if track.calls < latest:
                break  # who is ahead waits until the others come to the same call
        if not verdict.busy:
            self._conclude(verdict, track, other)
        elif verdict.error is not None:
            raise verdict.error
        return not verdict.busy

    def close(self) -> None:
        """Wait for the last background save, and free the memory in which states were staged; see `settle`."""
        try:
            self.wait()
        finally:
            if self.outstanding is None and self._pool is not None:
                pool, self._pool = self._pool, None
                pool.close()

    def let_go(self) -> None:
        """Free the memory in which states were staged, now or when the save in flight has ended; wait for nobody."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.close_soon()

    def _conclude(self, verdict: Verdict, track: Track, other: Outstanding | None) -> None:
        """Do what all ranks do."""
        if (last := self.outstanding) is not None and last.may_come_late and last.state is not None:
            self._late = last.state, last.gate
        self.outstanding = None
        if track.last in (last, other):
            track.last = None
        if last is not None:
            last.tell()
        if verdict.worker_lost:
            worker.forget()
        if verdict.given_up:
            self._leave_behind(track, last, other)
        if verdict.error is None:
            return
        cause = last.error if last is not None else None
        raise verdict.error from (verdict.error.__cause__ if cause is verdict.error else cause)

    def _leave_behind(self, track: Track, last: Outstanding | None, other: Outstanding | None) -> None:
        """Use nothing again that a save which was given up may still be using."""
        self._pool = self.log = None
        saves = [save for save in (last, other) if save is not None]
        if any(save.generation == track.generation for save in saves):
            track.generation += 1
            ranks.leave_background_group()
        track.given_up += [save for save in saves if not save.ended and save not in track.given_up]
        if last is not None and not last.ended:
            tell(self._observer, SaveAbandoned(last.save.name if last.save is not None else None, last.gate.seconds))

    def __reduce__(self) -> tuple[object, ...]:
        # DCP sends the writer to the process that saves from a thread of its own.
        staged, limits, carried = self._begun_here(), self.limits, None
        if staged is not None:
            staged.gate.check()
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
        raise UnsupportedError(
            "staging_bytes is less than the state, and another process that saves needs all of it.",
            hint="Leave staging_bytes out, or save in a thread (AsyncCheckpointerType.THREAD).",
        )
    staged.wait_copied(seconds=seconds)


def _copied(one_rank: bool, seconds: float, limits: Limits, carried: Description | None) -> SaveSession:  # noqa: FBT001  (pickle's)
    return SaveSession(None, one_rank=one_rank, seconds=seconds, limits=limits, carried=carried)
