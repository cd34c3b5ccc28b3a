"""How a run that was asked to stop comes to its end: what all ranks do, and that it is in time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore.clock import Clock

SLOWER = 1.5
"""A last save is begun if the time that is left is so many times what the save before took."""
EXIT_SHARE, EXIT_SECONDS = 0.1, 2.0
"""How much of the time is kept for the interpreter's own end: this share, but at most so long."""

Word = Literal["save", "go_on", "end"]


class StoppedBySignal(SystemExit):
    """The run was asked to stop, and has: its code is 128 and the signal's number, as schedulers know it.

    It ends the process, which has little time left. Who goes on nevertheless calls the checkpointer's `close`.
    """


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the run stops, and when it must have.

    Args:
        number: The signal.
        rank: Which got it.
        seconds: How long there is until the end.
    """

    number: int
    rank: int
    seconds: float

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} on rank {self.rank}"

    @property
    def exit_code(self) -> int:
        """128 and the signal's number."""
        return 128 + self.number


@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank says when it is asked what to do next.

    Args:
        left: Seconds that are left for saves.
        whole: Seconds that there were for them.
        save_seconds: How long the save before took; 0: not known.
        is_saved: This very step is saved, or is being saved.
        is_between: Gradients are being accumulated.
    """

    left: float
    whole: float
    save_seconds: float
    is_saved: bool
    is_between: bool


def next_word(parts: Sequence[Standing]) -> Word:
    """Return what all ranks do: save once more, go on to the next optimizer step, or end.

    A save between micro-steps fits the same number of ranks only, so for half of the time it is put off.
    """
    left, longest = min(part.left for part in parts), max(part.save_seconds for part in parts)
    if all(part.is_saved for part in parts) or left <= SLOWER * longest:
        return "end"
    has_time = left > max(parts[0].whole / 2, 2 * SLOWER * longest)
    return "go_on" if parts[0].is_between and has_time else "save"


def earliest(parts: Sequence[Stop | None]) -> Stop:
    """Return what asked for the earliest end."""
    return min((part for part in parts if part is not None), key=lambda stop: (stop.seconds, stop.rank))


class Grace:
    """The time between a signal and the end.

    Args:
        stop: What all ranks heard.
        whole: How long there is from a signal on.
        clock: Its monotonic seconds.
    """

    def __init__(self, stop: Stop, *, whole: float, clock: Clock) -> None:
        self.stop, self._clock = stop, clock
        self._for_exit = min(EXIT_SHARE * whole, EXIT_SECONDS)
        self.whole = whole - self._for_exit
        """For saves."""
        self._ends_at = clock.monotonic() + stop.seconds

    def left(self) -> float:
        """Return how many seconds there are for saves still."""
        return max(0.0, self._ends_at - self._for_exit - self._clock.monotonic())

    def left_for_exit(self) -> float:
        """Return how many seconds there are for the process to have ended. At least so many that it can say why."""
        return max(self._for_exit / 2, self._ends_at - self._for_exit / 2 - self._clock.monotonic())

    @contextlib.contextmanager
    def kept(self, say: Callable[[], None]) -> Iterator[None]:
        """Let what is done within take no longer than there is time, or the process end there and then.

        A rank may be gone, or the store not answer, and each of them has limits of its own, which are longer. Whatever
        is cut off, the store knows of processes that end anywhere.

        Args:
            say: Is called before that.
        """
        last = threading.Timer(self.left_for_exit(), self.leave, (say,))
        last.name, last.daemon = "ckptstore-stop", True
        try:
            last.start()
            yield
        finally:
            last.cancel()

    def leave(self, say: Callable[[], None]) -> None:
        """Say why, and end the process here."""
        try:
            say()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(self.stop.exit_code)
