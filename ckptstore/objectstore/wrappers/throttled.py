"""A store that is slow on purpose, for tests of slow ranks and of what is counted while waiting."""

from __future__ import annotations

from collections.abc import Iterator

from ckptstore.clock import Clock, SystemClock
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload


class ThrottledStore(ForwardingStore):
    """Every request waits; bytes take their time. Each caller is slowed alone, as if the line were its own.

    Args:
        inner: The store that does the work.
        seconds_per_request: How long each request waits before it is sent.
        bytes_per_second: How fast bytes move; infinite by default.
        clock: Where waiting comes from.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        seconds_per_request: float = 0.0,
        bytes_per_second: float = float("inf"),
        clock: Clock | None = None,
    ) -> None:
        super().__init__(inner)
        self._seconds, self._rate = seconds_per_request, bytes_per_second
        self._clock = clock or SystemClock()

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`."""
        self._wait(len(body))
        return self._inner.put(key, body, mode=mode)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        body = self._inner.get(key, max_bytes=max_bytes)
        self._wait(len(body))
        return body

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        body = self._inner.get_range(key, start=start, length=length)
        self._wait(len(body))  # what came, not what was asked for: that may be any number
        return body

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        self._wait()
        return self._inner.head(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        self._wait()
        return self._inner.list(prefix, after=after)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._wait()
        self._inner.delete(key)

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`."""
        self._wait()
        return _ThrottledUpload(self._inner.open_upload(key, size=size), self)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        self._wait()
        return self._inner.list_uploads(prefix)

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        self._wait()
        self._inner.abort_upload(upload)

    def _wait(self, count: int = 0) -> None:
        self._clock.sleep(max(self._seconds + count / self._rate, 0.0))


class _ThrottledUpload(ForwardingUpload):
    def __init__(self, inner: Upload, store: ThrottledStore) -> None:
        super().__init__(inner)
        self._wait = store._wait  # noqa: SLF001  (two halves of one wrapper)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._wait(memoryview(data).nbytes)
        self._inner.write(data)

    def complete(self) -> ObjectInfo:
        self._wait()
        return self._inner.complete()
