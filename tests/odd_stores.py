"""Stores that do one thing differently."""

import os
import threading

from ckptstore.errors import AccessDeniedError, NotFoundError, UnsupportedError
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload

DENIED = "403 AccessDenied"


class IgnoresTheCondition(ForwardingStore):
    """Answers 200 to a create, and overwrites: `rclone serve s3`, an old MinIO."""

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        del mode
        return super().put(key, body)


class Gated(ForwardingStore):
    """Lets an upload begin when its gate is open."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate, self.begun = threading.Event(), threading.Event()

    def open_upload(self, key, *, size):
        self.begun.set()
        assert self.gate.wait(60)
        return super().open_upload(key, size=size)


class Denies(ForwardingStore):
    """Refuses the calls that are named, as a server does whose policy lacks them."""

    def __init__(self, inner, *calls):
        super().__init__(inner)
        self._calls = calls

    def _refuse(self, call):
        if call in self._calls:
            raise AccessDeniedError(f"{call}: {DENIED}.")

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        self._refuse(mode.value)
        return super().put(key, body, mode=mode)

    def get(self, key, *, max_bytes):
        try:
            body = super().get(key, max_bytes=max_bytes)
        except NotFoundError:
            self._refuse("absent")
            raise
        self._refuse("read")
        return body

    def get_range(self, key, *, start, length):
        self._refuse("read")
        return super().get_range(key, start=start, length=length)

    def head(self, key):
        self._refuse("read")
        return super().head(key)

    def list(self, prefix, *, after=None):
        self._refuse("list")
        return super().list(prefix, after=after)

    def delete(self, key):
        self._refuse("delete")
        super().delete(key)

    def open_upload(self, key, *, size):
        return _Denied(super().open_upload(key, size=size), self)

    def list_uploads(self, prefix):
        self._refuse("list uploads")
        return super().list_uploads(prefix)

    def abort_upload(self, upload):
        self._refuse("abort")
        super().abort_upload(upload)


class _Denied(ForwardingUpload):
    def __init__(self, inner, store):
        super().__init__(inner)
        self._store = store

    def complete(self):
        self._store._refuse("multipart")
        return super().complete()


class NamesNoUploads(ForwardingStore):
    """Never tells which uploads are incomplete, nor aborts one: Google, Azure, what fsspec knows."""

    def list_uploads(self, prefix):
        del prefix
        raise UnsupportedError("It does not tell.", hint="They expire.")

    def abort_upload(self, upload):
        del upload
        raise UnsupportedError("It does not abort.", hint="They expire.")


class ListsLate(ForwardingStore):
    """Lists from a cache: what was just written is not there."""

    def list(self, prefix, *, after=None):
        del prefix, after
        return iter([])


class ReadsStale(ForwardingStore):
    """Reads an object as it was when it was first read."""

    def __init__(self, inner):
        super().__init__(inner)
        self._cache = {}

    def get(self, key, *, max_bytes):
        if key not in self._cache:
            self._cache[key] = super().get(key, max_bytes=max_bytes)
        return self._cache[key]


class MixesUpRanges(ForwardingStore):
    def get_range(self, key, *, start, length):
        return super().get_range(key, start=start - 1, length=length)


class CutsUploads(ForwardingStore):
    """Of an upload in parts the last one is not what was sent."""

    def open_upload(self, key, *, size):
        return _Cut(super().open_upload(key, size=size))


class _Cut(ForwardingUpload):
    def write(self, data):
        super().write(os.urandom(len(data)))


class ShowsUploadsEarly(ForwardingStore):
    def open_upload(self, key, *, size):
        self.put(key, b"a part of it")
        return super().open_upload(key, size=size)


class KeepsTheDeleted(ForwardingStore):
    """Says that it deletes."""

    def delete(self, key):
        pass
