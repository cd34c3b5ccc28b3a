"""What is asked of every reader: it answers or raises one of ours, soon, in little memory, and runs nothing."""

from __future__ import annotations

import contextlib
import sys
import time
import tracemalloc

from ckptstore.errors import CkptStoreError

SECONDS = 10.0
ROOM, PER_BYTE = 8 << 20, 100
"""Bytes that may be taken beside so many for each byte of input: an empty list of `[]` takes 64."""
MAX_MESSAGE = 20_000

FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.remove", "os.rename", "os.putenv"),
    *("subprocess.Popen", "exec", "compile", "ctypes.dlopen", "socket.connect", "socket.getaddrinfo", "shutil.rmtree"),
    *("pickle.find_class", "marshal.loads", "import", "code.__new__", "webbrowser.open", "urllib.Request"),
)
_watching = False
_seen: list[str] = []


def _audit(event, args):
    if _watching and (event in FORBIDDEN or (event == "open" and args[1] not in ("r", "rb", None))):
        _seen.append(f"{event}{args!r:.200}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def _watched():
    global _watching  # noqa: PLW0603  (a hook is for ever)
    _seen.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False


def read(reader, *args, size, **given):
    """Call a reader on hostile input and return what it returned, or None if it refused with one of our errors.

    Args:
        reader: What to call, with all else that is given.
        args: For it.
        size: Bytes of input: what it may take in memory and time depends on them.
        given: For it.
    """
    tracemalloc.start()
    began = time.thread_time()
    answer, told = None, ""
    try:
        with _watched():
            answer = reader(*args, **given)
    except CkptStoreError as error:
        told = f"{error}{error.facts}"
    finally:
        took, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert not _seen, list(_seen)
    assert len(told) < MAX_MESSAGE
    assert took < SECONDS, took
    assert peak < ROOM + PER_BYTE * size, (peak, size)
    return answer
