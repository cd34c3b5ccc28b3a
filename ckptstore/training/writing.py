"""Small writes that nothing but a proof depends on, while the training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckptstore.clock import Clock
from ckptstore.errors import safe_text
from ckptstore.events import Observer, TraceFailed, tell

_log = logging.getLogger("ckptstore.training")


class Writing:
    """What is being written. Whatever fails is told, and stops nothing.

    Args:
        observer: Hears of what fails.
        clock: Of waiting.
        at_once: So many at most; of more it is told that the store is too slow.
    """

    def __init__(self, observer: Observer, clock: Clock, *, at_once: int) -> None:
        self._observer, self._clock, self._at_once = observer, clock, at_once
        self._writes: list[tuple[str, threading.Thread]] = []

    def begin(self, work: Callable[[], object], name: str) -> None:
        """Do `work` on a thread; it concerns the checkpoint called `name`."""

        def write() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  (whatever it is, the training goes on)
                self.tell_failed(name, safe_text(error))

        self._writes = [each for each in self._writes if each[1].is_alive()]
        if len(self._writes) >= self._at_once:
            self.tell_failed(name, "the store is too slow")
            return
        # A daemon: the process's end must not wait for a store that hangs.
        thread = threading.Thread(target=write, name="ckptstore-trace", daemon=True)
        self._writes.append((name, thread))  # an interrupt may come when it is at work already
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            self.tell_failed(name, safe_text(error))

    def wait(self, until: float) -> None:
        """Wait for what is under way until a moment of the clock's monotonic seconds; tell of what is not done then."""
        for name, thread in self._writes:
            if thread.is_alive():
                thread.join(max(0.0, until - self._clock.monotonic()))
            if thread.is_alive():
                self.tell_failed(name, "it was not written in time")
        self._writes = []

    def tell_failed(self, name: str, reason: str) -> None:
        """Say that the trace or the proof of a checkpoint was not written."""
        tell(self._observer, TraceFailed(name, reason))
        _log.warning("The trace or the proof of %s was not written: %s", name, reason)
