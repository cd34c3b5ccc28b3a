"""A store that notes what the credentials were allowed to do, one permission at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ckptstore.errors import AccessDeniedError, CkptStoreError, UnsupportedError
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload, PutMode, Upload
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload

LIST, READ, CREATE, OVERWRITE = "list", "read", "create", "overwrite"
DELETE, MULTIPART, ABORT, LIST_UPLOADS = "delete", "multipart", "abort", "list uploads"
PERMISSIONS = (LIST, READ, CREATE, OVERWRITE, DELETE, MULTIPART, ABORT, LIST_UPLOADS)


class NotingStore(ForwardingStore):
    """Every call goes to `inner`; what was allowed and what was refused is noted. Thread-safe.

    Attributes:
        allowed: Permissions that were used with success.
        refused: Permissions that were denied, with the first error.
        written: Keys that may hold something of ours now.
        tells_absence: An absent key was seen to read as absent: so a refusal is one of the permission to read.
        sent: Bytes of bodies that were written.
        received: Bytes that were read.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.allowed: set[str] = set()
        self.refused: dict[str, CkptStoreError] = {}
        self.written: set[str] = set()
        self.sent = self.received = 0
        self.tells_absence = False
        self._lock = threading.Lock()

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """See `ObjectStore.put`."""
        with self._writing(key), self.noting(CREATE if mode is PutMode.CREATE else OVERWRITE):
            info = super().put(key, body, mode=mode)
        self.count(sent=len(body))
        return info

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore.get`. Where nothing of ours is, a refusal says nothing of the permission to read."""
        with self._reading(key):
            body = super().get(key, max_bytes=max_bytes)
        self.count(received=len(body))
        return body

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """See `ObjectStore.get_range`."""
        with self._reading(key):
            body = super().get_range(key, start=start, length=length)
        self.count(received=len(body))
        return body

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with self._reading(key):
            return super().head(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        with self.noting(LIST):
            return iter(list(super().list(prefix, after=after)))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self.noting(DELETE):
            super().delete(key)
        with self._lock:
            self.written.discard(key)

    def open_upload(self, key: str, *, size: int) -> Upload:
        """See `ObjectStore.open_upload`."""
        with self._writing(key), self.noting(MULTIPART, success_counts=False):
            return _NotingUpload(self, super().open_upload(key, size=size))

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`."""
        with self.noting(LIST_UPLOADS):
            return iter(list(super().list_uploads(prefix)))

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`."""
        with self.noting(ABORT):
            super().abort_upload(upload)

    @contextlib.contextmanager
    def noting(self, permission: str, *, success_counts: bool = True, denial_counts: bool = True) -> Iterator[None]:
        """Note what comes of what is done inside."""
        try:
            yield
        except (AccessDeniedError, UnsupportedError) as error:
            if denial_counts:
                with self._lock:
                    self.refused.setdefault(permission, error)
            raise
        if success_counts:
            with self._lock:
                self.allowed.add(permission)

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Add to what was moved."""
        with self._lock:
            self.sent, self.received = self.sent + sent, self.received + received

    def _reading(self, key: str) -> contextlib.AbstractContextManager[None]:
        return self.noting(READ, denial_counts=self.tells_absence or key in self.written)

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        with self._lock:
            new = key not in self.written
            self.written.add(key)  # before it is sent: an interrupt may come between the request and its answer
        try:
            yield
        except (AccessDeniedError, UnsupportedError):
            with self._lock:
                self.written -= {key} if new else set()
            raise


class _NotingUpload(ForwardingUpload):
    def __init__(self, store: NotingStore, inner: Upload) -> None:
        super().__init__(inner)
        self._store = store

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._store.noting(MULTIPART, success_counts=False):
            super().write(data)
        self._store.count(sent=memoryview(data).nbytes)

    def complete(self) -> ObjectInfo:
        with self._store.noting(MULTIPART):
            return super().complete()
