"""A store whose reads are tried again.

Writes are not: whether a write happened must be asked of the store, and what to do then is decided by the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.errors import UnavailableError
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long a read is tried.

    Args:
        attempts: How often at most.
        first_pause_seconds: The longest first pause. It doubles with each; a pause is drawn between 0 and that.
        longest_pause_seconds: Where doubling ends.
        deadline_seconds: After this long no other attempt begins.
    """

    attempts: int = 5
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 5.0
    deadline_seconds: float = 60.0


class RetryingStore(ForwardingStore):
    """Reads that were `UnavailableError` are tried again, with full jitter. What is absent stays absent at once.

    Args:
        inner: The store that does the work.
        patience: How often and how long.
        clock: Where waiting comes from.
        ids: Where jitter comes from.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        patience: Patience | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        super().__init__(inner)
        self._patience = patience or Patience()
        self._clock, self._ids = clock or SystemClock(), ids or SystemIds()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        return self._tried(lambda: self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self._tried(lambda: self._inner.get_range(key, start=start, length=length))

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._tried(lambda: self._inner.head(key))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. The whole listing is one read: what is yielded is of one attempt."""
        return iter(self._tried(lambda: list(self._inner.list(prefix, after=after))))

    def _tried(self, read: Callable[[], Result]) -> Result:
        patience, began = self._patience, self._clock.monotonic()
        pause = patience.first_pause_seconds
        for _ in range(patience.attempts - 1):
            try:
                return read()
            except UnavailableError:
                drawn = pause * self._ids.fraction()
                if self._clock.monotonic() + drawn - began > patience.deadline_seconds:
                    raise
            self._clock.sleep(drawn)
            pause = min(2 * pause, patience.longest_pause_seconds)
        return read()
