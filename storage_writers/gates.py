"""The one moment after which a background save may be committed, or may not."""

from __future__ import annotations

import threading

from ckptstore.clock import SystemClock
from ckptstore.errors import StalledError

_CLOCK = SystemClock()


class Gate:
    """Whether a save may commit: decided once, between the thread that commits and the one that gives the save up.

    Args:
        seconds: From now on, in which it may.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = _CLOCK.monotonic() + seconds
        self._lock = threading.Lock()
        self._passed = self._closed = False

    def left(self) -> float:
        """Return the seconds left."""
        return self.deadline - _CLOCK.monotonic()

    def check(self) -> None:
        """Find out whether somebody has given the save up.

        Raises:
            StalledError: It was given up. Nothing was sent.
        """
        if self._closed:
            raise StalledError(
                "The save was given up, or its call was interrupted. Nothing was committed.", hint="Save again."
            )

    def pass_through(self) -> None:
        """Decide for the commit, or find that it is too late.

        Raises:
            StalledError: The time is over, or somebody gave the save up. Nothing was sent.
        """
        with self._lock:
            if self._passed:
                return
            self.check()
            if self.left() <= 0:
                self._closed = True
                raise StalledError(
                    f"The save was not ready to commit within {self.seconds:g} s. Nothing was committed.",
                    hint="Raise commit_timeout_seconds, or save less at a time.",
                )
            self._passed = True

    def close(self) -> bool:
        """Decide against the commit; return False if it was sent before."""
        with self._lock:
            self._closed = not self._passed
            return self._closed
