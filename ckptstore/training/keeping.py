"""What a job lets go of while it trains, and what it holds: in the background, and never in the way of the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import storage_writers as sw
from ckptstore import Checkpoint, CheckpointStore
from ckptstore.clock import Clock
from ckptstore.errors import FencedError, safe_text
from ckptstore.events import KeepFailed, Observer, tell
from ckptstore.format.layout import slot_key
from ckptstore.maintenance.collect import collect_retired, retire_by
from ckptstore.maintenance.collect_plan import Deletion, check_grace
from ckptstore.maintenance.retention import Keep, unmatched
from ckptstore.protocol.claim import reigns
from ckptstore.protocol.log import RunLog
from ckptstore.threads import OwnedThread
from ckptstore.training.asked import Asked
from ckptstore.training.claims import incarnation_at
from ckptstore.training.holding import Held, Holding
from ckptstore.training.meeting import Meeting

NAMED_BY = 10
"""Commits after which a metric or tag of the policy that none of them has may be misspelt, if there is no other."""
LAST_SECONDS = 30.0
"""How long the end of a run waits for what is being retired and deleted."""

_log = logging.getLogger("ckptstore.training")


class _Stopped(Exception):  # noqa: N818  (it is no error)
    """The job has ended: what is not deleted yet, somebody else deletes."""


class Keeping:
    """The policy of a job, applied after each of its commits, by rank 0. Whatever fails is told, and stops nothing.

    Args:
        asked: How the run is opened.
        meeting: The ranks.
        keep: What is to be kept; None: nothing is let go of.
        grace_seconds: How long after it was retired a checkpoint is deleted, at a commit or at the end of the run.
        clock: Of waiting.
    """

    def __init__(
        self, asked: Asked, meeting: Meeting, keep: Keep | None, *, grace_seconds: float, clock: Clock
    ) -> None:
        check_grace(grace_seconds)
        self._asked, self._meeting, self._keep, self._grace = asked, meeting, keep, grace_seconds
        self._observer: Observer = asked.observer
        self._clock = clock
        self._opened: RunLog | None = None
        self._holding = Holding(asked, self._tell)
        self._may_delete = True
        self._has_told_unmatched = False
        self._stop = threading.Event()
        """Set when the job has ended: nothing more is deleted."""
        self._fenced_by: str | None = None
        self._lock = threading.Lock()
        self._thread: OwnedThread | None = None
        self._ending: Callable[[], None] | None = None
        """Hears, if nobody has, that the newest background save has ended."""
        self._newest: int | None = None
        self._newest_held: tuple[Held, ...] = ()
        self._begun = -1

    def hold(self, asked: Asked, store: CheckpointStore, checkpoint: Checkpoint) -> None:
        """Pin what is about to be loaded, until this job has committed. On rank 0; it never raises."""
        incarnation = incarnation_at(self._asked)
        assert incarnation is not None  # noqa: S101  (it has claimed the run)
        self._holding.hold(asked, store, checkpoint, incarnation=incarnation.id)

    def saved(self, future: sw.SaveFuture | None, *, seq: int | None) -> None:
        """Do what is due as soon as this save is committed.

        Args:
            future: Of a save that has begun; None: it has ended.
            seq: Its slot, if it has ended, on rank 0.
        """
        held = self._holding.held  # what is pinned after this is for a later commit to let go of
        if self._meeting.rank != 0 or (self._keep is None and not held):
            return
        if future is None:
            self._begin(seq, held)
            return

        def ended(ended: Future[Any] = future) -> None:
            if ended.done():
                self._begin(future.seq, held)

        self._ending = ended
        future.add_done_callback(ended)

    def end(self) -> None:
        """Wait for what is under way, not for ever."""
        if self._ending is not None:  # the save's callback may not have come yet
            self._ending()
        thread = self._thread
        if thread is not None:
            thread.join(LAST_SECONDS)
            if thread.is_alive():
                self._stop.set()
                self._tell("what is retired was not deleted in time; a collection by `ckptstore gc URL` goes on")

    def _begin(self, seq: int | None, held: tuple[Held, ...]) -> None:
        """Let the thread see this commit: the one that runs, or a new one."""
        with self._lock:
            if seq is None or seq <= self._begun:
                return
            for each in held:
                each.is_due = True
            self._newest, self._newest_held = seq, held
            self._begun = seq
            self._stop.clear()
            if self._thread is not None:
                return
            # A daemon: the process's end must not wait for a store that hangs.
            thread = self._thread = OwnedThread(self._work, "ckptstore-keep")
            try:
                thread.start()
            except BaseException as error:
                if thread.withdraw():  # else it waits for the lock, and goes on
                    self._thread = None
                if not isinstance(error, RuntimeError):  # an interrupt
                    raise
                self._tell(safe_text(error))  # no thread to be had

    def _work(self) -> None:
        while True:
            with self._lock:
                seq, self._newest = self._newest, None
                held = self._newest_held
                if seq is None:
                    self._thread = None
                    return
            try:
                self._holding.release()
                self._holding.sweep(self._run().refresh(), held)
                self._apply(seq)
            except FencedError as error:  # this round is over; the next commit may be of a newer term
                self._tell_fenced(error)
            except _Stopped:
                pass
            except Exception as error:  # noqa: BLE001  (whatever it is, the training goes on)
                self._tell(safe_text(error))

    def _apply(self, seq: int) -> None:
        """Retire by the policy, as the job that made this commit, and delete what was retired long enough ago.

        If killed: what is retired is retired, and the next commit's collection goes on.
        """
        if self._keep is None:
            return
        log = self._run()
        committed = log.refresh().commits.get(seq)
        if committed is None:  # somebody went back before it, and let it go
            return
        selectable = log.fold.selectable
        is_sure = log.fold.ever_committed >= NAMED_BY or any(
            each.commit.metrics or each.commit.tags for each in selectable
        )
        if is_sure and not self._has_told_unmatched and (names := unmatched(selectable, self._keep)):
            self._has_told_unmatched = True
            _log.warning("Of what to keep: %s", " ".join(names))
        retire_by(log, self._keep, term=committed.commit.term, go_on=lambda: self._go_on(()))
        if not self._may_delete or not log.fold.retired:
            return
        now = log.store.head(slot_key(log.fold.end - 1)).modified  # it was written just now: the store's time, or less
        # On this thread: at the process's end a pool's threads are waited for.
        report = collect_retired(log, now=now, grace_seconds=self._grace, audit=self._go_on)
        if report.is_denied:
            self._may_delete = False
            self._tell(
                "this job may not delete: what is retired stays until `ckptstore gc URL` is run with the collector's "
                "credentials"
            )
        elif report.failed:
            key, error = next(iter(report.failed.items()))
            self._tell(f"{len(report.failed)} objects could not be deleted, {key} for one: {error}")

    def _go_on(self, deletions: Sequence[Deletion]) -> None:
        """Let these be deleted, unless the job has ended."""
        del deletions
        if self._stop.is_set():
            raise _Stopped

    def _tell_fenced(self, error: FencedError) -> None:
        """Tell, once, that another job reigns; this process's own newer incarnation is nothing to be told of."""
        own = incarnation_at(self._asked)
        is_own = own is not None and reigns(self._run().fold, own)
        if not is_own and self._fenced_by != error.message:
            self._fenced_by = error.message
            self._tell(error.message)

    def _run(self) -> RunLog:
        """Return the run's log, opened once."""
        if self._opened is None:
            asked = self._asked
            self._opened = RunLog.open(asked.root(), clock=self._clock, options=asked.log, observer=self._observer)
        return self._opened

    def _tell(self, reason: str) -> None:
        tell(self._observer, KeepFailed(reason))
        _log.warning("Of what to keep: %s", reason)
