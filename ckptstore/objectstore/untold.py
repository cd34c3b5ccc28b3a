"""Stores of which nobody tells what uploads are incomplete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NoReturn

from ckptstore.errors import UnsupportedError
from ckptstore.objectstore.port import PendingUpload


class UploadsUntold:
    """The part of `ObjectStore` that is about incomplete uploads, where none is ever named."""

    url: str
    silent: ClassVar[str]
    """Who does not tell, for people."""
    instead: ClassVar[str]
    """What becomes of them, or what to do about them."""

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`.

        Raises:
            UnsupportedError: Always.
        """
        self._refuse(prefix)

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`. None is named, so there is none to forget.

        Raises:
            UnsupportedError: Always.
        """
        self._refuse(upload.key)

    def _refuse(self, where: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.silent} does not tell which uploads under {self.url}/{where} are incomplete.", hint=self.instead
        )
