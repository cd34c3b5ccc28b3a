"""Run a server that cannot outlive whoever started it.

`python guard.py FOLDER LEFTOVERS COMMAND...` runs the command until standard input ends. Its other end is held by the
process that started the guard, so it ends even if that process is killed. Then the server is stopped, and FOLDER and
the LEFTOVERS (paths joined by `:`) are deleted.
"""

from __future__ import annotations

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


def _wait_for_the_end(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable and not os.read(0, 1):
            return


def main(folder: Path, leftovers: list[Path], command: list[str]) -> int:
    """Run `command` and return what it exited with, or 0 if it was stopped.

    If killed: the server dies too (on Linux); its files are left.
    """
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Safe in a process of one thread. The signal follows the thread that forked, which is our only one.
            preexec_fn=_die_with_the_guard,  # noqa: PLW1509
        )
    _wait_for_the_end(server)
    code = server.poll()
    server.kill()  # its data is deleted anyway; asked politely it takes five seconds
    server.wait(STOP_SECONDS)
    for path in leftovers:
        path.unlink(missing_ok=True)
    if code is not None:
        return code or 1  # it ended by itself: the log is left for who started us
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2].split(":") if path], sys.argv[3:]))
