"""Where drills write: a prefix of their own beside the run's keys, removed afterwards, or next time.

`drill/<nonce>/` is foreign to the run at the same root: nothing of the run lists it, reads it or deletes it. A marker
in it says whose it is. Where there is none (a request of a killed rank came after everything), or whose it is cannot be
asked here, only the age counts, by the store's own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptstore.clock import IdSource
from ckptstore.errors import CkptStoreError, ConflictError, UnsupportedError
from ckptstore.format.layout import DRILL_PREFIX
from ckptstore.objectstore.port import ObjectStore, PutMode

MARKER = "drill.json"
KEPT_SECONDS = 24 * 3600.0
"""What nobody is known to have left is removed when it is so old; no drill takes that long."""
DELETES_IN_FLIGHT = 16
ROUNDS = 3
"""How often it is listed again, if something came meanwhile: a killed rank's last request, say."""
BOOT_ID, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_NONCE = re.compile(r"[0-9a-f]{32}")


class Scratch:
    """A prefix that holds runs of drills and nothing else.

    Args:
        store: The user's root.
        nonce: The prefix's name; see `begin`.
    """

    def __init__(self, store: ObjectStore, nonce: str) -> None:
        self._store = store
        self.prefix = f"{DRILL_PREFIX}{nonce}/"

    @classmethod
    def begin(cls, store: ObjectStore, *, ids: IdSource) -> Scratch:
        """Return a fresh one, with its marker.

        Raises:
            ConflictError: Something is there.
            CkptStoreError: The store refuses.

        If killed: a small object, which the next drill removes.
        """
        scratch = cls(store, ids.nonce())
        if found := next(iter(store.list(scratch.prefix)), None):
            raise ConflictError(f"{found.key} is where a drill was to be.", hint="Run the drill again.", key=found.key)
        said = {"host": platform.node(), "seen_by": seen_by(), "pid": os.getpid(), "kept": False}
        store.put(scratch.prefix + MARKER, json.dumps(said).encode(), mode=PutMode.CREATE)
        return scratch

    @property
    def url(self) -> str:
        """Where it is, for people."""
        return f"{self._store.url}/{self.prefix}".rstrip("/")

    def keep(self) -> None:
        """Note that it is kept on purpose, for a day.

        If killed: it is noted or not.
        """
        said = {**(self._said() or {}), "kept": True}
        self._store.put(self.prefix + MARKER, json.dumps(said).encode())

    def began(self) -> float | None:
        """Return when its marker was stored, in seconds since 1970 by the store's clock, if the store says that."""
        return self._store.head(self.prefix + MARKER).modified

    def is_abandoned(self, *, now: float | None) -> bool:
        """Say whether its drill is dead: its process would be seen here, and is gone; or nothing was stored for a day.

        Args:
            now: By the store's clock; None: it tells no times, and nothing is old.
        """
        said, here = self._said(), seen_by()
        if said is not None and not said["kept"] and here and said["seen_by"] == here and not _is_alive(said["pid"]):
            return True
        times = [info.modified for info in self._store.list(self.prefix)]
        known = [each for each in times if each is not None]
        return now is not None and len(known) == len(times) > 0 and now - max(known) > KEPT_SECONDS

    def clean(self) -> tuple[str, ...]:
        """Delete all that is in it, the marker last, and return the keys that are left. It raises no `CkptStoreError`.

        If killed: some of it, and the marker; the next drill goes on.
        """
        marker = self.prefix + MARKER
        with contextlib.suppress(CkptStoreError):
            for _ in range(ROUNDS):
                with contextlib.suppress(UnsupportedError):
                    for upload in self._store.list_uploads(self.prefix):
                        self._store.abort_upload(upload)
                keys = [info.key for info in self._store.list(self.prefix) if info.key != marker]
                if not keys:
                    self._store.delete(marker)
                    break
                with ThreadPoolExecutor(DELETES_IN_FLIGHT, thread_name_prefix="ckptstore-drill") as threads:
                    list(threads.map(self._store.delete, keys))
        self._remove_folders()
        try:
            return tuple(info.key for info in self._store.list(self.prefix))
        except CkptStoreError:
            return (self.prefix,)

    def _said(self) -> dict[str, Any] | None:
        try:
            said = json.loads(self._store.get(self.prefix + MARKER, max_bytes=4096))
            return said if all(type(said[name]) is kind for name, kind in _FIELDS.items()) else None
        except (CkptStoreError, ValueError, TypeError, KeyError):
            return None

    def _remove_folders(self) -> None:
        """Remove the empty folders, where a store has any."""
        if self._store.engine != "local":
            return
        root = Path(self._store.url.removeprefix("file://")) / self.prefix
        for folder, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                Path(folder).rmdir()
        with contextlib.suppress(OSError):  # another drill's is beside it
            root.parent.rmdir()


_FIELDS = {"host": str, "seen_by": str, "pid": int, "kept": bool}


def seen_by() -> str:
    """Return who can see this process by its number: this boot of this machine, and this container of it.

    A host's name is no such thing: two containers may have the same. It is empty where it is not known.
    """
    try:
        return f"{BOOT_ID.read_text(encoding='ascii').strip()} {PROCESSES.readlink()}"
    except (OSError, ValueError):
        return ""


def abandoned(store: ObjectStore, *, now: float | None) -> Iterator[Scratch]:
    """Yield what drills left that were killed.

    Args:
        store: The user's root.
        now: By the store's clock, if it is known.
    """
    names = dict.fromkeys(info.key.split("/")[1] for info in store.list(DRILL_PREFIX))
    for name in names:
        if _NONCE.fullmatch(name) and (scratch := Scratch(store, name)).is_abandoned(now=now):
            yield scratch


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
