"""The store in a dictionary: the reference that every engine is compared with."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import AlreadyExistsError, IntegrityError, InvalidInputError, NotFoundError, UnavailableError
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range
from ckptstore.objectstore.port import ObjectInfo, PendingUpload, PutMode


class MemoryStore:
    """Objects of one process, in memory. Thread-safe.

    Args:
        url: What to call it in messages.
        clock: Where the objects' times come from.
    """

    engine = "memory"
    endpoint = None

    def __init__(self, url: str = "memory://", *, clock: Clock | None = None) -> None:
        self.url = url
        self._clock = clock or SystemClock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._begun = 0
        self._uploads: dict[str, tuple[PendingUpload, MemoryUpload]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object. See `ObjectStore.put`."""
        info = ObjectInfo(checked_key(key), len(body), _etag(body), self._clock.now().timestamp())
        with self._lock:
            if mode is PutMode.CREATE and key in self._objects:
                raise AlreadyExistsError(f"{key} exists in {self.url}.", hint="Read it back.", key=key)
            self._objects[key] = (bytes(body), info)
        return info

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`."""
        body = self._find(key)[0]
        if len(body) > max_bytes:
            raise IntegrityError(f"{key} has {len(body)} bytes, at most {max_bytes} are allowed.", key=key)
        return body

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        checked_range(key, start, length)
        body = self._find(key)[0]
        piece = body[start : start + length]
        if len(piece) != length:
            raise IntegrityError(f"{key} ends at {len(body)}, before {start + length}.", key=key, size=len(body))
        return piece

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        return self._find(key)[1]

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`."""
        checked_prefix(prefix)
        return self._sorted(prefix, after)

    def _sorted(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        with self._lock:
            found = [info for key, (_, info) in self._objects.items() if key.startswith(prefix)]
        yield from sorted((i for i in found if after is None or i.key > after), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`."""
        with self._lock:
            self._objects.pop(checked_key(key), None)

    def open_upload(self, key: str, *, size: int) -> MemoryUpload:
        """Begin to stream an object. See `ObjectStore.open_upload`."""
        with self._lock:
            self._begun += 1
            pending = PendingUpload(checked_key(key), str(self._begun), self._clock.now().timestamp())
            upload = MemoryUpload(self, pending, size)
            self._uploads[pending.upload_id] = pending, upload
        return upload

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the uploads under `prefix` that have not ended. See `ObjectStore.list_uploads`."""
        checked_prefix(prefix)
        with self._lock:
            found = [pending for pending, _ in self._uploads.values() if pending.key.startswith(prefix)]
        yield from sorted(found, key=lambda pending: (pending.key, pending.upload_id))

    def abort_upload(self, upload: PendingUpload) -> None:
        """Forget an upload. See `ObjectStore.abort_upload`."""
        with self._lock:
            _, begun = self._uploads.get(upload.upload_id, (None, None))
        if begun is not None:
            begun.abort_for_another()

    def forget(self, upload: PendingUpload) -> None:
        """Take an upload that has ended off the list."""
        with self._lock:
            self._uploads.pop(upload.upload_id, None)

    def _find(self, key: str) -> tuple[bytes, ObjectInfo]:
        with self._lock:
            try:
                return self._objects[checked_key(key)]
            except KeyError:
                raise NotFoundError(f"{key} is not in {self.url}.", key=key) from None


class MemoryUpload:
    """An object that becomes visible when it is complete. See `port.Upload`."""

    def __init__(self, store: MemoryStore, pending: PendingUpload, size: int) -> None:
        self._store, self._pending, self._key, self._size = store, pending, pending.key, size
        self._body: bytearray | None = bytearray()
        self._is_taken_away = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, which is copied."""
        self._check_there()
        if self._body is None:
            raise InvalidInputError(f"The upload of {self._key} has ended.", key=self._key)
        if len(self._body) + memoryview(data).nbytes > self._size:
            raise InvalidInputError(f"The upload of {self._key} was announced with {self._size} bytes.", key=self._key)
        self._body += data

    def complete(self) -> ObjectInfo:
        """Publish what was written. If killed: the whole object or none."""
        self._check_there()
        if self._body is None or len(self._body) != self._size:
            written = None if self._body is None else len(self._body)
            self.abort()
            raise InvalidInputError(
                f"The upload of {self._key} was announced with {self._size} bytes and has {written}.", key=self._key
            )
        body = bytes(self._body)
        self.abort()
        return self._store.put(self._key, body)

    def abort(self) -> None:
        """Forget what was written."""
        self._body = None
        self._store.forget(self._pending)

    def abort_for_another(self) -> None:
        """Forget what was written, because somebody who collects says so: whoever writes here hears of it."""
        self._is_taken_away = True
        self.abort()

    def _check_there(self) -> None:
        if self._is_taken_away:
            raise UnavailableError(f"The upload of {self._key} was aborted by somebody else.", key=self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _etag(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
