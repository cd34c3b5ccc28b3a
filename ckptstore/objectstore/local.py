"""Objects as files.

An object is written to a temporary in its own directory, synced, and then linked (create) or renamed (overwrite) to its
name; then the directory is synced, and on a directory's first use every directory from it up to the run's root. A
temporary that a killed process left behind is never listed or read; it takes its space until somebody removes it (it is
called `.ckptstore-tmp-*`, and is nobody's once its process has ended). The directory of an attempt or a probe goes
with the last object that is deleted in it.

The root may be reached by symbolic links. Below it none is followed, not even one that stands in the place of a
directory: nothing is read, written or deleted outside of the root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptstore.errors import IntegrityError, InvalidInputError, NotFoundError
from ckptstore.objectstore.durable import TEMPORARY, DurablePlace, Temporary, translated
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range
from ckptstore.objectstore.port import ObjectInfo, PendingUpload, PutMode


class LocalStore:
    """Objects under a directory. Thread-safe; may be pickled.

    Args:
        root: An absolute path. It need not exist; only a write makes it.

    Raises:
        InvalidInputError: It, or something above it, is no directory.
        AccessDeniedError: It may not be looked at.
    """

    engine = "local"
    endpoint = None

    def __init__(self, root: str) -> None:
        self.url = f"file://{root}"
        self._root = Path(root)
        self._place = DurablePlace(self._root)
        try:
            is_directory = stat.S_ISDIR(self._root.stat().st_mode)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            is_directory = False
        except OSError as error:
            raise translated(error, self._root) from error
        if not is_directory:
            raise InvalidInputError(
                f"{root} cannot be a run's root: a file stands there, or above it.", hint="Name a directory.", path=root
            )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self._root),)

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object. See `ObjectStore.put`.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there.
            UnsupportedError: The file system has no hard links, or cannot sync a directory.
            OutcomeUnknownError: It is there, but may not survive a crash of the machine.

        If killed: the whole object or none; perhaps a temporary, which is never listed.
        """
        with contextlib.closing(Temporary(self._place, self._path(key))) as temporary:
            temporary.write(body)
            return _info(key, temporary.publish(create=mode is PutMode.CREATE))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`."""
        with self._opened(key) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > max_bytes:
                raise IntegrityError(f"{key} has {size} bytes, at most {max_bytes} are allowed.", key=key)
            body = _read(descriptor, 0, size + 1)  # room for what is there, and a byte that tells whether it grows
        if len(body) != size:
            raise IntegrityError(f"{key} was changed while it was read: it had {size} bytes.", key=key)
        return body

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        checked_range(key, start, length)
        with self._opened(key) as descriptor:
            fits = start + length <= os.fstat(descriptor).st_size  # else no room is made for it
            piece = _read(descriptor, start, length) if fits else b""
        if len(piece) != length:
            raise IntegrityError(f"{key} ends before {start + length}.", key=key)
        return piece

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        with self._opened(key) as descriptor:
            return _info(key, os.fstat(descriptor))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`. Symbolic links are neither listed nor followed."""
        checked_prefix(prefix)
        self._place.check_running()
        return self._walk(prefix, after)

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`.

        If killed: the object or not, and perhaps its empty directory; after a crash of the machine it may be back.
        """
        self._unlink(self._path(key))
        self._leave_no_empty(key)

    def _unlink(self, path: Path) -> None:
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
        except OSError as error:
            ours = translated(error, path)
            if not isinstance(ours, NotFoundError):
                raise ours from error

    def open_upload(self, key: str, *, size: int) -> LocalUpload:
        """Begin to stream an object. See `ObjectStore.open_upload`.

        If killed: a temporary, which is never listed.
        """
        return LocalUpload(Temporary(self._place, self._path(key)), key, size)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the temporaries under `prefix`, of living and of killed writers. See `ObjectStore.list_uploads`."""
        checked_prefix(prefix)
        self._place.check_running()
        for info in self._walk(prefix, None, temporaries=True):
            if _is_utf8(info.key):  # else it is none of ours
                yield PendingUpload(info.key, info.key, info.modified)

    def abort_upload(self, upload: PendingUpload) -> None:
        """Remove a temporary. See `ObjectStore.abort_upload`.

        If killed: the temporary, or not, and perhaps its empty directory.
        """
        directory, _, name = checked_key(upload.upload_id).rpartition("/")
        if not name.startswith(TEMPORARY):
            raise InvalidInputError(f"{upload.upload_id!r} is no temporary.", key=upload.upload_id)
        self._unlink(self._beneath(f"{directory}/{name}" if directory else name))
        self._leave_no_empty(upload.upload_id)

    def _leave_no_empty(self, key: str) -> None:
        """Remove an attempt's or a probe's own directory with its last object: else each would hold an inode for ever.

        Whoever writes there meanwhile makes it again. That its new name may not be durable yet harms nobody: what is
        deleted is of attempts that can never commit, of retired ones, and of probes.
        """
        directory = key.rpartition("/")[0]
        if "/" in directory:  # those at the top are for all
            with contextlib.suppress(OSError):  # it is not empty, as a rule
                self._beneath(directory).rmdir()

    def _path(self, key: str) -> Path:
        self._place.check_running()
        if f"/{TEMPORARY}" in f"/{checked_key(key)}":
            raise InvalidInputError(f"The key {key!r} is a temporary's.", key=key)
        return self._beneath(key)

    def _beneath(self, key: str) -> Path:
        """Return the path of `key`, below the root: a directory on the way that is a link is never followed."""
        *directories, name = key.split("/")
        path = self._root
        for directory in directories:
            path /= directory
            try:
                is_link = stat.S_ISLNK(path.lstat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                break
            except OSError as error:
                raise translated(error, path) from error
            if is_link:
                raise _no_file(key, path, "is a link, which could lead anywhere, and is not followed")
        return self._root.joinpath(*directories, name)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        path = self._path(key)
        try:
            # Without O_NONBLOCK a FIFO that somebody put there would hang the reader.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise _no_file(key, path)
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO) and (path.is_symlink() or path.is_socket()):
                raise _no_file(key, path) from error  # a link, which is not followed, or a socket
            raise translated(error, path) from error

    def _walk(self, prefix: str, after: str | None, *, temporaries: bool = False) -> Iterator[ObjectInfo]:
        left = _entries(self._beneath(prefix), prefix, temporaries=temporaries)
        while left:
            key, entry = left.pop()
            if key.endswith("/"):
                if after is None or after < key or after.startswith(key):
                    left += _entries(self._beneath(key), key, temporaries=temporaries)
            elif (after is None or key > after) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted while we walk
                    yield _info(key, entry.stat(follow_symlinks=False))


class LocalUpload:
    """A file that gets its name when it is complete. See `port.Upload`."""

    def __init__(self, temporary: Temporary, key: str, size: int) -> None:
        self._temporary: Temporary | None = temporary
        self._key, self._size, self._written = key, size, 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        if self._temporary is None:
            raise InvalidInputError(f"The upload of {self._key} has ended.", key=self._key)
        self._written += memoryview(data).nbytes
        if self._written > self._size:
            raise InvalidInputError(f"The upload of {self._key} was announced with {self._size} bytes.", key=self._key)
        self._temporary.write(data)

    def complete(self) -> ObjectInfo:
        """Publish what was written. If killed: the whole object or none."""
        if self._temporary is None or self._written != self._size:
            written = None if self._temporary is None else self._written
            self.abort()
            raise InvalidInputError(
                f"The upload of {self._key} was announced with {self._size} bytes and has {written}.", key=self._key
            )
        with contextlib.closing(self._temporary) as temporary:
            self._temporary = None
            return _info(self._key, temporary.publish(create=False))

    def abort(self) -> None:
        """Remove what was written."""
        if self._temporary is not None:
            self._temporary.close()
            self._temporary = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _entries(directory: Path, prefix: str, *, temporaries: bool) -> list[tuple[str, os.DirEntry[str]]]:
    """Return what stands in a directory, by key, the last first."""
    try:
        with os.scandir(directory) as scan:
            entries = [entry for entry in scan if _is_wanted(entry, temporaries=temporaries)]
    except (FileNotFoundError, NotADirectoryError):
        return []  # absent, or deleted while we walk
    except OSError as error:
        raise translated(error, directory) from error
    # With its slash a directory sorts where its keys sort: `a-b`, `a/b`, `ab`.
    keys = {f"{prefix}{e.name}/" if e.is_dir(follow_symlinks=False) else f"{prefix}{e.name}": e for e in entries}
    return sorted(keys.items(), key=lambda pair: pair[0], reverse=True)


def _is_wanted(entry: os.DirEntry[str], *, temporaries: bool) -> bool:
    is_temporary = entry.name.startswith(TEMPORARY)
    return not is_temporary if entry.is_dir(follow_symlinks=False) else is_temporary is temporaries


def _is_utf8(key: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in key)


def _no_file(key: str, path: Path, what: str = "is no file") -> IntegrityError:
    # Never "not found": a slot in which something else stands would pass for the log's end.
    return IntegrityError(
        f"What stands at {path} {what}.",
        hint=f"Look at {path}, and move away what is none of ours.",
        key=key,
        path=str(path),
    )


def _read(descriptor: int, start: int, length: int) -> bytes:
    pieces = []
    while length > 0 and (piece := os.pread(descriptor, length, start)):
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    # A file has no identity of its bytes: inode and times survive a rewrite in place, or change with a mere copy.
    return ObjectInfo(key, status.st_size, None, status.st_mtime)
