"""Signals that ask a job to stop: noted at once, acted upon where the ranks meet."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeGuard

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import InvalidInputError
from ckptstore.options import check_seconds

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers and people send: Slurm and Kubernetes before they kill, Ctrl-C, Slurm's own warning."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclass(frozen=True, slots=True)
class Noted:
    """That this process was asked to stop.

    Args:
        number: The first signal.
        at: When it came, by the clock's monotonic seconds.
    """

    number: int
    at: float


class Signals:
    """Notes signals that ask this process to stop. Handlers that stood before run too.

    Python calls handlers on the main thread only, between two instructions: nothing is done there but to note. Further
    signals are only noted too, with two exceptions: a second Ctrl-C interrupts at once, and when the time to stop is
    over a signal does what it did before.

    A process that was forked meanwhile (a DataLoader's worker) has no say in it: SIGTERM does there what it did before,
    by default end the process, as its parent expects. The others, which a terminal or a scheduler sends to the parent
    too, leave it to the parent, which still needs its workers; but a second Ctrl-C interrupts there, too.

    Args:
        numbers: Which ones.
        seconds: How long there is from the first signal to the end.
        clock: Its monotonic seconds.

    Raises:
        InvalidInputError: One is no signal that can be handled.
    """

    def __init__(self, numbers: Sequence[int] = STOPPING, *, seconds: float = 30.0, clock: Clock | None = None) -> None:
        check_seconds(seconds=seconds)
        for number in numbers:
            known = isinstance(number, int) and number in signal.valid_signals()
            if not known or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
                raise InvalidInputError(
                    f"{number!r} is no signal that can be handled.", hint="Pass signal.SIGTERM, say."
                )
        self._numbers = tuple(numbers)
        self._seconds = seconds
        self._clock = clock or SystemClock()
        self._process = os.getpid()
        self._interrupts = 0
        self._handlers: dict[int, tuple[_Handler, _Handler]] = {}
        """By signal: ours, and what stood before."""
        self.asked: Noted | None = None
        """The first one that came."""

    def install(self) -> bool:
        """Begin to note them. False off the main thread, where Python allows no handlers.

        A Ctrl-C that is ignored stays ignored: a shell starts its jobs in the background so. And what was set by
        another language cannot be called from here, and is left alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        self._process = os.getpid()
        for number in self._numbers:
            before = signal.getsignal(number)
            if number in self._handlers or before is None or (number == signal.SIGINT and before == signal.SIG_IGN):
                continue
            ours = partial(self._note, before)
            self._handlers[number] = ours, before
            signal.signal(number, ours)
        return True

    def remove(self) -> None:
        """Let the handlers that stood before stand again, where ours still do; where one calls ours, it has no effect.

        Off the main thread they stay, without effect but to call those before.
        """
        handlers, self._handlers = self._handlers, {}
        if threading.current_thread() is threading.main_thread():
            for number, (ours, before) in handlers.items():
                if signal.getsignal(number) is ours:
                    signal.signal(number, before)

    def is_noting(self) -> bool:
        """Say whether a signal to this process is noted here and now, and not passed on."""
        return self._is_listening() and os.getpid() == self._process

    def pass_on(self) -> None:
        """Let the signal that came do what it does without us, after `remove`: nobody has acted upon it."""
        if self.asked is not None and not _is_somebodys(signal.getsignal(self.asked.number)):
            signal.raise_signal(self.asked.number)

    def _note(self, before: _Handler, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        insists = number == signal.SIGINT and self._interrupts > 1
        is_parent = os.getpid() == self._process
        if not self._is_listening() or (not is_parent and (number == signal.SIGTERM or insists)):
            self._as_before(before, number, frame)
            return
        if self.asked is None:
            self.asked = Noted(number, self._clock.monotonic())
            if is_parent:
                self._expect_deaths()
        if _is_somebodys(before):
            before(number, frame)
        if insists:
            raise KeyboardInterrupt

    def _expect_deaths(self) -> None:
        """Let no child's death interrupt the step that still runs.

        Who asks a whole group of processes to stop, as torchrun does, asks a DataLoader's workers too. They die, and
        torch raises that on the main thread wherever it is. Where their work is missing, that raises too.
        """
        before = signal.getsignal(signal.SIGCHLD)
        if _is_somebodys(before):

            def quiet(number: int, frame: FrameType | None) -> None:
                with contextlib.suppress(RuntimeError):
                    before(number, frame)

            self._handlers[signal.SIGCHLD] = quiet, before
            signal.signal(signal.SIGCHLD, quiet)

    def _is_listening(self) -> bool:
        within = self.asked is None or self._clock.monotonic() < self.asked.at + self._seconds
        return bool(self._handlers) and within

    def _as_before(self, before: _Handler, number: int, frame: FrameType | None) -> None:
        """Do what the signal did before, if that is not to be ignored or for another handler to do."""
        if not _is_somebodys(before) and any(each.is_noting() for each in _standing(number)):
            return  # one of ours that was installed later notes it, and asked this one
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and _standing(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _is_somebodys(handler: _Handler) -> TypeGuard[Callable[[int, FrameType | None], Any]]:
    """Whether it is somebody's own handler; Python's for Ctrl-C, which interrupts, is nobody's."""
    return callable(handler) and handler is not signal.default_int_handler


_forking = threading.local()


def _before_fork() -> None:
    """Hold SIGTERM back: Python forgets, in a new process, what came before it was all there."""
    standing = signal.getsignal(signal.SIGTERM)
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,)) if _is_ours(standing) else None


def _after_in_child() -> None:
    """Let SIGTERM do what it did before ours stood, and let it come."""
    standing = signal.getsignal(signal.SIGTERM)
    if _is_ours(standing):
        while _is_ours(standing):
            standing = standing.args[0]
        signal.signal(signal.SIGTERM, standing)
    _after_in_parent()


def _after_in_parent() -> None:
    if (mask := getattr(_forking, "mask", None)) is not None:
        _forking.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _standing(number: int) -> list[Signals]:
    """Return those of ours that hear a signal, each through the one before."""
    found, handler = [], signal.getsignal(number)
    while _is_ours(handler):
        found.append(handler.func.__self__)  # type: ignore[attr-defined]
        handler = handler.args[0]
    return found


def _is_ours(handler: object) -> TypeGuard[partial[None]]:
    return isinstance(handler, partial) and isinstance(getattr(handler.func, "__self__", None), Signals)


os.register_at_fork(before=_before_fork, after_in_child=_after_in_child, after_in_parent=_after_in_parent)
