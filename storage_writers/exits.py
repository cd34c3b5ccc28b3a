"""No process ends in silence after a background save that failed, or did not end, if nobody was told.

At the interpreter's end the saves under way are waited for, as long as they may take. What failed then, or before, and
what did not end, is said on stderr, and the process ends with `EXIT_CODE`, whatever it was about to end with. A process
that was asked to stop waits no longer than `end_within` says, and ends with the exit code that goes with that.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from typing import TYPE_CHECKING

from ckptstore.clock import SystemClock
from ckptstore.errors import CkptStoreError

if TYPE_CHECKING:
    from storage_writers.outstanding import Outstanding

EXIT_CODE = 74
"""Of a process whose background save failed or did not end, if nobody was told: EX_IOERR of `sysexits.h`."""

SAYING_SECONDS = 0.5
"""How long it may take to say what did not end in time."""

_CLOCK = SystemClock()
_watched: dict[int, tuple[int, Outstanding]] = {}
_limit: tuple[float, int] | None = None
"""Until when the process must have ended, and its exit code if it has not."""
_leaving = False


def watch(save: Outstanding) -> None:
    """Speak of `save` at the process's end, unless it ends well or somebody is told."""
    _watched[id(save)] = os.getpid(), save
    take_time()


def forget(save: Outstanding) -> None:
    """Do not speak of `save`."""
    _watched.pop(id(save), None)


def end_within(seconds: float, code: int) -> None:
    """Let the process have ended so long from now, with exit code `code`: it was asked to stop.

    Saves that are under way are waited for no longer, nor threads that hang. With another save this is forgotten: a
    process that begins one goes on.
    """
    global _limit  # noqa: PLW0603  (one end a process)
    _limit = _CLOCK.monotonic() + seconds, code


def take_time() -> None:
    """Let the process end as ever."""
    global _limit  # noqa: PLW0603  (one end a process)
    _limit = None


def _wait_and_look() -> None:
    """Wait for what is under way; this runs before anything of the interpreter is closed, so that saves can end."""
    mine = [save for pid, save in list(_watched.values()) if pid == os.getpid()]
    with contextlib.suppress(BaseException):  # an interrupt: do not wait any longer
        if _limit is not None and _limit[0] > _CLOCK.monotonic():  # else somebody did other things in between
            last = threading.Timer(_limit[0] - _CLOCK.monotonic() + SAYING_SECONDS, os._exit, (_limit[1],))
            last.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread to be had any more
                last.start()
        for save in mine:
            save.wait(None if _limit is None else max(0.0, _limit[0] - _CLOCK.monotonic()))
    untold = [save for save in mine if not save.told and not (save.ended and save.error is None)]
    if not untold:
        return
    if all(save.ended for save in untold) and multiprocessing.parent_process() is None:
        atexit.register(_leave, untold)  # the last that is registered is the first that runs: the others follow in it
    else:
        _leave(untold)  # its thread would be waited for without end, or nothing else runs


def _leave(untold: list[Outstanding]) -> None:
    global _leaving  # noqa: PLW0603  (one end a process)
    if _leaving:
        return
    _leaving = True
    for save in untold:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"ckptstore: {_said(save)}\n")
    why, code = ("nobody was told before", EXIT_CODE) if _limit is None else ("it was asked to stop", _limit[1])
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ckptstore: {why}; this process ends with exit code {code}.\n")
    atexit._run_exitfuncs()  # noqa: SLF001  (the interpreter's own end, which an exit code of ours goes past)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _said(save: Outstanding) -> str:
    error = save.error
    if not save.ended:
        return f"{save.name} has not ended. Nothing is lost but this checkpoint; `ckptstore ls URL` lists the others."
    if isinstance(error, CkptStoreError):
        return f"{save.name} failed: [{error.code}] {error}"
    return f"{save.name} failed: {type(error).__name__}: {error!s:.2000}"


# Not `atexit`: before its handlers run, threads are joined and no executor takes work any longer.
threading._register_atexit(_wait_and_look)  # type: ignore[attr-defined]  # noqa: SLF001
