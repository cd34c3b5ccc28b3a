"""From the first send to the decision, no interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_T = TypeVar("_T")


def decided(work: Callable[[], _T]) -> _T:
    """Return what `work` returns, letting no interrupt come between (I5).

    Interrupts reach the main thread only, so there the work runs on another one and an interrupt is raised after its
    end, with a note that says how it ended. The work must have a deadline of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    result: Future[_T] = Future()
    go, given_up = threading.Event(), threading.Event()

    def run() -> None:
        go.wait()
        try:
            if not given_up.is_set():
                result.set_result(work())
        except BaseException as error:  # noqa: BLE001  (handed over whole)
            result.set_exception(error)

    try:
        threading.Thread(target=run, name="ckptstore-append", daemon=True).start()
    except BaseException as error:
        given_up.set()
        go.set()
        if isinstance(error, RuntimeError):  # no thread to be had: at an interpreter's end, say
            return work()
        raise
    interrupt: BaseException | None = None
    while True:
        try:
            go.set()
            wait([result])
            break
        except BaseException as error:  # noqa: BLE001  (raised below)
            interrupt = error
    if interrupt is None:
        return result.result()
    interrupt.add_note(f"The append under way ended before this was raised, with {result.exception() or 'success'}.")
    raise interrupt
