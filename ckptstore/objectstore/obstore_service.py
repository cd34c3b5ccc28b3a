"""What each cloud must tell obstore, and the clients that are made from it: one per process and kind of request."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.obstore_errors import Provider
from ckptstore.objectstore.port import PendingUpload
from ckptstore.options import TransferOptions
from ckptstore.units import MIB

SLOWEST_BYTES_PER_SECOND = MIB
"""What moves more slowly than this, beyond the time for an answer, is given up: of parts in flight, all together."""
_CONNECT_SECONDS = 5.0

# The process in which obstore's threads run. They do not survive a fork, and a child that used them would hang, and
# disturb its parent.
_threads_of: int | None = None


class Reached(Protocol):
    """A bucket with all that is needed to reach it, in this process."""

    @property
    def provider(self) -> Provider | None:
        """What hands out credentials, where that is not obstore itself."""
        ...

    def client(self, *, http: dict[str, Any], retry: Any) -> Any:
        """Return one of obstore's stores. Nothing is sent."""
        ...


class Service(Protocol):
    """A bucket of one cloud. May be pickled; takes no secret of the environment along."""

    @property
    def url(self) -> str:
        """The bucket, for people."""
        ...

    @property
    def endpoint(self) -> str | None:
        """Where the cloud is, if not at its own address. See `ObjectStore.endpoint`."""
        ...

    @property
    def attributes(self) -> dict[str, str] | None:
        """What each written object is marked with."""
        ...

    @property
    def longest_part_bytes(self) -> int:
        """The largest part of an upload that the cloud takes."""
        ...

    @property
    def silence_seconds(self) -> float | None:
        """How long a server may say nothing, if that was said in the options."""
        ...

    @property
    def ends_are_told(self) -> bool:
        """Whether obstore tells the end of a listing from a web page."""
        ...

    def reach(self) -> Reached:
        """Find what is missing: credentials, the endpoint.

        Raises:
            AccessDeniedError: There are no credentials anywhere.
            InvalidInputError: What was found makes no sense.
            UnavailableError: Whoever hands credentials out does not answer.
        """
        ...

    def get_range(self, path: str, start: int, end: int, request: Request, *, seconds: float) -> bytes:
        """Return a piece of an object, where obstore does not take the server's answer for one.

        Raises:
            UnsupportedError: There is no other way to this cloud.
            CkptStoreError: What went wrong.
        """
        ...

    def list_uploads(self, root: str, prefix: str, request: Request, *, seconds: float) -> Iterator[PendingUpload]:
        """Yield the incomplete uploads under a prefix, both relative to `root`, sorted by key.

        Raises:
            UnsupportedError: The cloud does not tell; the hint says what removes them.
            CkptStoreError: What went wrong.
        """
        ...

    def abort_upload(self, path: str, upload_id: str, request: Request, *, seconds: float) -> None:
        """Forget exactly this upload of a key of the bucket. Forgetting what is not there is no error.

        Raises:
            UnsupportedError: The cloud removes them itself.
            CkptStoreError: What went wrong.
        """
        ...


class TellsLittle:
    """What the clouds have in common whose other requests nobody sends: obstore's own are all. A part of a `Service`.

    Attributes:
        untold: What of incomplete uploads cannot be told, and by whom.
        untold_hint: What removes them.
    """

    url: str
    attributes = None
    silence_seconds = None
    untold: ClassVar[str]
    untold_hint: ClassVar[str]

    def get_range(self, path: str, start: int, end: int, request: Request, *, seconds: float) -> NoReturn:
        """See `Service`."""
        del path, start, end, seconds
        raise UnsupportedError(f"{request.url} is not served in parts.", key=request.key)

    def list_uploads(self, root: str, prefix: str, request: Request, *, seconds: float) -> Iterator[PendingUpload]:
        """See `Service`."""
        del root, prefix, seconds
        raise UnsupportedError(f"{request.doing} {request.url}: {self.untold}.", hint=self.untold_hint)

    def abort_upload(self, path: str, upload_id: str, request: Request, *, seconds: float) -> None:
        """See `Service`."""
        self.list_uploads(path, upload_id, request, seconds=seconds)


class Use(Enum):
    """The kinds of requests."""

    ONCE = "once"
    """Small, or to be sent by whoever asks again: its answer says what happened to it."""
    READ = "read"
    """Many bytes come: it ends early where nothing comes, and in any case."""
    UPLOAD = "upload"
    """One of an upload. Only these are tried again down here: nobody above can send one part again."""


