"""Any file system that fsspec knows: whatever it is, as far as it can be trusted.

What fsspec promises is little. Whether a file system creates once, and whether it tells what is absent, is found out by
`probe.py` before anything is written: fsspec's own `local`, which looks and then writes, does not pass. Nothing is
synced, and a put that replaces may be seen half-done: use `file://` for files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ckptstore.errors import IntegrityError, NotFoundError, UnsupportedError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.fsspec_errors import ABSENT, translating
from ckptstore.objectstore.fsspec_place import FsspecPlace, checked_kind, public_url
from ckptstore.objectstore.fsspec_upload import Committed, FsspecUpload, KeptBack, Sink, drop
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range, fault_of_segments
from ckptstore.objectstore.port import ObjectInfo, PutMode
from ckptstore.objectstore.untold import UploadsUntold
from ckptstore.options import TransferOptions

# Where file systems say when a file was written, the best one first.
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FsspecStore(UploadsUntold):
    """A directory of one of fsspec's file systems. As safe for threads as that is; may be pickled.

    The file system is made when it is first used, in each process anew, and shared with nobody. No glob is expanded,
    and nothing is listed from a cache. How long a call may take is up to the file system.

    Args:
        protocol: fsspec's name for the kind of file system.
        root: What follows `://` in a URL.
        options: For the file system's class. Most of them accept any name.
        transfer: How large objects are moved.

    Raises:
        InvalidInputError: fsspec knows no such protocol, an option is not the user's to set, or the URL cannot be read.
        UnsupportedError: Its package is not installed; or it reads from a cache.
    """

    engine = "fsspec"
    silent = "fsspec"
    instead = "Remove them with the service's own tools, or by a rule of the bucket."

    def __init__(self, protocol: str, root: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> None:
        self.url = public_url(protocol, root)
        self.endpoint = str(options.get("endpoint_url") or options.get("host") or "") or None
        self._protocol, self._root = protocol, root
        self._given, self._transfer = dict(options), transfer
        checked_kind(protocol, options)
        self._made: dict[int, FsspecPlace] = {}  # by process: few clients survive a fork

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self._protocol, self._root, self._given, self._transfer)

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object. See `ObjectStore.put`.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there.
            UnsupportedError: `mode` is CREATE, and the file system has no such mode.
            OutcomeUnknownError: It may or may not have been stored.

        If killed: the whole object or none, where the file system knows how to do that.
        """
        path, request = self._path(key), self._request("PUT", key, writes=True)
        with translating(request):
            place = self._place
            creates = mode is PutMode.CREATE
            if creates and not place.creates:
                raise UnsupportedError(
                    f"{self.url} cannot be written to safely: fsspec's {self._protocol}:// looks and then writes, "
                    "or does not look. Two jobs could both believe that they committed, and one checkpoint would be "
                    "lost.",
                    hint="Use another store, or promise a single writer: assume_single_writer=True.",
                    key=key,
                )
            self._make_directory(place, path)
            try:
                with place.turn(races=creates):
                    place.fs.pipe_file(path, bytes(body), **({"mode": "create"} if creates else {}))
            except FileExistsError as error:
                if not creates:
                    raise NotADirectoryError from error  # a file stands where a directory is needed
                raise
        return ObjectInfo(key, len(body))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`."""
        size = self.head(key).size
        if size > max_bytes:
            raise IntegrityError(f"{key} has {size} bytes, at most {max_bytes} are allowed.", key=key)
        return self._piece(key, 0, size)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        checked_range(key, start, length)
        if start + length > self.head(key).size:  # asked first: file systems differ in what they do past the end
            raise IntegrityError(f"{key} ends before {start + length}.", key=key)
        return self._piece(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        path, request = self._path(key), self._request("HEAD", key)
        with translating(request):
            place = self._place
            with place.turn():
                place.forget()
                said = place.fs.info(path)
                if said["type"] == "directory":  # object stores may have both, and `info` says one
                    same = [one for one in place.entries(path) if _same(one["name"], path)]
                    said = next((one for one in same if one["type"] == "file"), said)
            if said["type"] != "file":
                raise NotFoundError(f"What stands at {self.url}/{key} is no file.", key=key)
            return _info(said, key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`. All directories are walked before the first."""
        checked_prefix(prefix)
        with translating(self._request("LIST", prefix)):
            found = list(self._walk(self._place, prefix, after))
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`.

        If killed: the object or not.
        """
        path = self._path(key)
        with translating(self._request("DELETE", key, writes=True)), contextlib.suppress(*ABSENT):
            place = self._place
            with place.turn():
                place.fs.rm_file(path)

    def open_upload(self, key: str, *, size: int) -> FsspecUpload:
        """Begin to stream an object. See `ObjectStore.open_upload`.

        If killed: nothing under its key; perhaps a temporary of the file system, or of this machine.
        """
        path, request = self._path(key), self._request("PUT", key, writes=True)
        with translating(request):
            sink = self._sink(self._place, path)
        return FsspecUpload(sink, request, size=size, head=lambda: self.head(key), delete=lambda: self.delete(key))

    @property
    def _place(self) -> FsspecPlace:
        place = self._made.get(os.getpid())
        if place is None:
            with translating(Request("CONNECT", self.url, "")):  # many clients connect when they are made
                made = FsspecPlace(self._protocol, self._root, self._given)
            place = self._made.setdefault(os.getpid(), made)
        return place

    def _path(self, key: str) -> str:
        checked_key(key)
        return f"{self._place.root}/{key}"

    def _request(self, doing: str, key: str, *, writes: bool = False) -> Request:
        return Request(doing, f"{self.url}/{key}", key, writes)

    def _piece(self, key: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        path = self._path(key)
        with translating(self._request("GET", key)):
            place = self._place
            with place.turn():
                piece = bytes(place.fs.cat_file(path, start=start, end=start + length))
        if len(piece) != length:
            raise IntegrityError(f"{key} was changed while it was read.", key=key)
        return piece

    def _make_directory(self, place: FsspecPlace, path: str) -> None:
        if place.needs_directories:
            place.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _sink(self, place: FsspecPlace, path: str) -> Sink:
        kept = KeptBack(place, path, self._transfer.part_bytes)
        if place.is_memory:
            return kept  # it takes the word, and publishes what is opened at once
        self._make_directory(place, path)
        try:
            file = place.fs.open(path, "wb", autocommit=False)
        except (TypeError, NotImplementedError):
            return kept
        if Committed.can(file):
            kept.close()
            return Committed(file)
        drop(place, file, path)
        return kept

    def _walk(self, place: FsspecPlace, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        directory = f"{place.root}/{prefix}".rstrip("/")
        try:
            with place.turn():
                entries = place.entries(directory)
        except (FileNotFoundError, NotADirectoryError):
            return  # absent, or deleted while we walk
        for one in entries:
            key = prefix + one["name"].rstrip("/").rpartition("/")[2]
            if _same(one["name"], directory) or fault_of_segments(key) is not None:
                continue  # a file in the place of the directory, a directory's marker, or what is no key of ours
            if one["type"] == "directory":
                if after is None or after < f"{key}/" or after.startswith(f"{key}/"):
                    yield from self._walk(place, f"{key}/", after)
            elif one["type"] == "file" and (after is None or key > after):
                yield _info(one, key)


def _same(name: str, path: str) -> bool:
    """Return whether both name one thing; some file systems leave the first slash out."""
    return name.strip("/") == path.strip("/")


def _info(said: Mapping[str, Any], key: str) -> ObjectInfo:
    # No identity: what `info` and `ls` say of it is not always the same.
    if said.get("size") is None:
        raise UnsupportedError(f"The file system does not say how large {key} is.", key=key)
    return ObjectInfo(key, int(said["size"]), None, _seconds(said))


def _seconds(said: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        time = said.get(name)
        if isinstance(time, datetime):
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        if isinstance(time, int | float):
            return float(time)
    return None


def _rebuilt(protocol: str, root: str, options: Mapping[str, Any], transfer: TransferOptions) -> FsspecStore:
    return FsspecStore(protocol, root, options=options, transfer=transfer)
