"""A store that tells of every call at the port."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload


@dataclass(frozen=True, slots=True)
class Call:
    """One call that was made.

    Args:
        operation: The method's name; of an upload `write`, `complete` and `abort`.
        key: The key, or the prefix of a listing.
        bytes: How many were moved; 0 if the call failed. Of a listing, how many objects were yielded.
        start: Where a ranged read began, else 0.
        failed: Whether it raised.
    """

    operation: str
    key: str
    bytes: int = 0
    start: int = 0
    failed: bool = False


class Counts:
    """Requests and bytes per operation. Thread-safe; give it to an `ObservedStore`."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        """Count one call."""
        with self._lock:
            self.requests[call.operation] += 1
            self.bytes[call.operation] += call.bytes


class ObservedStore(ForwardingStore):
    """Tells `on_call` of every call, when it has ended.

    Args:
        inner: The store that does the work.
        on_call: `Counts()`, or `calls.append`, say. It is called on the caller's thread, and must be quick.
    """

    def __init__(self, inner: ObjectStore, on_call: Callable[[Call], object]) -> None:
        super().__init__(inner)
        self._tell = on_call

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`."""
        with _Told(self._tell, "put", key) as told:
            info = self._inner.put(key, body, mode=mode)
            told.bytes = len(body)
            return info

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        with _Told(self._tell, "get", key) as told:
            body = self._inner.get(key, max_bytes=max_bytes)
            told.bytes = len(body)
            return body

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        with _Told(self._tell, "get_range", key, start) as told:
            piece = self._inner.get_range(key, start=start, length=length)
            told.bytes = len(piece)
            return piece

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with _Told(self._tell, "head", key):
            return self._inner.head(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        with _Told(self._tell, "list", prefix) as told:
            infos = list(self._inner.list(prefix, after=after))
            told.bytes = len(infos)
            return iter(infos)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with _Told(self._tell, "delete", key):
            self._inner.delete(key)

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`."""
        with _Told(self._tell, "open_upload", key):
            return _ObservedUpload(self._inner.open_upload(key, size=size), self._tell, key)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        with _Told(self._tell, "list_uploads", prefix) as told:
            uploads = list(self._inner.list_uploads(prefix))
            told.bytes = len(uploads)
            return iter(uploads)

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        with _Told(self._tell, "abort_upload", upload.key):
            self._inner.abort_upload(upload)


class _ObservedUpload(ForwardingUpload):
    def __init__(self, inner: Upload, tell: Callable[[Call], object], key: str) -> None:
        super().__init__(inner)
        self._tell, self._key = tell, key

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with _Told(self._tell, "write", self._key) as told:
            self._inner.write(data)
            told.bytes = memoryview(data).nbytes

    def complete(self) -> ObjectInfo:
        with _Told(self._tell, "complete", self._key):
            return self._inner.complete()

    def abort(self) -> None:
        with _Told(self._tell, "abort", self._key):
            self._inner.abort()


class _Told:
    """Tells of a call when it ends, also when it fails."""

    def __init__(self, tell: Callable[[Call], object], operation: str, key: str, start: int = 0) -> None:
        self._tell, self._operation, self._key, self._start = tell, operation, key, start
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tell(Call(self._operation, self._key, self.bytes, self._start, failed=kind is not None))
