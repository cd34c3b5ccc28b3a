"""The port: the few things that a store must be able to do.

A store is stateless, may be used from several threads at once, and is rooted at a run's root: keys are relative to it,
never start or end with `/`, and have no empty segment. A store never lists from a cache. It translates every foreign
error once, into these:

- `NotFoundError`: provably absent (a 404; never a 403 or a time-out).
- `AlreadyExistsError`: a conditional create was refused. The object there may be our own, because clients retry.
- `AccessDeniedError`: the credentials were refused.
- `UnavailableError`: provably did not happen.
- `OutcomeUnknownError`: a write may or may not have happened. The default for anything not understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol, Self


class PutMode(Enum):
    """Whether a put may replace."""

    OVERWRITE = "overwrite"
    CREATE = "create"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object.

    Args:
        key: Relative to the store's root.
        size: In bytes.
        etag: The store's own identity of these bytes, without quotes; None where it has none.
        modified: Seconds since 1970 by the store's clock, or None.
    """

    key: str
    size: int
    etag: str | None = None
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload that was begun and neither completed nor aborted: a live writer's, or what a killed one left.

    Args:
        key: What it would become, relative to the store's root; of files, the temporary's own path.
        upload_id: The store's own name for it.
        began: Seconds since 1970 by the store's clock, or None.
    """

    key: str
    upload_id: str
    began: float | None = None


class Upload(Protocol):
    """One object being streamed. Nothing is visible under its key until `complete` returns.

    Used as a context manager. Leaving it without `complete`, by an exception or not, aborts.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data` (copied or sent before the call returns: the caller may reuse its memory).

        Raises:
            InvalidInputError: It is more than was announced, or the upload has ended.
        """
        ...

    def complete(self) -> ObjectInfo:
        """Publish what was written.

        Raises:
            InvalidInputError: The bytes written are not as many as were announced.
            OutcomeUnknownError: The object may or may not be there.

        If killed: the whole object, or none under its key; perhaps an incomplete upload.
        """
        ...

    def abort(self) -> None:
        """Give the upload up and free what it holds. Never raises; harmless after `complete`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ObjectStore(Protocol):
    """A place for objects, rooted at `url`."""

    @property
    def url(self) -> str:
        """The root, without secrets, for people."""
        ...

    @property
    def engine(self) -> str:
        """What moves the bytes: `memory`, `local`, `obstore`, `s3fs`, `gcsfs`, `fsspec`."""
        ...

    @property
    def endpoint(self) -> str | None:
        """Where the service is, if not at its own address: two places of one URL differ in it. Without secrets."""
        ...

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object in one request.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there.
            OutcomeUnknownError: It may or may not have been stored.

        If killed: the whole object or none.
        """
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object.

        Raises:
            NotFoundError: It is provably absent.
            IntegrityError: It is longer than `max_bytes`; no more than that was held.
        """
        ...

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes from `start` (`length` ≥ 1), which nobody changes.

        Raises:
            NotFoundError: It is provably absent.
            IntegrityError: The object ends before the range does.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return what the store says of `key`, raising NotFoundError if it is provably absent."""
        ...

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with `prefix` (``""`` or ending in `/`), sorted by key, recursively.

        Args:
            prefix: No glob is ever expanded.
            after: Yield only keys that sort after this one.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete exactly this key. Deleting what is absent is no error."""
        ...

    def open_upload(self, key: str, *, size: int) -> Upload:
        """Begin to stream an object of exactly `size` bytes to a key that nobody has ever written.

        If killed: perhaps an incomplete upload, invisible under its key.
        """
        ...

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the uploads under `prefix` that are neither complete nor aborted, sorted by key.

        Raises:
            UnsupportedError: The service does not tell; the hint says what removes them.
        """
        ...

    def abort_upload(self, upload: PendingUpload) -> None:
        """Forget exactly this upload. Forgetting what is not there is no error.

        If killed: it is there, or not.
        """
        ...
