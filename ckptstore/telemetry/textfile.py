"""A file of metrics for node_exporter's textfile collector, which reads it whenever it likes."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ckptstore.errors import InvalidInputError
from ckptstore.options import check_seconds


class TextFile:
    """Keeps a file, written whole and renamed: at once, every so often, and at the end.

    Args:
        path: Where; its folder exists. The collector reads names that end in `.prom`.
        render: Returns what it holds.
        every_seconds: How often.

    Raises:
        InvalidInputError: It cannot be written there.
    """

    def __init__(self, path: str | os.PathLike[str], render: Callable[[], bytes], *, every_seconds: float) -> None:
        check_seconds(every_seconds=every_seconds)
        self._path, self._render, self._seconds = Path(path), render, every_seconds
        write_whole(self._path, render())
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="ckptstore-metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _keep(self) -> None:
        while not self._closed.wait(self._seconds):
            self._write()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(InvalidInputError):  # a full disk: the next time
            write_whole(self._path, self._render())

    def close(self) -> None:
        """Write it once more, and then no more."""
        if not self._closed.is_set():
            self._closed.set()
            atexit.unregister(self.close)
            self._write()


def write_whole(path: Path, text: bytes) -> None:
    """Write a file that is never seen in part.

    Raises:
        InvalidInputError: It cannot be written there.

    If killed: the file as it was before or after; perhaps a temporary one beside it.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InvalidInputError(
            f"{path} cannot be written: {error.strerror}.", hint="Name a file in a folder that exists.", path=str(path)
        ) from error
