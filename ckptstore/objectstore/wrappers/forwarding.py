"""A store that does what another one does; the ground of the other wrappers, which change one thing each."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload


class ForwardingStore:
    """Every call goes to `inner`.

    Args:
        inner: The store that does the work.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    @property
    def url(self) -> str:
        """The inner store's root."""
        return self._inner.url

    @property
    def engine(self) -> str:
        """What moves the bytes."""
        return self._inner.engine

    @property
    def endpoint(self) -> str | None:
        """Where the service is."""
        return self._inner.endpoint

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`."""
        return self._inner.put(key, body, mode=mode)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        return self._inner.get_range(key, start=start, length=length)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._inner.head(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        return self._inner.list(prefix, after=after)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._inner.delete(key)

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`."""
        return self._inner.open_upload(key, size=size)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        return self._inner.list_uploads(prefix)

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        self._inner.abort_upload(upload)


class ForwardingUpload:
    """Every call goes to `inner`. See `port.Upload`."""

    def __init__(self, inner: Upload) -> None:
        self._inner = inner

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        self._inner.write(data)

    def complete(self) -> ObjectInfo:
        """Publish what was written. If killed: the whole object or none."""
        return self._inner.complete()

    def abort(self) -> None:
        """Give the upload up."""
        self._inner.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