class Clients:
    """The clients of one store. Thread-safe; a child process begins with none.

    Args:
        service: What is to be reached.
        transfer: How large objects are moved, and how often requests are tried.
    """

    def __init__(self, service: Service, transfer: TransferOptions) -> None:
        self._service, self._transfer = service, transfer
        self._here = _Here()

    @property
    def provider(self) -> Provider | None:
        """What handed out the credentials in this process, if anything did."""
        reached = self._here.reached if self._here.pid == os.getpid() else None
        return reached.provider if reached is not None else None

    @property
    def silence(self) -> float:
        """After how many seconds without a byte of an answer a request is given up."""
        return self._service.silence_seconds or self._transfer.retry.stall_timeout_seconds

    def limit(self, use: Use, size: int) -> float:
        """Return after how many seconds one try of a request is given up that moves at most `size` bytes."""
        if use is Use.READ:
            return self.silence + self._transfer.fetches_in_flight * _rounded_up(size) / SLOWEST_BYTES_PER_SECOND
        beside = self._transfer.parts_in_flight if use is Use.UPLOAD else 1  # they share the way
        return self.silence + beside * _rounded(size) / SLOWEST_BYTES_PER_SECOND

    def of(self, use: Use, size: int = 0) -> Any:
        """Return a client for requests of a kind that move at most `size` bytes each.

        Raises:
            UnsupportedError: obstore was used before this process was forked.
            CkptStoreError: See `Service.reach`.
        """
        global _threads_of  # noqa: PLW0603  (obstore's threads are one per process, too)
        if _threads_of not in (None, os.getpid()):
            raise UnsupportedError(
                "obstore was used before this process was forked, and cannot be used in it.",
                hint="Start processes by `spawn` or `forkserver`.",
            )
        if self._here.pid != os.getpid():
            self._here = _Here()  # its lock may have been copied while it was held
        here, seconds = self._here, self.limit(use, size)
        with here.lock:
            if here.reached is None:
                here.reached = self._service.reach()
            if (use, seconds) not in here.clients:
                here.clients[use, seconds] = self._new(here.reached, use, seconds)
            _threads_of = os.getpid()
            return here.clients[use, seconds]

    def _new(self, reached: Reached, use: Use, seconds: float) -> Any:
        retry = self._transfer.retry
        http: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "timeout": timedelta(seconds=seconds),
        }
        if use is Use.READ:
            http["read_timeout"] = timedelta(seconds=self.silence)
        policy = {
            "max_retries": retry.attempts - 1 if use is Use.UPLOAD else 0,
            "retry_timeout": timedelta(seconds=retry.deadline_seconds),
            "backoff": {
                "init_backoff": timedelta(seconds=retry.first_pause_seconds),
                "max_backoff": timedelta(seconds=retry.longest_pause_seconds),
                "base": 2,
            },
        }
        return reached.client(http=http, retry=policy)


class _Here:
    """What one process has."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.reached: Reached | None = None
        self.clients: dict[tuple[Use, float], Any] = {}


def _rounded(size: int) -> int:
    """Return whole MiB: few limits, and so few clients, each of which has connections of its own."""
    return size // MIB * MIB


def _rounded_up(size: int) -> int:
    """Return a power of two of MiB that `size` bytes fit into, or 0: few limits, too, and none that is too short."""
    return (1 << (-(-size // MIB) - 1).bit_length()) * MIB if size else 0


def tls_options(endpoint: str | None, *, verify: bool | str | None) -> dict[str, Any]:
    """Return what the HTTP client is told of TLS. All is said, because obstore reads the environment for the rest.

    Args:
        endpoint: Where requests go; None: to the cloud itself.
        verify: See `s3_options.S3Options`.

    Raises:
        InvalidInputError: The authorities' certificates cannot be read.
    """
    said: dict[str, Any] = {
        "allow_http": (endpoint or "").startswith("http://"),
        "allow_invalid_certificates": verify is False,
    }
    if isinstance(verify, str):
        try:
            said["root_certificate"] = Path(verify).read_bytes()
        except OSError as error:
            raise InvalidInputError(
                f"The certificates in {verify} cannot be read: {error.strerror}.",
                hint="Correct verify or AWS_CA_BUNDLE.",
            ) from error
    return said
