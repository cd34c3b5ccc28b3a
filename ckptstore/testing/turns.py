"""Threads of which exactly one goes on at a time, in an order that is drawn, under a clock that nobody waits for."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar

from ckptstore.format.records import decode_record
from ckptstore.testing.crash import Killed

T = TypeVar("T")

REMEMBERED_RECORDS = 4096
TICK_SECONDS = 1e-6
LONGEST_STEP_SECONDS = 60.0
"""Real seconds that one step may take: whatever takes longer hangs."""


class Turns:
    """Whose turn it is. The scheduler gives turns with `go_on`; a thread ends its turn with `wait`.

    Args:
        chance: All that is drawn is drawn here, in turn, so that a seed gives one history.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.seconds = chance, 0.0
        self.current: Actor | None = None
        self.back = _closed_gate()

    def go_on(self, actor: Actor) -> None:
        """Let `actor` go on until it waits or ends; if it slept, its time has come."""
        self.seconds = max(self.seconds, actor.wakes)
        self.current = actor
        actor.go.release()
        if not self.back.acquire(timeout=LONGEST_STEP_SECONDS):
            raise AssertionError(f"{actor.name} does not come back.")
        self.current = None

    def wait(self, seconds: float = 0.0) -> None:
        """Let others go on. Called by the thread whose turn it is.

        Raises:
            Killed: Its process died meanwhile.
        """
        actor = self.current
        if actor is None:
            raise AssertionError("Nobody's turn.")
        actor.check()
        actor.wakes = self.seconds + seconds
        self.back.release()
        actor.go.acquire()
        actor.check()


class Actor:
    """A thread that does `work`, in turns. `killed` is True once its process is dead: nothing of it acts any more."""

    def __init__(self, turns: Turns, name: str, work: Callable[[], object]) -> None:
        self.name, self.wakes, self.weight = name, 0.0, 1.0
        self.killed = self.is_over = False
        self.error: BaseException | None = None
        self.go = _closed_gate()
        self._turns, self._work = turns, work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise Killed if its process is dead."""
        if self.killed:
            raise Killed(self.name)

    def end(self) -> None:
        """Kill it, and wait until its thread has ended. It must not be its turn."""
        while not self.is_over:
            self.killed = True
            self._turns.go_on(self)
        self._thread.join(LONGEST_STEP_SECONDS)

    def _run(self) -> None:
        self.go.acquire()
        try:
            self.check()
            self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  (the scheduler reports it)
            self.error = error
        self.is_over = True
        self._turns.back.release()


def _closed_gate() -> threading.Lock:
    """Return a lock that somebody else releases: whoever acquires it waits for that."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class TurnClock:
    """A process's clock: it sleeps by ending its turn, and shows a time of day that may be wrong by `off_seconds`."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self.off_seconds = turns, 0.0

    def now(self) -> datetime:
        """Return a date in 2026, or wherever the clock was set to."""
        return datetime(2026, 1, 2, tzinfo=UTC) + timedelta(seconds=self._turns.seconds + self.off_seconds)

    def monotonic(self) -> float:
        """Return the seconds since the simulation began."""
        self._turns.seconds += TICK_SECONDS
        return self._turns.seconds

    def sleep(self, seconds: float) -> None:
        """End the turn; the next one comes after `seconds`."""
        self._turns.wait(seconds)


class PoolInTurn:
    """Stands in for a pool of threads: what it is given it does at once, on the caller's thread.

    What is mapped is done in an order that is drawn: the requests of one process overtake each other.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def submit(self, work: Callable[..., T], *given: Any) -> Future[T]:
        """Do `work` now."""
        done: Future[T] = Future()
        try:
            done.set_result(work(*given))
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001  (handed over whole)
            done.set_exception(error)
        return done

    def map(self, work: Callable[..., T], *given: Iterable[Any]) -> list[T]:
        """Do `work` for each, in any order, and return what it returned, in theirs."""
        tasks = list(zip(*given, strict=False))
        order = list(range(len(tasks)))
        self._turns.chance.shuffle(order)
        done = {index: self.submit(work, *tasks[index]) for index in order}
        return [done[index].result() for index in range(len(tasks))]

    def shutdown(self, **_: object) -> None:
        """End nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def in_turn(turns: Turns) -> Iterator[None]:
    """Let the library use `PoolInTurn` where it makes a pool of threads, and decode equal records once only."""
    remembered = functools.lru_cache(maxsize=REMEMBERED_RECORDS)(decode_record)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(ThreadPoolExecutor, lambda *_, **__: PoolInTurn(turns)))
        stack.enter_context(replaced(decode_record, remembered))
        yield


@contextlib.contextmanager
def replaced(old: object, new: object) -> Iterator[None]:
    """Let `new` stand for `old` in every module of the library that names it."""
    places = [
        (module, name)
        for title, module in [*sys.modules.items()]
        if title.startswith("ckptstore.") and title != __name__
        for name, value in vars(module).items()
        if value is old
    ]
    for module, name in places:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, old)
