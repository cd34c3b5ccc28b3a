"""One asyncio loop per process, in a thread of its own, for clients that can be used in no other way.

It starts when it is first needed, is made anew in a forked child, and ends with the process. Whoever calls may be any
thread, also one in which another asyncio loop runs: that one waits, as with every other blocking call.

Clients belong to the loop that they were made in. `current` tells whether that is still the one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from ckptstore.errors import OutcomeUnknownError, UnavailableError
from ckptstore.threads import OwnedThread

Result = TypeVar("Result")

_LOOK_SECONDS = 1.0  # how often a waiting thread looks whether it was forked away from the loop
_GRACE_SECONDS = 2.0  # for a coroutine to take note of its cancellation, and for clients to be closed at exit


def run(coroutine: Coroutine[Any, Any, Result], *, timeout: float) -> Result:
    """Return what `coroutine` returns, run in this process's loop.

    Args:
        coroutine: It is cancelled when the time is over, and when this thread is interrupted.
        timeout: In seconds.

    Raises:
        TimeoutError: The time is over.
        UnavailableError: This process is ending; nothing was begun.
        OutcomeUnknownError: This process is ending, or was forked while it waited, and the parent goes on.
        RuntimeError: This is the loop's own thread, which would wait for itself.
    """
    call = _Call(coroutine, timeout)
    try:
        served = _served()
        served.refuse_itself()
    except BaseException:
        coroutine.close()
        raise
    return call.result(served)


def spawn(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, object]) -> bool:
    """Let `coroutine` run in `loop` if that is still this process's, and return whether it is. Never waits or raises.

    For what is closed when nobody uses it any longer, in whatever thread that happens.
    """
    call = _Call(coroutine, _GRACE_SECONDS)
    served = _running
    if served is not None and served.loop is loop:
        with contextlib.suppress(UnavailableError):
            served.begin(call.start)
            return True
    coroutine.close()
    return False


def current() -> asyncio.AbstractEventLoop:
    """Return this process's loop, which runs.

    Raises:
        UnavailableError: This process is ending.
    """
    return _served().loop


def at_end(close: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """From inside the loop: have `close` run before it ends with the process."""
    served = _running
    if served is not None and served.loop is asyncio.get_running_loop():
        served.closing.append(close)


def not_at_end(close: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """From inside the loop: `close` has been run."""
    served = _running
    if served is not None and close in served.closing:
        served.closing.remove(close)


class _Served:
    """A loop and the thread that runs it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self.thread = OwnedThread(self._serve, "ckptstore-loop")
        self.closing: list[Callable[[], Coroutine[Any, Any, object]]] = []
        self._ending = False
        try:
            self.thread.start()
        except BaseException:  # an interrupt, or no thread to be had: nobody knows of it, and it may run
            self._ending = True
            if self.thread.withdraw():
                self.loop.close()
            else:
                self.loop.call_soon_threadsafe(self.loop.stop)
            raise

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ending:
            with contextlib.suppress(BaseException):  # a task that exits the interpreter must not end all the others
                self.loop.run_forever()

    def refuse_itself(self) -> None:
        if self.thread is threading.current_thread():
            raise RuntimeError("The loop's own thread cannot wait for it.")

    def begin(self, start: Callable[[], object]) -> None:
        try:
            self.loop.call_soon_threadsafe(start)
        except RuntimeError:  # it is closed
            raise UnavailableError("This process is ending: nothing is begun any longer.") from None

    def end(self) -> None:
        """Let what was begun come to its end for a moment, and stop."""

        async def rest() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            others |= {self.loop.create_task(close()) for close in self.closing}
            if others:
                _, late = await asyncio.wait(others, timeout=_GRACE_SECONDS / 2)
                for task in late:
                    task.cancel()
                await asyncio.wait(others, timeout=_GRACE_SECONDS / 4)
            self._ending = True
            self.loop.stop()

        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(rest()))
        self.thread.join(_GRACE_SECONDS)
        if not self.thread.is_alive():
            self.loop.close()

    def detach(self) -> None:
        """In a forked child: let nothing that is done here reach the parent.

        The child has the parent's sockets and its epoll by the same numbers. An object that is collected here would
        unregister the parent's socket there, or say goodbye on its TLS connection. So these become numbers of nothing.
        """
        self.loop.set_exception_handler(lambda *_: None)
        with contextlib.suppress(OSError):
            numbers = [key.fd for key in list(self._selector.get_map().values())]
            if isinstance(self._selector, getattr(selectors, "EpollSelector", ())):
                numbers.append(self._selector.fileno())
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in numbers:
                os.dup2(nothing, number, inheritable=False)
            os.close(nothing)


class _Call(Generic[Result]):
    """One coroutine and the thread that waits for it.

    The waiting is on a bare lock: a condition has a lock inside, which a fork may copy while it is held.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result], timeout: float) -> None:
        self._coroutine, self._timeout = coroutine, timeout
        self._task: asyncio.Task[Result] | None = None
        self._given_up = False
        self._ended = threading.Lock()
        self._ended.acquire()
        self._pid = os.getpid()

    def start(self) -> None:
        """In the loop's thread."""
        if self._given_up:
            self._coroutine.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._in_time())
        self._task.add_done_callback(self._end)

    async def _in_time(self) -> Result:
        async with asyncio.timeout(self._timeout):
            return await self._coroutine

    def _end(self, task: asyncio.Task[Result]) -> None:
        self._coroutine.close()  # it was never begun if the cancellation was faster
        if not task.cancelled():
            task.exception()  # it is looked at: nobody needs to be told that nobody looked
        self._ended.release()

    def _cancel(self) -> None:
        self._given_up = True
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()

    def result(self, served: _Served) -> Result:
        """In the thread that waits."""
        try:
            served.begin(self.start)
            self._wait()
        except BaseException:
            try:
                served.begin(self._cancel)
            except UnavailableError:
                self._coroutine.close()
            raise
        if self._task is None or self._task.cancelled():
            raise OutcomeUnknownError("This process is ending: what was asked for was given up.")
        return self._task.result()

    def _wait(self) -> None:
        left = self._timeout + _GRACE_SECONDS
        while not self._ended.acquire(timeout=min(left, _LOOK_SECONDS)):
            left -= _LOOK_SECONDS
            if os.getpid() != self._pid:
                raise OutcomeUnknownError("This process was forked while it waited; its parent goes on.")
            if left <= 0:
                raise TimeoutError


_lock = threading.Lock()
_running: _Served | None = None
_left: list[_Served] = []  # of parents; kept, so that nothing in them is ever collected
_over = False


def _served() -> _Served:
    global _running  # noqa: PLW0603  (one per process)
    served = _running
    if served is None:
        with _lock:
            if _over:
                raise UnavailableError("This process is ending: nothing is begun any longer.")
            if _running is None:
                _running = _Served()
            served = _running
    return served


def _in_a_forked_child() -> None:
    global _lock, _running  # noqa: PLW0603  (one per process)
    _lock = threading.Lock()  # the other may have been copied while it was held
    served, _running = _running, None
    if served is not None:
        _left.append(served)
        served.detach()


def _at_exit() -> None:
    global _running, _over  # noqa: PLW0603  (one per process)
    with _lock:
        _over = True
        served, _running = _running, None
    if served is not None:
        served.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)
atexit.register(_at_exit)
