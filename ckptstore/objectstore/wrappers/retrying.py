"""A store whose requests are tried again, where a second one can do no harm.

A create is not: whether it happened must be asked of the store, and what to do then is decided by the protocol. Uploads
try their own parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.objectstore.patience import Patience, tried
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import RetryOptions

Result = TypeVar("Result")


class RetryingStore(ForwardingStore):
    """What was `UnavailableError` is tried again, with full jitter. What is absent stays absent at once.

    Where nothing came in time, the last time either, what is read ends in `StalledError`.

    Overwriting and deleting have the same effect twice, so they are tried again also where nobody knows.

    Args:
        inner: The store that does the work, and sends each request once.
        options: How often and how long.
        clock: Where waiting comes from.
        ids: Where jitter comes from.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        options: RetryOptions | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        super().__init__(inner)
        self._options = options or RetryOptions()
        self._clock, self._ids = clock or SystemClock(), ids or SystemIds()

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`. A create is sent once.

        If killed: the whole object or none; a request under way may still land.
        """
        if mode is PutMode.CREATE:
            return self._inner.put(key, body, mode=mode)
        return self._tried(lambda: self._inner.put(key, body), writes=True)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        return self._tried(lambda: self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        return self._tried(lambda: self._inner.get_range(key, start=start, length=length))

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._tried(lambda: self._inner.head(key))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. The whole listing is one read: what is yielded is of one try."""
        return iter(self._tried(lambda: list(self._inner.list(prefix, after=after))))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._tried(lambda: self._inner.delete(key), writes=True)

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`. Opening publishes nothing; an engine may ask for its bucket first."""
        return self._tried(lambda: self._inner.open_upload(key, size=size))

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        return iter(self._tried(lambda: list(self._inner.list_uploads(prefix))))

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        self._tried(lambda: self._inner.abort_upload(upload), writes=True)

    def _tried(self, act: Callable[[], Result], *, writes: bool = False) -> Result:
        return tried(act, Patience(self._options, writes=writes, clock=self._clock, ids=self._ids))
