"""S3 through obstore: a Rust client, so that moving bytes costs little and holds no interpreter's lock."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import S3Store

from ckptstore.errors import IntegrityError, NotFoundError, UnsupportedError
from ckptstore.objectstore.credentials import fill_from_botocore, fill_from_environment
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range
from ckptstore.objectstore.obstore_errors import Request, translating
from ckptstore.objectstore.obstore_s3 import attributes, check_for_obstore, client_options, store_config
from ckptstore.objectstore.obstore_upload import ObstoreUpload
from ckptstore.objectstore.port import ObjectInfo, PendingUpload, PutMode
from ckptstore.objectstore.s3_options import S3Options, read_s3_options
from ckptstore.options import MAX_PARTS, TransferOptions
from ckptstore.units import MIB

if TYPE_CHECKING:
    from obstore.store import S3Credential


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long one kind of request may take."""

    request: timedelta
    retries: int
    retry: timedelta


_CONNECT = timedelta(seconds=5)
_SLOWEST_BYTES_PER_SECOND = MIB  # a part that moves more slowly than this is given up and sent again
# A create is sent once: only so does its answer say what happened to it. Whoever asked decides about another try.
_CREATE = _Patience(request=timedelta(seconds=20), retries=0, retry=timedelta(seconds=20))
_SMALL = _Patience(request=timedelta(seconds=20), retries=4, retry=timedelta(seconds=60))
_BULK = _Patience(request=timedelta(seconds=30), retries=6, retry=timedelta(seconds=120))

# The process in which obstore's threads run. They do not survive a fork, and a child that used them would hang, and
# disturb its parent.
_threads_of: int | None = None


