"""A part of a store as a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptstore.objectstore.keys import checked_key, checked_prefix
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload


class PrefixedStore(ForwardingStore):
    """What lies under a prefix of another store. Nothing above it can be reached.

    Args:
        inner: The store.
        prefix: Ends in `/`.

    Raises:
        InvalidInputError: The prefix is not in plain form.
    """

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = checked_prefix(prefix)

    @property
    def url(self) -> str:
        """The prefix's URL."""
        return f"{self._inner.url}/{self._prefix}".rstrip("/")

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`."""
        return self._seen(self._inner.put(self._key(key), body, mode=mode))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`."""
        return self._inner.get(self._key(key), max_bytes=max_bytes)

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        return self._inner.get_range(self._key(key), start=start, length=length)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._seen(self._inner.head(self._key(key)))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        after = self._prefix + after if after is not None else None
        return map(self._seen, self._inner.list(self._prefix + checked_prefix(prefix), after=after))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._inner.delete(self._key(key))

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`."""
        return _PrefixedUpload(self._inner.open_upload(self._key(key), size=size), key)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        for upload in self._inner.list_uploads(self._prefix + checked_prefix(prefix)):
            yield replace(upload, key=upload.key.removeprefix(self._prefix))

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        self._inner.abort_upload(replace(upload, key=self._key(upload.key)))

    def _key(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _seen(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._prefix))


class _PrefixedUpload(ForwardingUpload):
    def __init__(self, inner: Upload, key: str) -> None:
        super().__init__(inner)
        self._key = key

    def complete(self) -> ObjectInfo:
        return replace(self._inner.complete(), key=self._key)
