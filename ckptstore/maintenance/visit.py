"""One examination under way: its own place in the store, what it has found, and how it leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptstore.clock import Clock, IdSource
from ckptstore.errors import (
    AccessDeniedError,
    CkptStoreError,
    NotFoundError,
    OutcomeUnknownError,
    StalledError,
    UnavailableError,
)
from ckptstore.format.layout import PROBE_PREFIX
from ckptstore.maintenance.noting import NotingStore
from ckptstore.maintenance.report import Began, Check, Group, Watch, failure, fine
from ckptstore.objectstore.port import ObjectStore

GONE = (UnavailableError, OutcomeUnknownError, StalledError)
"""Tried again as often as is allowed, there was no answer, or none that tells."""
GIVE_UP_AFTER = 2
"""So many checks in a row without one: the store is gone, and nothing more can be told."""
DELETES_IN_FLIGHT = 16


class Visit:
    """Where an examination writes, and what it has found so far.

    Args:
        store: What is examined.
        clock: This machine's.
        ids: Where the place's name comes from.
        watch: Told of every check.
    """

    def __init__(self, store: ObjectStore, *, clock: Clock, ids: IdSource, watch: Watch) -> None:
        self.store = NotingStore(store)
        self.clock, self.ids, self._watch = clock, ids, watch
        self.place = f"{PROBE_PREFIX}{ids.nonce()}/"
        self.checks: list[Check] = []
        self._silent = 0

    def key(self, name: str) -> str:
        """Return a key of this visit's own place."""
        return self.place + name

    def tell(self, check: Check) -> Check:
        """Note a check that was made."""
        self.checks.append(check)
        self._watch(check)
        return check

    def begin(self, group: Group, name: str) -> None:
        """Say that a check is under way."""
        self._watch(Began(group, name))

    def look(self, group: Group, name: str, act: Callable[[], Check | str]) -> Check:
        """Make one check and note it.

        Args:
            group: What it is about.
            name: Which one.
            act: Returns the check, or what was seen if all is well. An error it raises is a failure, but for a refusal,
                which says nothing of what was to be seen.

        Raises:
            UnavailableError: It is not the first check in a row without an answer. `OutcomeUnknownError` likewise.
        """
        self.begin(group, name)
        try:
            found = act()
        except AccessDeniedError as error:
            return self.tell(Check(group, name, "unknown", f"Not seen, because it is denied: {error.message}"))
        except CkptStoreError as error:
            # What was written and is not there is an answer, too.
            silent = isinstance(error, GONE) and not isinstance(error.__cause__, NotFoundError)
            self._silent = self._silent + 1 if silent else 0
            if self._silent >= GIVE_UP_AFTER:
                raise
            return self.tell(failure(group, name, error))
        self._silent = 0
        return self.tell(fine(group, name, found) if isinstance(found, str) else found)

    def may_list_uploads(self) -> None:
        """Ask for incomplete uploads, only to see whether that is allowed."""
        with contextlib.suppress(CkptStoreError):
            list(self.store.list_uploads(self.place))

    def leave_even_if_interrupted(self) -> tuple[str, ...]:
        """Do what `leave` does, and begin it once more if it is interrupted.

        If killed: see `leave`.
        """
        try:
            return self.leave()
        except KeyboardInterrupt:
            self.leave()
            raise

    def leave(self) -> tuple[str, ...]:
        """Delete what was written, as far as possible, and return what is left. It never raises a `CkptStoreError`.

        If killed: small objects, and at most those of one measurement, under the place, which nobody reads.
        """
        if not self.store.written:
            return ()
        try:  # a create whose reply was lost may have landed
            self.store.written |= {info.key for info in self.store.list(self.place)}
        except GONE:
            return tuple(sorted(self.store.written))
        except CkptStoreError:
            pass
        with contextlib.suppress(CkptStoreError):
            for upload in self.store.list_uploads(self.place):
                self.store.abort_upload(upload)
        self.delete(self.store.written)
        return tuple(sorted(self.store.written))

    def delete(self, keys: set[str]) -> None:
        """Delete keys of this visit, best effort."""

        def delete(key: str) -> bool:
            with contextlib.suppress(CkptStoreError):
                self.store.delete(key)
                return True
            return False

        first, rest = sorted(keys)[:1], sorted(keys)[1:]
        if all(map(delete, first)) and rest:  # where it is denied or nobody answers, once is enough
            with ThreadPoolExecutor(DELETES_IN_FLIGHT, thread_name_prefix="ckptstore-doctor") as threads:
                list(threads.map(delete, rest))
