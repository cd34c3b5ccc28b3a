"""Run a server that cannot outlive whoever started it.

`python guard.py FOLDER LEFTOVERS COMMAND...` runs the command until standard input ends. Its other end is held by the
process that started the guard, so it ends even if that process is killed. Then the server is stopped, and FOLDER and
the LEFTOVERS (paths joined by `:`) are deleted. A byte that comes before the end kills the server and starts it again
on what it left; a byte on standard output says that this was done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

STOP_SECONDS = 5.0
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_the_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,  # whatever it leaves in its working directory is deleted with the rest
            # Safe in a process of one thread. The signal follows the thread that forked, which is our only one.
            preexec_fn=_die_with_the_guard,  # noqa: PLW1509
        )


def _kill(server: subprocess.Popen[bytes], leftovers: list[Path]) -> None:
    server.kill()  # asked politely some take five seconds
    server.wait(STOP_SECONDS)
    for path in leftovers:
        path.unlink(missing_ok=True)


def _is_told_to_restart(server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server has ended or somebody wants something; return whether that is another start."""
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable:
            return bool(os.read(0, 1))
    return False


def main(folder: Path, leftovers: list[Path], command: list[str]) -> int:
    """Run `command` and return what it exited with, or 0 if it was stopped.

    If killed: the server dies too (on Linux); its files are left.
    """
    server = _start(command, folder)
    while _is_told_to_restart(server):
        _kill(server, leftovers)
        server = _start(command, folder)
        with contextlib.suppress(BrokenPipeError):  # who asked is gone: the next look at standard input says so
            os.write(1, b".")
    code = server.poll()
    _kill(server, leftovers)
    if code is not None:
        return code or 1  # it ended by itself: the log is left for who started us
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2].split(":") if path], sys.argv[3:]))
