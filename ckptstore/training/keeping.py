"""What a job lets go of while it trains, and what it holds: in the background, and never in the way of the training."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any

import storage_writers as sw
from ckptstore import Checkpoint, CheckpointStore
from ckptstore.clock import Clock
from ckptstore.errors import CkptStoreError, FencedError, safe_text
from ckptstore.events import KeepFailed, Observer, tell
from ckptstore.format.layout import slot_key
from ckptstore.maintenance.collect import collect_retired, retire_by
from ckptstore.maintenance.collect_plan import check_grace
from ckptstore.maintenance.retention import Keep
from ckptstore.protocol.log import RunLog
from ckptstore.training.asked import Asked
from ckptstore.training.meeting import Meeting
from storage_writers.roots import open_root

HOLDER = "resume"
"""Who holds what a job goes on from, until it has committed. A newer start takes its place: no dead one stays."""
LAST_SECONDS = 30.0
"""How long the end of a run waits for what is being retired and deleted."""

_log = logging.getLogger("ckptstore.training")


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
        self._held: list[tuple[Asked, str]] = []
        """On rank 0: runs in which something is held for this job, and by which name."""
        self._may_delete = True
        self._is_over = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._future: sw.SaveFuture | None = None
        self._newest: int | None = None
        self._begun = -1

    def hold(self, asked: Asked, store: CheckpointStore, checkpoint: Checkpoint) -> None:
        """Pin what is about to be loaded, until this job has committed. On rank 0; it never raises."""
        own = asked.url == self._asked.url
        holder = HOLDER if own else f"{HOLDER} of {self._asked.open().url}"[:200]
        try:
            store.pin(checkpoint, holder=holder, reason="a job goes on from it")
            self._held.append((asked, holder))
            _release(store, holder, but=checkpoint.seq)
        except CkptStoreError as error:
            advice = (
                "" if own else " Pin it there with credentials that may write, or see to it that nobody retires it."
            )
            self._tell(
                f"{checkpoint.checkpoint_id}@{checkpoint.seq} of {store.url} could not be pinned: {error}{advice}"
            )

    def saved(self, future: sw.SaveFuture | None, *, seq: int | None) -> None:
        """Do what is due as soon as this save is committed.

        Args:
            future: Of a save that has begun; None: it has ended.
            seq: Its slot, if it has ended, on rank 0.
        """
        if self._meeting.rank != 0 or (self._keep is None and not self._held):
            return
        if future is None:
            self._begin(seq)
        else:
            self._future = future
            future.add_done_callback(self._heard)

    def end(self) -> None:
        """Wait for what is under way, not for ever."""
        if self._future is not None and self._future.done():  # whose callback may not have come yet
            self._begin(self._future.seq)
        thread = self._thread
        if thread is not None:
            thread.join(LAST_SECONDS)
            if thread.is_alive():
                self._tell("what is retired was not deleted in time; the next commit goes on")

    def _heard(self, future: Future[Any]) -> None:
        self._begin(future.seq)  # type: ignore[attr-defined]  # it is a SaveFuture

    def _begin(self, seq: int | None) -> None:
        """Let the thread see this commit: the one that runs, or a new one."""
        with self._lock:
            if seq is None or seq <= self._begun or self._is_over:
                return
            self._newest = self._begun = seq
            if self._thread is not None:
                return
            # A daemon: the process's end must not wait for a store that hangs.
            thread = threading.Thread(target=self._work, name="ckptstore-keep", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                self._tell(safe_text(error))
                return
            self._thread = thread

    def _work(self) -> None:
        while True:
            with self._lock:
                seq, self._newest = self._newest, None
                if seq is None:
                    self._thread = None
                    return
            try:
                self._release_all()
                self._apply(seq)
            except FencedError as error:  # for good
                self._is_over = True
                self._tell(error.message)
            except Exception as error:  # noqa: BLE001  (whatever it is, the training goes on)
                self._tell(safe_text(error))

    def _release_all(self) -> None:
        while self._held:
            asked, holder = self._held[-1]
            try:
                _release(asked.open(), holder)
            except CkptStoreError as error:
                self._tell(f"{asked.url}: what {holder!r} holds could not be let go of: {error}")
            self._held.pop()

    def _apply(self, seq: int) -> None:
        """Retire by the policy, as the job that made this commit, and delete what was retired long enough ago.

        If killed: what is retired is retired, and the next commit's collection goes on.
        """
        if self._keep is None:
            return
        log = self._log()
        committed = log.refresh().commits.get(seq)
        if committed is None:  # somebody went back before it, and let it go
            return
        retire_by(log, self._keep, term=committed.commit.term)
        if not self._may_delete or not log.fold.retired:
            return
        now = log.store.head(slot_key(log.fold.end - 1)).modified  # it was written just now: the store's time, or less
        report = collect_retired(log, now=now, grace_seconds=self._grace, options=self._asked.transfer)
        if report.is_denied:
            self._may_delete = False
            self._tell(
                "this job may not delete: what is retired stays until `ckptstore gc` is run with the collector's "
                "credentials"
            )
        elif report.failed:
            key, error = next(iter(report.failed.items()))
            self._tell(f"{len(report.failed)} objects could not be deleted, {key} for one: {error}")

    def _log(self) -> RunLog:
        if self._opened is None:
            asked = self._asked
            store = open_root(
                asked.url, engine=asked.engine, storage_options=asked.storage_options, transfer=asked.transfer
            )
            self._opened = RunLog.open(store, clock=self._clock, options=asked.log, observer=self._observer)
        return self._opened

    def _tell(self, reason: str) -> None:
        tell(self._observer, KeepFailed(reason))
        _log.warning("Of what to keep: %s", reason)


def _release(store: CheckpointStore, holder: str, *, but: int | None = None) -> None:
    """Let go of all that `holder` holds in a run, but for one.

    If killed: of some of it; the next start of a job does the rest.
    """
    for each in store.checkpoints(include_set_aside=True):
        if each.seq != but and holder in [pin.holder for pin in each.committed.pins]:
            store.unpin(each, holder=holder)
