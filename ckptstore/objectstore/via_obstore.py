"""S3, Azure and GCS through obstore: a Rust client, so that moving bytes costs little and holds no interpreter's lock.

Each small request is sent exactly once: only so does its answer say what happened to it, and whoever asked decides
about another try.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import obstore

from ckptstore.errors import (
    AccessDeniedError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range
from ckptstore.objectstore.obstore_azure import AzureContainer
from ckptstore.objectstore.obstore_errors import translating
from ckptstore.objectstore.obstore_gcs import GcsBucket
from ckptstore.objectstore.obstore_listing import listed
from ckptstore.objectstore.obstore_s3 import S3Bucket
from ckptstore.objectstore.obstore_service import Clients, Service, Use
from ckptstore.objectstore.obstore_upload import ObstoreUpload
from ckptstore.objectstore.port import ObjectInfo, PendingUpload, PutMode
from ckptstore.objectstore.wrappers.retrying import RetryingStore
from ckptstore.options import MAX_PARTS, TransferOptions
from ckptstore.units import MIB, format_bytes

_NOTHING = "no-object-is-called-so"


class ObstoreStore:
    """A prefix of a bucket. Thread-safe; may be pickled.

    Args:
        service: The bucket, and how to reach it.
        prefix: Where the run's root is in it, without slashes at its ends; may be empty.
        transfer: How large objects are moved.
    """

    engine = "obstore"

    def __init__(self, service: Service, prefix: str, *, transfer: TransferOptions) -> None:
        self.url = f"{service.url}/{prefix}".rstrip("/")
        self.endpoint = service.endpoint
        self._root = f"{prefix}/" if prefix else ""
        self._service, self._transfer = service, transfer
        self._clients = Clients(service, transfer)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self._service, self._root.rstrip("/"), self._transfer)

    def __repr__(self) -> str:
        return f"ObstoreStore({self.url!r})"

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object in one request. See `ObjectStore.put`.

        It is believed if the answer names the body's MD5, as S3 does, and else looked at: obstore follows redirects,
        and says of a proxy's page that it was stored.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there, perhaps ours.
            OutcomeUnknownError: It may or may not have been stored.

        If killed: the whole object or none.
        """
        how = "create" if mode is PutMode.CREATE else "overwrite"
        with self._asking("PUT", key, writes=True, size=len(body)) as (client, path):
            result = client.put(path, body, mode=how, use_multipart=False, attributes=self._service.attributes)
        etag = _plain_etag(result["e_tag"])
        # S3 names the MD5, unless it encrypts with a key of KMS. Azure and some others never do: there each put is two
        # requests.
        if etag is None or etag.lower() != hashlib.md5(body, usedforsecurity=False).hexdigest():
            self._check_that_it_is_there(key, body)
        return ObjectInfo(key, len(body), etag)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`."""
        small = max_bytes <= MIB
        with self._asking("GET", key, use=Use.ONCE if small else Use.READ, size=0 if small else max_bytes) as (
            client,
            path,
        ):
            result = client.get(path)
            page = str(result.attributes.get("Content-Type")).startswith("text/html")
            if _is_foreign(result.meta) or (page and result.meta["e_tag"] is None):
                raise _not_a_store(f"GET {self.url}/{key}")
            if result.meta["size"] > max_bytes:
                raise IntegrityError(
                    f"{key} has {result.meta['size']} bytes, at most {max_bytes} are allowed.", key=key
                )
            return bytes(result.bytes())

    def get_range(self, key: str, *, start: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        end = checked_range(key, start, length)
        self._clients.of(Use.READ, length)  # what this process must not do is refused here
        try:
            with self._asking("GET", key, use=Use.READ, size=length) as (client, path):
                piece: bytes | memoryview = memoryview(client.get_range(path, start=start, end=end))
        except UnsupportedError:  # some servers serve pieces under the status of a whole object
            request = Request("GET", f"{self.url}/{key}", key)
            path, seconds = self._root + checked_key(key), self._clients.limit(Use.READ, 0)
            piece = self._service.get_range(path, start, end, request, seconds=seconds)
        if len(piece) != length:
            raise IntegrityError(f"{key} ends before {start + length}.", key=key)
        return piece

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        try:
            return self._head(key)
        except (NotFoundError, AccessDeniedError) as error:
            if error.facts.get("status") is None and isinstance(error, AccessDeniedError):
                raise  # nobody was asked: there are no credentials
            # Its answer has no body: only a GET's names what is missing, the object or the bucket, or who refuses.
            with contextlib.suppress(IntegrityError):
                self.get(key, max_bytes=0)
        try:  # it is there after all: it came in between, or one of the two answers is none of the store's
            return self._head(key)
        except (NotFoundError, AccessDeniedError) as error:
            raise UnavailableError(
                f"HEAD {self.url}/{key}: absent or refused for a HEAD, and there for a GET.",
                hint="Something else answers some of the requests: check the endpoint, HTTPS_PROXY and NO_PROXY.",
                **error.facts,
            ) from error

    def _head(self, key: str) -> ObjectInfo:
        with self._asking("HEAD", key) as (client, path):
            meta = client.head(path)
            if _is_foreign(meta):
                raise _not_a_store(f"HEAD {self.url}/{key}")
            return self._info(meta, key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`.

        All pages are fetched before the first object is yielded: S3-compatible servers differ in how they sort `a-b`
        and `a/b`, and so in what a page that starts after a key holds.

        Raises:
            UnavailableError: What was listed is not whole, or something else than an object store answers.
            StalledError: It does not end.
        """
        checked_prefix(prefix)
        request, limit = Request("LIST", f"{self.url}/{prefix}", prefix), self._clients.limit(Use.ONCE, 0)
        seconds, told = max(self._transfer.retry.deadline_seconds, limit), self._service.ends_are_told
        with self._translating(request, limit):
            begin = partial(self._clients.of(Use.ONCE).list, self._root + prefix or None)
            found = listed(begin, request, seconds=seconds, ends_are_told=told)
        if not (found and told):  # a page looks like an empty listing, and so like the end of any
            self._check_that_nothing_is_meant(prefix)
        infos = [self._info(meta, path[len(self._root) :]) for path, meta in found.items()]
        # A folder's marker (`log/`, empty) comes without its slash: it is not under its own prefix.
        under = [info for info in infos if info.key.startswith(prefix) and (after is None or info.key > after)]
        return iter(sorted(under, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`.

        A page that a proxy shows instead, with a status of success, is not told from an answer: nothing stands on it.
        What is still there is listed the next time something collects, and deleted then.

        Raises:
            OutcomeUnknownError: It may or may not be there.

        If killed: it is there, or not.
        """
        with contextlib.suppress(NotFoundError), self._asking("DELETE", key, writes=True) as (client, path):
            client.delete(path)

    def open_upload(self, key: str, *, size: int) -> ObstoreUpload:
        """Begin to stream an object. See `ObjectStore.open_upload`.

        Raises:
            InvalidInputError: It is larger than the cloud takes.

        If killed: an incomplete upload, invisible under its key, which a rule of the bucket or a collection removes.
        """
        part_bytes, longest = self._transfer.part_bytes_of(size), self._service.longest_part_bytes
        if min(part_bytes, size) > longest:
            raise InvalidInputError(
                f"{self.url}/{key} would have {format_bytes(size)} in parts of {format_bytes(part_bytes)}; "
                f"this store takes {MAX_PARTS} parts of at most {format_bytes(longest)}.",
                hint="Save with more ranks or smaller shards, or set a smaller part_bytes.",
                key=key,
            )
        with self._asking("PUT", key, use=Use.UPLOAD, size=part_bytes, writes=True) as (client, path):
            open_writer = partial(
                obstore.open_writer,
                client,
                path,
                buffer_size=part_bytes,
                max_concurrency=self._transfer.parts_at_once(size),
                attributes=self._service.attributes,
            )
        request = Request("PUT", f"{self.url}/{key}", key, writes=True)
        limit = self._clients.limit(Use.UPLOAD, part_bytes)
        return ObstoreUpload(
            open_writer,
            lambda: self._translating(request, limit),
            key=key,
            size=size,
            part_bytes=part_bytes,
            retry=self._transfer.retry,
            store=RetryingStore(self, options=self._transfer.retry),
        )

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the incomplete uploads. See `ObjectStore.list_uploads`."""
        checked_prefix(prefix)
        request = Request("LIST", f"{self.url}/{prefix}", prefix)
        return self._service.list_uploads(self._root, prefix, request, seconds=self._clients.limit(Use.ONCE, 0))

    def abort_upload(self, upload: PendingUpload) -> None:
        """Forget exactly this upload. See `ObjectStore.abort_upload`.

        If killed: it is there, or not.
        """
        path = self._root + checked_key(upload.key)
        request = Request("DELETE", f"{self.url}/{upload.key}", upload.key, writes=True)
        self._service.abort_upload(path, upload.upload_id, request, seconds=self._clients.limit(Use.ONCE, 0))

    def _check_that_it_is_there(self, key: str, body: bytes) -> None:
        doubt = f"PUT {self.url}/{key}: it was called stored, and may or may not be there."
        try:
            there = self.get(key, max_bytes=len(body))
            if not body:  # so is an empty page
                self._check_that_nothing_is_meant("")
        except CkptStoreError as error:
            raise OutcomeUnknownError(doubt, key=key) from error
        if there != body:
            raise OutcomeUnknownError(doubt, key=key)

    def _check_that_nothing_is_meant(self, prefix: str) -> None:
        """Check that it was an object store that listed nothing: obstore reads a web page as an empty listing, too.

        A run whose log is a proxy's page would look like a fresh one. Only a store names what is absent.
        """
        try:
            self.get(f"{prefix}{_NOTHING}", max_bytes=0)
        except NotFoundError:
            return
        except AccessDeniedError as error:
            if error.facts.get("server_code"):
                return
            raise
        except IntegrityError:
            pass
        raise _not_a_store(f"LIST {self.url}/{prefix}")

    def _info(self, meta: Mapping[str, Any], key: str) -> ObjectInfo:
        return ObjectInfo(key, meta["size"], _plain_etag(meta["e_tag"]), meta["last_modified"].timestamp())

    @contextlib.contextmanager
    def _asking(
        self, doing: str, key: str, *, use: Use = Use.ONCE, size: int = 0, writes: bool = False
    ) -> Iterator[tuple[Any, str]]:
        path = self._root + checked_key(key)
        # Of a read, how long it was silent at least: whether nothing came, or not all of it, obstore does not tell.
        limit = self._clients.silence if use is Use.READ else self._clients.limit(use, size)
        with self._translating(Request(doing, f"{self.url}/{key}", key, writes), limit):
            yield self._clients.of(use, size), path

    def _translating(self, request: Request, limit: float) -> contextlib.AbstractContextManager[None]:
        return translating(request, limit=limit, provider=lambda: self._clients.provider)


def open_s3(bucket: str, prefix: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> ObstoreStore:
    """Return the store at `s3://bucket/prefix`. Nothing is sent.

    Raises:
        InvalidInputError: An option is not known, or makes no sense. See `s3_options.S3Options`.
        UnsupportedError: An option is for another engine.
    """
    return ObstoreStore(S3Bucket(bucket, options), prefix, transfer=transfer)


def open_azure(container: str, prefix: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> ObstoreStore:
    """Return the store at `az://container/prefix`. Nothing is sent.

    Raises:
        InvalidInputError: An option is not known, or makes no sense. See `obstore_azure.AzureOptions`.
    """
    return ObstoreStore(AzureContainer(container, options), prefix, transfer=transfer)


def open_gcs(bucket: str, prefix: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> ObstoreStore:
    """Return the store at `gs://bucket/prefix`. Nothing is sent. Untested: no local server speaks GCS's XML.

    Raises:
        InvalidInputError: An option is not known, or makes no sense. See `obstore_gcs.GcsBucket`.
        UnsupportedError: An option is for another engine.
    """
    return ObstoreStore(GcsBucket(bucket, options), prefix, transfer=transfer)


def _is_foreign(meta: Mapping[str, Any]) -> bool:
    """Return whether an answer has neither an ETag nor a time, of which every store gives one at least."""
    return meta["e_tag"] is None and meta["last_modified"].timestamp() == 0  # what obstore makes of no time


def _not_a_store(asked: str) -> UnavailableError:
    return UnavailableError(
        f"{asked}: an answer that is none of an object store.",
        hint="Something else answers there: check the endpoint, HTTPS_PROXY and NO_PROXY.",
    )


def _rebuilt(service: Service, prefix: str, transfer: TransferOptions) -> ObstoreStore:
    return ObstoreStore(service, prefix, transfer=transfer)


def _plain_etag(etag: str | None) -> str | None:
    return etag.strip('"') if etag else None
