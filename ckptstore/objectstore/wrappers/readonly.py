"""A store that cannot be changed."""

from __future__ import annotations

from typing import NoReturn

from ckptstore.errors import UnsupportedError
from ckptstore.objectstore.port import PendingUpload, PutMode
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore


class ReadOnlyStore(ForwardingStore):
    """Reads go to `inner`; every write raises `UnsupportedError` and sends nothing."""

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> NoReturn:
        """Refuse."""
        del body, mode
        self._refuse("put", key)

    def delete(self, key: str) -> NoReturn:
        """Refuse."""
        self._refuse("delete", key)

    def open_upload(self, key: str, *, size: int) -> NoReturn:
        """Refuse."""
        del size
        self._refuse("upload", key)

    def abort_upload(self, upload: PendingUpload) -> NoReturn:
        """Refuse."""
        self._refuse("abort", upload.key)

    def _refuse(self, doing: str, key: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.url} was opened for reading: no {doing} of {key}.", hint="Open it for writing.", key=key
        )
