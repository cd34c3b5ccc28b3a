"""One object on its way through obstore."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import obstore

from ckptstore.errors import (
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.lent import may_be_kept
from ckptstore.objectstore.patience import Patience, tried
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.options import RetryOptions

_TAIL_BYTES = 1024
_BEGINNINGS = 4


class ObstoreUpload:
    """An object streamed in parts, several of them on their way at once. See `port.Upload`.

    Each part carries its checksum. What fits into one part is sent in one request, when it is complete.

    Args:
        open_writer: Returns a new one of obstore's.
        translating: Makes what lets nothing foreign out of a block.
        key: The object's key.
        size: How many bytes were announced.
        part_bytes: The size of the parts.
        retry: How long to wait before the upload is begun anew.
        store: Where the object can be seen, past every cache.
    """

    def __init__(  # noqa: PLR0913  (what an upload is made of, written out)
        self,
        open_writer: Callable[[], obstore.WritableFile],
        translating: Callable[[], contextlib.AbstractContextManager[None]],
        *,
        key: str,
        size: int,
        part_bytes: int,
        retry: RetryOptions,
        store: ObjectStore,
    ) -> None:
        self._open_writer, self._retry = open_writer, retry
        self._writer: obstore.WritableFile | None = open_writer()
        self._before_begun: list[bytes | memoryview] | None = []
        self._translating, self._store, self._key = translating, store, key
        self._size, self._part_bytes, self._written = size, part_bytes, 0
        self._tail = b""
        self._process = os.getpid()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, which is copied if it may change. Waits while as many parts as allowed are on their way.

        Raises:
            InvalidInputError: It is more than was announced, or the upload has ended.
            UnsupportedError: It was begun before this process was forked.
            UnavailableError: A part could not be sent, however often it was tried. Nothing is published.
            StalledError: A part was not answered in time, however often it was tried.
        """
        self._refuse_fork()
        view = memoryview(data).cast("B")
        if self._writer is None or self._written + len(view) > self._size:
            raise self._wrong_size(self._written + len(view))
        self._tail = (self._tail + bytes(view[-_TAIL_BYTES:]))[-_TAIL_BYTES:]
        # obstore does not copy what it is given, and sends it later: only bytes that nobody can change are safe.
        unchangeable = may_be_kept(view)
        for start in range(0, len(view), self._part_bytes):  # it counts parts only between two writes
            piece = view[start : start + self._part_bytes]
            self._send(piece if unchangeable else bytes(piece))
            self._written += len(piece)

    def _send(self, piece: bytes | memoryview) -> None:
        """Hand `piece` to obstore.

        The answer to the request that begins an upload is the one that obstore does not ask for again if it breaks off.
        Until it has come nothing has been sent: the upload is begun anew, with what was handed over before.
        """
        held, patience = self._before_begun, Patience(self._retry)
        pieces = [piece]
        for left in reversed(range(_BEGINNINGS if held is not None else 1)):
            try:
                with self._translating():
                    for each in pieces:
                        cast("obstore.WritableFile", self._writer).write(each)
                break
            except (UnavailableError, OutcomeUnknownError) as error:
                # A server that has answered was asked often enough.
                pause = patience.pause_after(error) if left and error.facts.get("status") is None else None
                if pause is None or held is None:
                    raise
            time.sleep(pause)
            self._writer, pieces = self._open_writer(), [*held, piece]
        if held is not None:
            held.append(piece)  # obstore holds the same memory
            self._before_begun = held if sum(map(len, held)) < self._part_bytes else None

    def complete(self) -> ObjectInfo:
        """Publish what was written.

        Raises:
            InvalidInputError: The bytes written are not as many as were announced.
            OutcomeUnknownError: The object may or may not be there.
            StalledError: A part made no progress in time; there is no object.
            UnsupportedError: It was begun before this process was forked.

        If killed: the whole object, or none under its key; perhaps an incomplete upload.
        """
        self._refuse_fork()
        if self._writer is None or self._written != self._size:
            fault = self._wrong_size(self._written)
            self.abort()
            raise fault
        held, writers = self._before_begun, [self._writer]
        self._writer = None

        def publish() -> ObjectInfo:
            failure: OutcomeUnknownError | None = None
            try:
                with self._translating():
                    writer = writers.pop() if writers else self._rewritten(held or [])
                    writer.close()  # where it fails, it lets the server forget the parts
            except OutcomeUnknownError as error:
                failure = error
            return self._confirmed(failure)

        if held is None:
            return publish()
        # One request, which something else may have answered. Nobody else writes this key: it has the same effect
        # twice. A server that has answered was asked often enough.
        return tried(
            publish, Patience(self._retry, writes=True), hopeless=lambda error: error.facts.get("status") is not None
        )

    def _rewritten(self, pieces: list[bytes | memoryview]) -> obstore.WritableFile:
        writer = self._open_writer()
        for piece in pieces:
            writer.write(piece)
        return writer

    def _confirmed(self, failure: OutcomeUnknownError | None) -> ObjectInfo:
        # The answer may be lost, or be that of a second try. Nobody else ever writes this key (I6): ask for it.
        try:
            info = self._store.head(self._key)
        except NotFoundError as absent:
            raise failure or OutcomeUnknownError(
                f"{self._key} was stored, and cannot be seen.", key=self._key
            ) from absent
        except CkptStoreError as error:
            raise failure or OutcomeUnknownError(
                f"{self._key} may or may not have been stored.", key=self._key
            ) from error
        if info.size != self._size:
            raise IntegrityError(f"{self._key} has {info.size} bytes, {self._size} were written.", key=self._key)
        if not self._ends_as_written(info):
            raise failure or OutcomeUnknownError(f"{self._key} may or may not have been stored.", key=self._key)
        return info

    def _ends_as_written(self, info: ObjectInfo) -> bool:
        # obstore follows redirects, and a proxy's page may be as long. No page is called as S3 calls what it put
        # together of parts; where something else stands, the object's end is looked at.
        parts = -(-self._size // self._part_bytes)
        if self._size == 0 or (parts > 1 and info.etag is not None and info.etag.endswith(f"-{parts}")):
            return True
        try:
            start, length = self._size - len(self._tail), len(self._tail)
            return self._store.get_range(self._key, start=start, length=length) == self._tail
        except CkptStoreError:
            return False

    def abort(self) -> None:
        """Give the upload up, and let the server forget its parts. Never raises."""
        if os.getpid() != self._process:  # obstore's threads are not here, and the upload is its parent's
            return
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

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"The upload of {self._key} was begun before this process was forked.",
                hint="Go on with it where it was begun.",
                key=self._key,
            )

    def _wrong_size(self, written: int) -> InvalidInputError:
        if self._writer is None:
            return InvalidInputError(f"The upload of {self._key} has ended.", key=self._key)
        return InvalidInputError(
            f"The upload of {self._key} was announced with {self._size} bytes and has {written}.",
            key=self._key,
        )
