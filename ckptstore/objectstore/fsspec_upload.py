"""One object on its way through fsspec.

Some file systems write to a temporary and give it its name at the end (`commit`), or throw it away (`discard`). For the
others, what is written is kept here, in memory and then in a temporary file, and sent when it is complete.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import IO, Any, Protocol

from fsspec.implementations.memory import MemoryFile
from fsspec.spec import AbstractBufferedFile

from ckptstore.errors import CkptStoreError, IntegrityError
from ckptstore.objectstore.announced import Announced
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.fsspec_errors import translating
from ckptstore.objectstore.fsspec_place import FsspecPlace
from ckptstore.objectstore.port import ObjectInfo

# What does nothing: fsspec's own defaults.
_EMPTY = (AbstractBufferedFile.commit, AbstractBufferedFile.discard, MemoryFile.commit, MemoryFile.discard)


class Sink(Protocol):
    """Where the bytes of an upload go until it is complete."""

    def write(self, data: memoryview) -> object:
        """Take `data`, which may change afterwards."""

    def publish(self) -> None:
        """Give what was written its name."""

    def close(self) -> None:
        """Free everything, and remove what was not published."""


class FsspecUpload(Announced):
    """An object that gets its name when it is complete. See `port.Upload`.

    Args:
        sink: Where the bytes go.
        request: What is being asked for, for messages.
        size: How many bytes were announced.
        head: Asks for the object, past every cache.
        delete: Deletes it.
    """

    def __init__(
        self,
        sink: Sink,
        request: Request,
        *,
        size: int,
        head: Callable[[], ObjectInfo],
        delete: Callable[[], None],
    ) -> None:
        super().__init__(request, size=size)
        self._sink, self._head, self._delete = sink, head, delete

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = self._admitted(data)
        try:
            with translating(self._request):
                self._sink.write(view)
        except BaseException:
            self.abort()  # a part of `data` may have been taken: nothing can follow it
            raise
        self._written += len(view)

    def complete(self) -> ObjectInfo:
        """Publish what was written.

        Raises:
            InvalidInputError: The bytes written are not as many as were announced.
            IntegrityError: Others than these are there. They were deleted, if that could be done.
            OutcomeUnknownError: The object may or may not be there.

        If killed: the whole object, or none under its key; on a file system that cannot give a name at the end, perhaps
            a part of the object. No commit names it.
        """
        self._check_whole()
        try:
            with translating(self._request):
                self._sink.publish()
            info = self._head()
        except BaseException:
            self._remove()  # nobody else ever writes this key (I6): what stands there is a part of ours
            raise
        finally:
            self.abort()
        if info.size != self._size:
            self._remove()
            raise IntegrityError(
                f"{self._request.url} has {info.size} bytes, {self._size} were written.", key=self._request.key
            )
        return info

    def abort(self) -> None:
        """Give the upload up, and free what it holds. Never raises."""
        if self._end():
            with contextlib.suppress(Exception):  # a temporary that cannot be removed takes its space
                self._sink.close()

    def _remove(self) -> None:
        with contextlib.suppress(CkptStoreError):
            self._delete()


def drop(place: FsspecPlace, file: Any, path: str) -> None:
    """Give up a file that is open for writing, so that nothing of it is there, now or once it is collected.

    Most publish when they are closed, and are marked as closed. Others are there since they were opened, and removed.

    Args:
        place: The file system.
        file: What its `open` returned.
        path: Where it would stand. Nobody else writes there.
    """
    if hasattr(type(file), "_upload_chunk"):  # what closes it properly would send what it holds, and publish
        with contextlib.suppress(Exception):  # parts that cannot be removed take their space
            file.discard()
        file.closed = True
        return
    with contextlib.suppress(Exception):
        file.close()
    with contextlib.suppress(Exception):  # mostly it made nothing
        place.fs.rm_file(path)


class Committed:
    """A file that the file system itself keeps under another name until it is committed.

    Args:
        file: Open for writing with `autocommit=False`.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._published = file, False

    @staticmethod
    def can(file: Any) -> bool:
        """Return whether `file` has a commit and a discard that do something."""
        methods = [getattr(file, name, None) for name in ("commit", "discard")]
        return all(callable(method) and getattr(method, "__func__", None) not in _EMPTY for method in methods)

    def write(self, data: memoryview) -> object:
        """See `Sink`."""
        return self._file.write(bytes(data))  # some keep what they are given

    def publish(self) -> None:
        """See `Sink`."""
        self._file.close()
        self._file.commit()
        self._published = True

    def close(self) -> None:
        """See `Sink`."""
        if not self._published:
            with contextlib.suppress(Exception):  # what cannot be sent is to be thrown away anyway
                self._file.close()
            self._file.discard()


class KeptBack:
    """Bytes that are kept here until they are complete.

    Args:
        place: The file system.
        path: Where they are to stand.
        piece_bytes: How many are kept in memory, and sent at once.
    """

    def __init__(self, place: FsspecPlace, path: str, piece_bytes: int) -> None:
        self._place, self._path, self._piece_bytes = place, path, piece_bytes
        self._kept: IO[bytes] = tempfile.SpooledTemporaryFile(0 if place.is_memory else piece_bytes)  # noqa: SIM115  (closed by `close`)

    def write(self, data: memoryview) -> object:
        """See `Sink`."""
        return self._kept.write(data)

    def publish(self) -> None:
        """See `Sink`."""
        size = self._kept.tell()
        self._kept.seek(0)
        if self._place.is_memory or size <= self._piece_bytes:
            with self._place.turn():
                self._place.fs.pipe_file(self._path, self._kept.read())
            return
        with self._place.turn():
            file = self._place.fs.open(self._path, "wb")
            try:
                while piece := self._kept.read(self._piece_bytes):
                    file.write(piece)
                file.close()
            except BaseException:
                drop(self._place, file, self._path)  # leaving a `with` would publish what was written
                raise

    def close(self) -> None:
        """See `Sink`."""
        self._kept.close()
