"""One object on its way through obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

import obstore

from ckptstore.errors import CkptStoreError, IntegrityError, InvalidInputError, NotFoundError, OutcomeUnknownError
from ckptstore.objectstore.obstore_errors import Request, translating
from ckptstore.objectstore.port import ObjectInfo


class ObstoreUpload:
    """An object streamed in parts, several of them on their way at once. See `port.Upload`.

    Each part carries its checksum. What fits into one part is sent in one request, when it is complete.

    Args:
        writer: obstore's, owned by this upload from now on.
        request: What is being asked for, for messages.
        size: How many bytes were announced.
        part_bytes: The size of the parts.
        head: Asks the store for the object, past every cache.
    """

    def __init__(
        self,
        writer: obstore.WritableFile,
        request: Request,
        *,
        size: int,
        part_bytes: int,
        head: Callable[[], ObjectInfo],
    ) -> None:
        self._writer: obstore.WritableFile | None = writer
        self._request, self._head = request, head
        self._size, self._part_bytes, self._written = size, part_bytes, 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, which is copied. Waits while as many parts as allowed are on their way."""
        view = memoryview(data).cast("B")
        if self._writer is None or self._written + len(view) > self._size:
            raise self._wrong_size(self._written + len(view))
        # obstore does not copy what it is given, and sends it later: only bytes that nobody can change are safe.
        unchangeable = isinstance(view.obj, bytes)
        with translating(self._request):
            for start in range(0, len(view), self._part_bytes):  # it counts parts only between two writes
                piece = view[start : start + self._part_bytes]
                self._written += self._writer.write(piece if unchangeable else bytes(piece))

    def complete(self) -> ObjectInfo:
        """Publish what was written.

        Raises:
            InvalidInputError: The bytes written are not as many as were announced.
            OutcomeUnknownError: The object may or may not be there.

        If killed: the whole object, or none under its key; perhaps an incomplete upload.
        """
        if self._writer is None or self._written != self._size:
            fault = self._wrong_size(self._written)
            self.abort()
            raise fault
        writer, self._writer = self._writer, None
        failure: CkptStoreError | None = None
        try:
            with translating(self._request):
                writer.close()
        except CkptStoreError as error:
            failure = error
        return self._confirmed(failure)

    def _confirmed(self, failure: CkptStoreError | None) -> ObjectInfo:
        # The answer may be lost, or be that of a second try. Nobody else ever writes this key (I6): ask for it.
        try:
            info = self._head()
        except NotFoundError as absent:
            raise failure or OutcomeUnknownError(
                f"{self._request.url} was stored, and cannot be seen.", key=self._request.key
            ) from absent
        except CkptStoreError as error:
            raise failure or OutcomeUnknownError(
                f"{self._request.url} may or may not have been stored.", key=self._request.key
            ) from error
        if info.size != self._size:
            raise IntegrityError(
                f"{self._request.url} has {info.size} bytes, {self._size} were written.", key=self._request.key
            )
        return info

    def abort(self) -> None:
        """Give the upload up, and let the server forget its parts. Never raises."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # an unreachable server keeps the parts; they are under no key
                writer.__exit__(InterruptedError, InterruptedError(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _wrong_size(self, written: int) -> InvalidInputError:
        if self._writer is None:
            return InvalidInputError(f"The upload of {self._request.key} has ended.", key=self._request.key)
        return InvalidInputError(
            f"The upload of {self._request.key} was announced with {self._size} bytes and has {written}.",
            key=self._request.key,
        )