class ObstoreS3:
    """A prefix of a bucket. Thread-safe; may be pickled.

    Args:
        bucket: The bucket's name.
        prefix: Where the run's root is in it, without slashes at its ends; may be empty.
        options: See `s3_options.S3Options`.
        transfer: How large objects are moved.

    Raises:
        InvalidInputError: An option is not known, or makes no sense.
        UnsupportedError: An option is for another engine.
    """

    engine = "obstore"

    def __init__(self, bucket: str, prefix: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._root = bucket, f"{prefix}/" if prefix else ""
        self._given, self._transfer = dict(options), transfer
        self._access = fill_from_environment(read_s3_options(options))
        check_for_obstore(self._access, bucket)
        self._found: tuple[S3Options, Callable[[], S3Credential] | None] = (self._access, None)
        self._clients: dict[_Patience, S3Store] = {}
        self._clients_of: int | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        # What the environment says is not carried along: another process asks its own.
        return _rebuilt, (self._bucket, self._root.rstrip("/"), self._given, self._transfer)

    def __repr__(self) -> str:
        return f"ObstoreS3({self.url!r})"

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object in one request. See `ObjectStore.put`.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there, perhaps ours.
            OutcomeUnknownError: It may or may not have been stored.

        If killed: the whole object or none.
        """
        creates = mode is PutMode.CREATE
        with self._translating("PUT", key, writes=True) as path:
            result = self._client(_CREATE if creates else _BULK).put(
                path,
                body,
                mode="create" if creates else "overwrite",
                use_multipart=False,
                attributes=attributes(self._access),
            )
        return ObjectInfo(key, len(body), _plain_etag(result["e_tag"]))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`."""
        with self._translating("GET", key) as path:
            result = self._client(_SMALL if max_bytes <= MIB else _BULK).get(path)
            if result.meta["size"] > max_bytes:
                raise IntegrityError(
                    f"{key} has {result.meta['size']} bytes, at most {max_bytes} are allowed.", key=key
                )
            return bytes(result.bytes())

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        checked_range(key, start, length)
        with self._translating("GET", key) as path:
            piece = bytes(self._client(_BULK).get_range(path, start=start, length=length))
        if len(piece) != length:
            raise IntegrityError(f"{key} ends before {start + length}.", key=key)
        return piece

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        with self._translating("HEAD", key) as path:
            return self._info(self._client(_SMALL).head(path), key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`.

        All pages are fetched before the first object is yielded: S3-compatible servers differ in how they sort `a-b`
        and `a/b`, and so in what a page that starts after a key holds.
        """
        checked_prefix(prefix)
        request = Request("LIST", f"{self.url}/{prefix}", prefix)
        with translating(request):
            found = self._client(_SMALL).list(self._root + prefix or None, chunk_size=1000).collect()
        infos = [self._info(meta, meta["path"][len(self._root) :]) for meta in found]
        # A folder's marker (`log/`, empty) comes without its slash: it is not under its own prefix.
        under = [info for info in infos if info.key.startswith(prefix) and (after is None or info.key > after)]
        return iter(sorted(under, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`."""
        with contextlib.suppress(NotFoundError), self._translating("DELETE", key) as path:
            self._client(_SMALL).delete(path)

    def open_upload(self, key: str, *, size: int) -> ObstoreUpload:
        """Begin to stream an object. See `ObjectStore.open_upload`.

        If killed: an incomplete upload, invisible under its key, which a rule of the bucket or a collection removes.
        """
        part_bytes = max(self._transfer.part_bytes, -(-size // MAX_PARTS))
        with self._translating("PUT", key, writes=True) as path:
            writer = obstore.open_writer(
                self._client(_BULK),
                path,
                buffer_size=part_bytes,
                max_concurrency=self._transfer.parts_in_flight,
                attributes=attributes(self._access),
            )
        request = Request("PUT", f"{self.url}/{key}", key, writes=True)
        return ObstoreUpload(writer, request, size=size, part_bytes=part_bytes, head=lambda: self.head(key))

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See `ObjectStore.list_uploads`. obstore cannot."""
        raise UnsupportedError(
            f"obstore cannot list the incomplete uploads of {self.url}/{prefix}.", hint="Use engine='s3fs' for that."
        )

    def abort_upload(self, upload: PendingUpload) -> None:
        """See `ObjectStore.abort_upload`. obstore cannot."""
        raise UnsupportedError(
            f"obstore cannot abort the upload of {upload.key}.", hint="Use engine='s3fs' for that.", key=upload.key
        )

    def _info(self, meta: Mapping[str, Any], key: str) -> ObjectInfo:
        return ObjectInfo(key, meta["size"], _plain_etag(meta["e_tag"]), meta["last_modified"].timestamp())

    @contextlib.contextmanager
    def _translating(self, doing: str, key: str, *, writes: bool = False) -> Iterator[str]:
        path = self._root + checked_key(key)
        with translating(Request(doing, f"{self.url}/{key}", key, writes)):
            yield path

    def _client(self, patience: _Patience) -> S3Store:
        global _threads_of  # noqa: PLW0603  (obstore's threads are one per process, too)
        if _threads_of not in (None, os.getpid()):
            raise UnsupportedError(
                "obstore was used before this process was forked, and cannot be used in it.",
                hint="Start processes by `spawn` or `forkserver`.",
            )
        with self._lock:
            if self._clients_of != os.getpid():
                self._clients.clear()
                self._found = fill_from_botocore(self._access)
                self._clients_of = os.getpid()
            if patience not in self._clients:
                self._clients[patience] = self._new_client(patience)
            _threads_of = os.getpid()
            return self._clients[patience]

    def _new_client(self, patience: _Patience) -> S3Store:
        access, credentials = self._found
        config = store_config(access, self._bucket)
        if credentials is not None:
            config["credential_provider"] = credentials
        seconds = self._transfer.part_bytes / _SLOWEST_BYTES_PER_SECOND if patience is _BULK else 0.0
        client: Any = client_options(access, self._bucket, connect=_CONNECT)
        client["timeout"] = patience.request + timedelta(seconds=seconds)
        return S3Store(
            self._bucket,
            client_options=client,
            retry_config={"max_retries": patience.retries, "retry_timeout": patience.retry},
            **config,
        )


def _rebuilt(bucket: str, prefix: str, options: Mapping[str, Any], transfer: TransferOptions) -> ObstoreS3:
    return ObstoreS3(bucket, prefix, options=options, transfer=transfer)


def _plain_etag(etag: str | None) -> str | None:
    return etag.strip('"') if etag else None
