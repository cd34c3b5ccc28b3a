"""Threads whose owner knows of them, whatever interrupts their start."""

from __future__ import annotations

import threading
from collections.abc import Callable


class OwnedThread(threading.Thread):
    """A daemon thread whose work can be withdrawn, as long as it has not begun with it.

    `start` waits until the thread runs. What comes out of it (Ctrl-C, what a signal's handler raises) says nothing of
    whether the thread runs by then, or will: who starts one asks `withdraw`.

    Args:
        work: What it does.
        name: The thread's.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], object] | None = work
        self._deciding, self._has_begun = threading.Lock(), False

    def withdraw(self) -> bool:
        """Return True if the work has not begun, and never will; else the thread has to be waited for."""
        with self._deciding:
            self._work = None
            return not self._has_begun

    def run(self) -> None:
        """Do the work, unless it was withdrawn."""
        with self._deciding:
            work, self._work = self._work, None
            self._has_begun = work is not None
        if work is not None:
            work()
