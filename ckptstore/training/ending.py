"""What all ranks know of the end of their run: whether one was asked to stop, until when, and what is waited for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from typing import NoReturn

import storage_writers as sw
from ckptstore.clock import Clock
from ckptstore.errors import CkptStoreError, DisagreementError, StalledError
from ckptstore.events import Observer, Stopping, tell
from ckptstore.training.meeting import Meeting
from ckptstore.training.progress import Progress
from ckptstore.training.recording import Recording
from ckptstore.training.signals import Signals
from ckptstore.training.stopping import SLOWER, Grace, Standing, Stop, StoppedBySignal, Word, earliest, next_word
from storage_writers import exits

LISTEN_SECONDS = 0.2
"""How often ranks that wait for a save tell each other of signals."""

_log = logging.getLogger("ckptstore.training")


class Ending:
    """A run's way to its end. What is collective must be called on every rank.

    Args:
        meeting: The ranks.
        writer: What saves.
        signals: What this rank was asked.
        recording: What is written at the end.
        progress: Of the run.
        seconds: How long there is from a signal to the end.
        busy_seconds: How long a save is waited for.
        clock: Of these seconds.
        observer: Hears of the end.
    """

    def __init__(  # noqa: PLR0913  (of one caller)
        self,
        meeting: Meeting,
        writer: sw.CkptStoreWriter,
        signals: Signals,
        recording: Recording,
        progress: Progress,
        *,
        seconds: float,
        busy_seconds: float,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._meeting, self._writer, self._signals, self._recording = meeting, writer, signals, recording
        self._progress, self._seconds, self._busy_seconds = progress, seconds, busy_seconds
        self._clock, self._observer = clock, observer
        self.save_seconds = 0.0
        """How long the last save took; 0: not known."""
        self.resumed_seq: int | None = None
        """The commit of this run that was resumed."""
        self.future: sw.SaveFuture | None = None
        """Of the last save in the background, as long as some rank may not know that it has ended."""
        self.grace: Grace | None = None
        """Since all ranks know that one was asked to stop."""
        self.is_over = False

    @property
    def newest_seq(self) -> int | None:
        """The newest commit, as far as this rank knows."""
        return self.resumed_seq if self._writer.committed is None else self._writer.committed.seq

    def hear(self, *said: float) -> list[float]:
        """Return the sums of what ranks say, and learn whether one was asked to stop. Collective."""
        mine = self._asked()
        with contextlib.ExitStack() as within:
            if mine is not None and not self._meeting.is_alone:  # the others may not come, and this one's time runs
                grace = self.grace or Grace(mine, whole=self._seconds, clock=self._clock)
                within.enter_context(grace.kept(partial(self._say_cut_off, grace.stop)))
            (*sums, asked), _ = self._meeting.sums([*said, float(mine is not None)])
            if asked and self.grace is None:
                stop = self._meeting.decide("stop", self._asked, earliest)
                self.grace = Grace(stop, whole=self._seconds, clock=self._clock)
        return sums

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let what is done within take no longer than there is time, if a signal comes to this rank meanwhile.

        What blocks the main thread cannot hear of the others' signals.
        """
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,), name="ckptstore-stop", daemon=True)
        try:
            watch.start()
            yield
        finally:
            done.set()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(LISTEN_SECONDS):
            if (stop := self._asked()) is not None:
                grace = Grace(stop, whole=self._seconds, clock=self._clock)
                if not done.wait(grace.left_for_exit()):
                    grace.leave(partial(self._say_cut_off, stop))
                return

    def settle(self) -> None:
        """Wait for the save in flight, if there is one; return before, if the run is asked to stop. Collective.

        Raises:
            StalledError: It has not ended in time.
        """
        began = self._clock.monotonic()
        self.hear()
        while self.grace is None and self.future is not None:
            futures.wait([self.future], LISTEN_SECONDS)
            is_late = self._clock.monotonic() - began > self._busy_seconds
            ended, late = self.hear(float(self.future.done()), float(is_late))
            if ended == self._meeting.world_size:
                self.future = None
            elif late:
                raise StalledError(
                    f"The save before has not ended within {self._busy_seconds:g} s.",
                    hint="Save less often, or look at what the store is doing.",
                )

    def wait(self) -> None:
        """Wait for the save in flight, and hear how it ended. Collective.

        Raises:
            StoppedBySignal: The run was asked to stop, and it has not ended in the time that there is.
            CkptStoreError: See `CkptStoreWriter.wait`.
        """
        self.settle()
        if self.grace is None:
            self._writer.wait()
        elif not self._is_settled_within(self.grace.left()):
            self.end(saved=False)

    def word(self, *, is_saved: bool) -> Word:
        """Return what all ranks do next, now that the run is to stop. Collective."""
        grace = self._known()
        between = self._progress.micro_step > 0

        def mine() -> Standing:
            return Standing(grace.left(), grace.whole, self.save_seconds, is_saved, between)

        with grace.kept(partial(self._say_cut_off, grace.stop)):
            return self._meeting.decide("last save", mine, next_word)

    def save_last(self, save: Callable[[], object]) -> NoReturn:
        """Save once more, if there is time after the save in flight, and end. Collective.

        Args:
            save: Begins to save in the background.
        """
        grace, saved = self._known(), False
        with grace.kept(partial(self._say_cut_off, grace.stop)):
            if self._is_settled_within(grace.left() - SLOWER * self.save_seconds):
                try:
                    save()
                    saved = True
                except CkptStoreError as error:
                    _log.warning("The last save failed: %s", error)
        self.end(saved=saved)

    def end(self, *, saved: bool) -> NoReturn:
        """End the run: the save in flight ends or is given up, and the process says why it stops. Collective.

        Args:
            saved: The state as it is now is saved, or is being saved.
        """
        grace = self._known()
        with grace.kept(partial(self._say_cut_off, grace.stop)):
            saved = self._is_settled_within(grace.left(), is_last=True) and saved
            self._recording.end(seconds=grace.left())
        self.is_over = True
        self.tell(str(grace.stop), saved=saved)
        exits.end_within(grace.left_for_exit(), grace.stop.exit_code)
        raise StoppedBySignal(grace.stop.exit_code)

    def end_by_exception(self, kind: type[BaseException], *, saved: bool) -> None:
        """Say why the run ends. The others may not come, so nothing is waited for: the process's end does, see `exits`.

        Args:
            kind: What was raised.
            saved: The state as it is now is saved.
        """
        self.tell(f"{kind.__name__} on rank {self._meeting.rank}", saved=saved, here=True)
        asked = self._asked()
        if asked is not None:
            exits.end_within(max(0.0, asked.seconds), asked.exit_code)

    def tell(self, reason: str, *, saved: bool, here: bool = False) -> None:
        """Tell the observer why and where the run stops, and write it into the log of rank 0, or of this rank."""
        step, newest = self._progress.global_step, self.newest_seq
        tell(self._observer, Stopping(reason, step, newest, saved))
        if self._meeting.rank == 0 or here:
            state, known = "saved" if saved else "not saved", "none is known" if newest is None else f"seq {newest}"
            _log.warning("Stopping at step %d, which is %s: %s. Newest commit: %s.", step, state, reason, known)

    def _say_cut_off(self, stop: Stop) -> None:
        self.tell(f"{stop}; a rank or the store does not answer in time", saved=False, here=True)

    def _known(self) -> Grace:
        assert self.grace is not None  # noqa: S101  (asked of a run that stops)
        return self.grace

    def _asked(self) -> Stop | None:
        asked = self._signals.asked
        if asked is None:
            return None
        return Stop(asked.number, self._meeting.rank, self._seconds - (self._clock.monotonic() - asked.at))

    def _is_settled_within(self, seconds: float, *, is_last: bool = False) -> bool:
        """Wait for the save in flight; return whether it has ended on all ranks, and well if it is the last one."""
        try:
            sw.wait(self._writer, seconds=max(0.0, seconds))
        except (StalledError, DisagreementError) as error:
            _log.warning("There is no time for the save in flight: %s", error)
            return False
        except CkptStoreError as error:
            _log.warning("The save in flight failed: %s", error)
            return not is_last
        return True
