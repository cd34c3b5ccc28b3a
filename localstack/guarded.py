"""A server process with a folder. Both are gone when this process is, however it ends."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STOP_SECONDS = 15.0
RESTART_SECONDS = 15.0
LOG_BYTES = 2_000

# What a server sees of our environment. The rest is the user's: an `AWS_…` or `MINIO_…` of theirs would change it.
PASSED_ON = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TMPDIR")


class ServerFailedError(Exception):
    """A server did not come up. The end of its log is in the message."""


class GuardedProcess:
    """A server that runs until `stop`, or until this process ends.

    Its home and its working directory are its folder: what it leaves there goes with it.

    Args:
        name: Of the server, for the folder's name.
        in_memory: Make the folder in `/dev/shm` instead of the one for temporary files.
    """

    def __init__(self, name: str, *, in_memory: bool = False) -> None:
        parent = "/dev/shm" if in_memory else None  # noqa: S108  (asked for)
        self.folder = Path(tempfile.mkdtemp(prefix=f"ckptstore-{name}-", dir=parent))
        self._leftovers: list[str] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, leftovers: Iterable[str] = ()
    ) -> None:
        """Start the server. `leftovers` are the files that it makes outside of the folder."""
        self._leftovers = list(leftovers)
        guard = str(Path(__file__).with_name("guard.py"))
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        # An own session: a Ctrl-C at the terminal is for whoever started the server, who then stops it.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard, str(self.folder), ":".join(self._leftovers), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=passed_on | {"HOME": str(self.folder)} | dict(environment or {}),
            start_new_session=True,
        )

    def restart(self) -> None:
        """Kill the server (SIGKILL) and start it again on the same port, with what it had stored.

        Raises:
            ServerFailedError: It ended by itself before, or was not started in time.

        If killed: the server is stopped and its folder is deleted, as always.
        """
        guard = self._guard
        if guard is None or guard.stdin is None or guard.stdout is None or guard.poll() is not None:
            raise ServerFailedError(f"There is no server to restart.\n{self.end_of_log()}")
        guard.stdin.write(b".")
        guard.stdin.flush()
        readable, _, _ = select.select([guard.stdout], [], [], RESTART_SECONDS)
        if not readable or not guard.stdout.read(1):
            raise ServerFailedError(f"The server was not started again.\n{self.end_of_log()}")

    def is_running(self) -> bool:
        """Return whether the server runs."""
        return self._guard is not None and self._guard.poll() is None

    def end_of_log(self) -> str:
        """Return the last lines that the server wrote."""
        log = self.folder / "log"
        return log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else "(no log)"

    def stop(self) -> None:
        """Stop the server and delete its folder."""
        if self._guard is not None and self._guard.stdin is not None and self._guard.stdout is not None:
            self._guard.stdin.close()  # the guard takes it as the end
            try:
                self._guard.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
            self._guard.stdout.close()
            self._guard = None
        for path in self._leftovers:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
