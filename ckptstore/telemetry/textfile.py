"""A file of metrics for node_exporter's textfile collector, which reads it whenever it likes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

from ckptstore.options import check_seconds
from ckptstore.wholefile import write_whole

_log = logging.getLogger("ckptstore.telemetry")


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
        self._path, self._render, self._seconds = path, render, every_seconds
        write_whole(self._path, render())
        self._closed, self._lock, self._fails = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._keep, name="ckptstore-metrics", daemon=True)
        try:
            self._thread.start()
            atexit.register(self.close)
        except BaseException:  # an interrupt, or no thread to be had: nobody will close it
            self._closed.set()
            raise

    def _keep(self) -> None:
        while not self._closed.wait(self._seconds):
            self._write()

    def _write(self) -> None:
        with self._lock:
            try:
                write_whole(self._path, self._render())
                self._fails = False
            except Exception as error:  # noqa: BLE001  (a full disk: the next time)
                if not self._fails:
                    _log.warning("%s is not written: %s: %s", self._path, type(error).__name__, error)
                self._fails = True

    def close(self) -> None:
        """Write it once more, and then no more."""
        if not self._closed.is_set():
            self._closed.set()
            atexit.unregister(self.close)
            self._write()
