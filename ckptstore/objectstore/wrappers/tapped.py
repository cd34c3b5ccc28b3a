"""A store that shows every call to a function before it happens, which may let it happen or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload

Act = Callable[[], Any]
_T = TypeVar("_T")

WRITES = ("put", "complete", "delete", "abort_upload")
"""The operations that change what others see."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a store or of an upload.

    Args:
        index: How many calls there were before.
        operation: The method's name; of an upload: `write`, `complete`, `abort`.
        key: What it is about; of `list`, the prefix.
        creates: It is a conditional create.
    """

    index: int
    operation: str
    key: str
    creates: bool = False

    @property
    def writes(self) -> bool:
        """Whether it changes what others see."""
        return self.operation in WRITES


Tap = Callable[[Call, Act], Any]


class TappedStore(ForwardingStore):
    """Passes each call to `tap` together with the act itself; what `tap` returns or raises is the call's result.

    Args:
        inner: The store that acts.
        tap: Called with the call and a function that carries it out; perhaps from several threads at once.
    """

    def __init__(self, inner: ObjectStore, tap: Tap) -> None:
        super().__init__(inner)
        self.inner, self.tap = inner, tap
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`."""
        return self.pass_on("put", key, lambda: self.inner.put(key, body, mode=mode), creates=mode is PutMode.CREATE)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        return self.pass_on("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        return self.pass_on("get_range", key, lambda: self.inner.get_range(key, start=start, length=length))

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self.pass_on("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        return iter(self.pass_on("list", prefix, lambda: [*self.inner.list(prefix, after=after)]))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self.pass_on("delete", key, lambda: self.inner.delete(key))

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`."""
        return TappedUpload(self, key, self.pass_on("open_upload", key, lambda: self.inner.open_upload(key, size=size)))

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        return iter(self.pass_on("list_uploads", prefix, lambda: [*self.inner.list_uploads(prefix)]))

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        self.pass_on("abort_upload", upload.key, lambda: self.inner.abort_upload(upload))

    def pass_on(self, operation: str, key: str, act: Callable[[], _T], *, creates: bool = False) -> _T:
        """Count the call and hand it to the tap."""
        with self._lock:
            call = Call(len(self.calls), operation, key, creates)
            self.calls.append(call)
        result: _T = self.tap(call, act)
        return result


class TappedUpload(ForwardingUpload):
    """An upload each call of which goes through the tap."""

    def __init__(self, store: TappedStore, key: str, inner: Upload) -> None:
        super().__init__(inner)
        self._store, self._key = store, key

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `Upload.write`."""
        self._store.pass_on("write", self._key, lambda: self._inner.write(data))

    def complete(self) -> ObjectInfo:
        """See `Upload.complete`."""
        return self._store.pass_on("complete", self._key, self._inner.complete)

    def abort(self) -> None:
        """See `Upload.abort`."""
        self._store.pass_on("abort", self._key, self._inner.abort)
