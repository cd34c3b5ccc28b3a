"""Signals that ask a job to stop: noted at once, acted upon where the ranks meet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import InvalidInputError

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers and people send: Slurm and Kubernetes before they kill, Ctrl-C, Slurm's own warning."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """That this process was asked to stop.

    Args:
        number: The first signal.
        at: When it came, by the clock's monotonic seconds.
    """

    number: int
    at: float

    @property
    def name(self) -> str:
        """The signal's name."""
        return signal.Signals(self.number).name

    @property
    def exit_code(self) -> int:
        """What a process that a signal ends is expected to end with: 128 and its number."""
        return 128 + self.number


class Signals:
    """Notes signals. Handlers that stood before run too; a second Ctrl-C interrupts at once.

    Python calls handlers on the main thread only, between two instructions: nothing is done there but to note.

    Args:
        numbers: Which ones.
        clock: Its monotonic seconds.

    Raises:
        InvalidInputError: One is no signal that can be handled.
    """

    def __init__(self, numbers: Sequence[int] = STOPPING, *, clock: Clock | None = None) -> None:
        for number in numbers:
            if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
                raise InvalidInputError(
                    f"{number!r} is no signal that can be handled.", hint="Pass signal.SIGTERM, say."
                )
        self._numbers = tuple(numbers)
        self._clock = clock or SystemClock()
        self._before: dict[int, _Handler] = {}
        self.asked: Asked | None = None
        """The first one that came."""

    def install(self) -> bool:
        """Begin to note them. False off the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self._numbers:
            if number not in self._before:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._note)
        return True

    def remove(self) -> None:
        """Let the handlers that stood before stand again, where ours still do."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = self.asked is None, self.asked or Asked(number, self._clock.monotonic())
        if number == signal.SIGINT and not first:
            raise KeyboardInterrupt
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
