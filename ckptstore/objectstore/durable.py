"""Files that are whole and durable, or not there.

Two rules come from what fsync means. A failed fsync of a temporary ends that write: its bytes are never trusted again.
A failed fsync of a directory ends the place for this process: a second fsync may succeed without having written what
the first one lost, so after it not even a read-back may call an object stored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

from ckptstore.clock import SystemIds
from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.units import MIB

TEMPORARY = ".ckptstore-tmp-"

WRITE_BACK_BYTES = 32 * MIB
REMADE = 8
"""How often a directory is made again that others remove, as they delete the last object in it."""

# The one table of this engine's foreign errors. Where they are raised, nothing has been published yet.
KIND_BY_ERRNO: dict[int, type[CkptStoreError]] = {
    errno.ENOENT: NotFoundError,
    errno.ENOTDIR: NotFoundError,
    errno.EISDIR: NotFoundError,
    errno.ELOOP: NotFoundError,  # a symbolic link: never followed, so no object
    errno.ENXIO: NotFoundError,  # a socket: no object
    errno.EACCES: AccessDeniedError,
    errno.EPERM: AccessDeniedError,
    errno.EROFS: AccessDeniedError,
    errno.ENAMETOOLONG: InvalidInputError,
}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


class DurablePlace:
    """A directory whose files survive a crash of the machine once they are published. Thread-safe.

    Args:
        root: Need not exist; it is made by the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._synced: set[Path] = set()
        self._locks: dict[int, threading.Lock] = {}  # by process: a fork may copy one while it is held
        self._stopped: str | None = None

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def check_running(self) -> None:
        """Check that no directory's fsync has failed.

        Raises:
            UnavailableError: One has. Nothing read here may be called durable any more.
        """
        if self._stopped is not None:
            raise UnavailableError(self._stopped, hint="Check the disk, then start the process again.")

    def create(self, path: Path) -> int:
        """Create an empty file, and the directories above it; return its open descriptor.

        Raises:
            OSError: It cannot be created; nothing is left but perhaps directories.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for left in range(REMADE, -1, -1):
            try:
                self._ensure(path.parent)
                return os.open(path, flags, 0o666)
            except (FileNotFoundError, FileExistsError):  # the directory was removed, at any of these moments
                if not left:
                    raise
                with self._lock:
                    self._synced.discard(path.parent)
        raise AssertionError("not reached")

    def sync_directory(self, directory: Path) -> None:
        """Make the names in `directory` durable.

        Raises:
            UnsupportedError: The file system cannot.
            OSError: It failed. The place is stopped.
        """
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in _NO_SYNC:
                raise UnsupportedError(
                    f"{directory} cannot be synced: a crash of the machine would lose committed checkpoints.",
                    hint="Use another file system.",
                    path=str(directory),
                ) from error
            self._stopped = f"fsync of {directory} failed: {error.strerror}."
            raise
        finally:
            os.close(descriptor)

    def _ensure(self, directory: Path) -> None:
        """Make `directory`, and make it durable from the bottom up, to the root and to what had to be made above."""
        with self._lock:
            if directory in self._synced:
                return
            standing = directory
            while not standing.exists():
                standing = standing.parent
            directory.mkdir(parents=True, exist_ok=True)
            # Another process may have made a directory and not have synced it yet: all are synced, not only ours.
            highest = min(standing, self.root.parent, key=lambda path: len(path.parts))
            for path in (directory, *directory.parents[: len(directory.parts) - len(highest.parts)]):
                try:
                    self.sync_directory(path)
                except PermissionError:
                    # Above a root that stood already nothing is ours, and it need not be readable.
                    if path.is_relative_to(self.root) or not standing.is_relative_to(self.root):
                        raise
            self._synced.add(directory)


class Temporary:
    """A file that is nobody's object yet. Closed without having been published, it is removed.

    If killed: the file, under a name that is never listed.
    """

    def __init__(self, place: DurablePlace, path: Path) -> None:
        self._place, self._target = place, path
        self._path = path.parent / f"{TEMPORARY}{SystemIds().nonce()}"
        self._descriptor: int | None = None
        self._written = self._started = 0
        try:
            self._descriptor = place.create(self._path)
        except BaseException as error:
            self._remove()  # if a signal's handler raised, the file may be there, and nobody owns it
            if isinstance(error, OSError):
                raise translated_write(error, path) from error
            raise

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`.

        Raises:
            CkptStoreError: The system's error, translated.
        """
        view = memoryview(data).cast("B")
        try:
            while view:
                count = os.write(self._open_descriptor, view)
                view = view[count:]
                self._written += count
                if self._written - self._started >= WRITE_BACK_BYTES:
                    self._write_back()
        except OSError as error:
            raise translated_write(error, self._target) from error

    def _write_back(self) -> None:
        """Let the disk begin, so that the fsync at the end has little left to do, and the page cache stay others'.

        What is dirty begins to be written; what the call before this one began, and is clean by now, leaves the cache.
        In a memory file system it does nothing. It is advice: where a file system refuses it, fsync has more to do.
        """
        start = max(0, self._started - WRITE_BACK_BYTES)
        self._started = self._written
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._open_descriptor, start, self._written - start, os.POSIX_FADV_DONTNEED)

    def publish(self, *, create: bool) -> os.stat_result:
        """Give the file its name, durably, and return what the system says of it.

        Raises:
            AlreadyExistsError: `create`, and something has that name.
            UnsupportedError: `create`, and the file system has no hard links.
            OutcomeUnknownError: The name is given, but may not survive a crash of the machine.
            CkptStoreError: The system's error, translated. No name was given.
        """
        try:
            os.fsync(self._open_descriptor)
            if self._started:
                self._write_back()
            status = os.fstat(self._open_descriptor)
            if create:
                self._link()
            else:
                self._path.replace(self._target)
        except OSError as error:
            raise translated_write(error, self._target) from error
        self.close()
        try:
            self._place.sync_directory(self._target.parent)
        except OSError as error:
            raise OutcomeUnknownError(
                f"{self._target} is there, but may not survive a crash of the machine: fsync of its directory failed.",
                path=str(self._target),
                errno=error.errno,
            ) from error
        return status

    def close(self) -> None:
        """Remove the temporary. Never raises."""
        if self._descriptor is not None:
            self._remove()  # first: an interrupt may come between
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # its bytes are synced already, or given up
                os.close(descriptor)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # it has been renamed; or it is left over, which harms nothing
            self._path.unlink()

    @property
    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "written to after it was closed"  # noqa: S101  (a second look)
        return self._descriptor

    def _link(self) -> None:
        try:
            os.link(self._path, self._target)
        except FileExistsError as error:
            if not self._target.is_file() or self._target.is_symlink():
                raise  # no object, and never one that could be read back
            raise AlreadyExistsError(f"{self._target} exists.", path=str(self._target)) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise UnsupportedError(
                f"{self._target} cannot be created by a hard link ({error.strerror}): "
                "two writers could both believe that they committed.",
                hint="Use a file system with hard links, or an object store.",
                path=str(self._target),
                errno=error.errno,
            ) from error


def translated(error: OSError, path: Path) -> CkptStoreError:
    """Return our error for the system's, with the path and the number."""
    kind = KIND_BY_ERRNO.get(error.errno or 0, UnavailableError)
    name = errno.errorcode.get(error.errno or 0, "no number")
    hint = "Make room there, and try again." if error.errno in _FULL else ""
    return kind(f"{path}: {error.strerror or error} ({name}).", hint=hint, path=str(path), errno=error.errno)


def translated_write(error: OSError, path: Path) -> CkptStoreError:
    """Return our error for the system's while writing, where 'absent' can only mean that something is in the way."""
    ours = translated(error, path)
    if isinstance(ours, NotFoundError) or error.errno == errno.EEXIST:
        message = f"{path} cannot be written: something else stands in its way ({error.strerror})."
        return UnsupportedError(
            message, hint=f"Look at {path}, and move away what is none of ours.", path=str(path), errno=error.errno
        )
    return ours
