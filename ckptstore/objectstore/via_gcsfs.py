"""Google Cloud Storage, with gcsfs's credentials, endpoint and session, and the JSON API's own requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c

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
from ckptstore.objectstore.answers import Request, error_for
from ckptstore.objectstore.gcs_client import Call, GcsClient, Pace, Reply
from ckptstore.objectstore.gcs_errors import NONSENSE
from ckptstore.objectstore.gcs_objects import (
    FIELDS,
    NO_BUCKET,
    bucket_path,
    info_of,
    is_about,
    object_path,
    page_of,
    put_call,
)
from ckptstore.objectstore.gcs_options import fill_from_environment, read_options
from ckptstore.objectstore.gcs_upload import CHUNK_UNIT, GcsUpload, Target
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range, fault_of_segments
from ckptstore.objectstore.port import ObjectInfo, PutMode
from ckptstore.objectstore.untold import UploadsUntold
from ckptstore.objectstore.wrappers.retrying import RetryingStore
from ckptstore.options import TransferOptions
from ckptstore.units import MIB, TIB, format_bytes

PAGE_KEYS = 1000
SLOWEST_BYTES_PER_SECOND = MIB  # of all that is on its way at once
MAX_PAGE_BYTES = 16 * MIB
MAX_OBJECT_BYTES = 5 * TIB
MAX_EMPTY_PAGES = 100  # in a row
_PARTIAL, _NOT_FOUND = 206, 404


class GcsfsStore(UploadsUntold):
    """A prefix of a bucket. Thread-safe; may be pickled; a forked process connects anew.

    Each small request is sent once. The bucket is asked once, before the first request, whether it is there and can be
    written to safely.

    Args:
        bucket: The bucket's name. It is never created.
        prefix: Where the run's root is in it, without slashes at its ends; may be empty.
        options: See `gcs_options.GcsOptions`.
        transfer: How large objects are moved.

    Raises:
        InvalidInputError: An option is not known, or makes no sense.
    """

    engine = "gcsfs"
    silent = "Google Cloud Storage"
    instead = "Leave them: they expire after a week, and take no room that is paid for."

    def __init__(self, bucket: str, prefix: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> None:
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._root = bucket, f"{prefix}/" if prefix else ""
        self._given, self._transfer = dict(options), transfer
        access = fill_from_environment(read_options(options))
        self.endpoint = access.endpoint_url
        together = max(transfer.parts_in_flight, transfer.fetches_in_flight)
        pace = Pace(transfer.retry.stall_timeout_seconds, SLOWEST_BYTES_PER_SECOND / together)
        self._client = GcsClient(access, pace=pace)
        self._bucket_is_fit = False

    def __reduce__(self) -> tuple[object, ...]:
        # What the environment says is not carried along: another process asks its own.
        return _rebuilt, (self._bucket, self._root.rstrip("/"), self._given, self._transfer)

    def __repr__(self) -> str:
        return f"GcsfsStore({self.url!r})"

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object in one request. See `ObjectStore.put`.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there.
            OutcomeUnknownError: It may or may not have been stored.

        If killed: the whole object or none.
        """
        name, request = self._root + checked_key(key), self._request("PUT", key, writes=True)
        call = put_call(self._bucket, name, bytes(body), create=mode is PutMode.CREATE)
        described = self._described(self._send(call, request), request)
        info = self._info(described, key, request)
        if info.size != len(body) or not is_about(described, name, google_crc32c.value(body)):
            # On a connection that is out of step the answer is another request's.
            raise OutcomeUnknownError(f"{self.url}/{key}: what was called stored is something else.", key=key)
        return info

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`. Two requests if it is absent."""
        reply = self._read(key, max_bytes)
        if reply.body is None:
            raise IntegrityError(f"{key} has {reply.size} bytes, at most {max_bytes} are allowed.", key=key)
        return reply.body

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        end = checked_range(key, start, length)
        reply = self._read(key, length, {"Range": f"bytes={start}-{end - 1}"})
        if reply.body is None or len(reply.body) != length or (reply.status != _PARTIAL and start > 0):
            raise IntegrityError(f"{key} ends before {start + length}.", key=key)
        return reply.body

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        path, request = object_path(self._bucket, self._root + checked_key(key)), self._request("HEAD", key)
        reply = self._send(Call("GET", path, {"fields": FIELDS}), request)
        return self._info(self._described(reply, request), key, request)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`.

        All pages are fetched before the first object is yielded. What others put there under a name that is no key in
        plain form, such as a folder's marker (`log/`), is left out.
        """
        checked_prefix(prefix)
        request = self._request("LIST", prefix)
        found: list[ObjectInfo] = []
        for name, item in self._items(self._root + prefix, self._root + after if after else "", request):
            key = name[len(self._root) :]
            if fault_of_segments(key) is None and (after is None or key > after):
                found.append(self._info(item, key, request))
        return iter(found)

    def _items(self, prefix: str, start: str, request: Request) -> Iterator[tuple[str, Any]]:
        """Yield the names and descriptions of all objects under `prefix` from the name `start` on, page by page.

        Raises:
            UnavailableError: A page does not begin after the last one, or too many hold nothing: there would be no end.
        """
        parameters = {"prefix": prefix, "maxResults": str(PAGE_KEYS), "fields": f"kind,items({FIELDS}),nextPageToken"}
        if start:
            parameters["startOffset"] = start  # that name included
        path, last, empty = f"{bucket_path(self._bucket)}/o", "", 0
        while True:
            call = Call("GET", path, parameters, max_bytes=MAX_PAGE_BYTES, missing=NO_BUCKET)
            described = self._described(self._send(call, request), request)
            try:
                items, following = page_of(described)
            except (LookupError, ValueError, TypeError):
                raise self._nonsense(request) from None
            for name, item in items:
                if not name.startswith(prefix) or name <= last:
                    raise self._nonsense(request)
                last = name
                yield name, item
            if following is None:
                return
            empty = 0 if items else empty + 1  # the service may give some
            if empty > MAX_EMPTY_PAGES:
                raise self._nonsense(request)
            parameters["pageToken"] = following

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`.

        If killed: the object or not.
        """
        path = object_path(self._bucket, self._root + checked_key(key))
        self._send(Call("DELETE", path, accepted=(200, 204, _NOT_FOUND)), self._request("DELETE", key, writes=True))

    def open_upload(self, key: str, *, size: int) -> GcsUpload:
        """Begin to stream an object. See `ObjectStore.open_upload`.

        Raises:
            InvalidInputError: It is larger than the service takes.

        If killed: an incomplete upload, invisible under its key, which the server forgets after a week.
        """
        name, request = self._root + checked_key(key), self._request("PUT", key, writes=True)
        if size > MAX_OBJECT_BYTES:
            raise InvalidInputError(
                f"{request.url} would have {format_bytes(size)}; the service takes {format_bytes(MAX_OBJECT_BYTES)}.",
                hint="Write smaller shards: use more ranks, or split the largest tensors.",
                key=key,
            )
        self._check_bucket(request)
        target = Target(
            self._bucket,
            name,
            request,
            send=self._client.send,
            head=lambda: RetryingStore(self, options=self._transfer.retry).head(key),
            delete=lambda: self.delete(key),
        )
        chunk_bytes = -(-self._transfer.part_bytes // CHUNK_UNIT) * CHUNK_UNIT
        return GcsUpload(target, size=size, chunk_bytes=chunk_bytes, retry=self._transfer.retry)

    def _read(self, key: str, max_bytes: int, headers: Mapping[str, str] | None = None) -> Reply:
        path = object_path(self._bucket, self._root + checked_key(key))
        # As it is stored: a range of something that is unpacked on the way would be a range of something else.
        plain = {"Accept-Encoding": "identity", **(headers or {})}
        try:
            return self._send(
                Call("GET", path, {"alt": "media"}, plain, max_bytes=max_bytes), self._request("GET", key)
            )
        except UnavailableError as error:
            if error.facts.get("status") != _NOT_FOUND:
                raise
            refused = error
        # Of an object's bytes the service says in plain text that they are absent, as anybody could: ask for the rest.
        self.head(key)
        raise refused

    def _send(self, call: Call, request: Request) -> Reply:
        self._check_bucket(request)
        return self._client.send(call, request)

    def _check_bucket(self, request: Request) -> None:
        """Check that the bucket is there, and that it is not a zonal one: on those a create may overwrite.

        Without the right to read the bucket's metadata its layout is asked for, which takes the right to list.
        """
        if self._bucket_is_fit:
            return
        asked = Request(request.doing, self.url, request.key)
        path = bucket_path(self._bucket)
        try:
            reply = self._client.send(Call("GET", path, {"fields": "locationType"}, missing=NO_BUCKET), asked)
        except AccessDeniedError as denied:
            if denied.facts.get("status") is None:
                raise  # nothing was asked: there are no credentials
            try:
                reply = self._client.send(Call("GET", f"{path}/storageLayout"), asked)
            except (AccessDeniedError, NotFoundError):
                self._bucket_is_fit = True  # nobody tells us; what is asked next is answered for itself
                return
        if self._described(reply, asked).get("locationType") == "zone":
            raise UnsupportedError(
                f"{self.url} is in a zonal bucket (Rapid storage): a create there may replace what stands, "
                "and one checkpoint would be lost.",
                hint="Use a regional, dual-region or multi-region bucket.",
            )
        self._bucket_is_fit = True

    def _request(self, doing: str, key: str, *, writes: bool = False) -> Request:
        return Request(doing, f"{self.url}/{key}", key, writes)

    def _described(self, reply: Reply, request: Request) -> dict[str, Any]:
        try:
            described = json.loads(reply.body or b"")
        except ValueError:
            described = None
        if not isinstance(described, dict):
            raise self._nonsense(request)
        return described

    def _info(self, described: Any, key: str, request: Request) -> ObjectInfo:
        try:
            return info_of(described, key)
        except (LookupError, ValueError, TypeError):
            raise self._nonsense(request) from None

    @staticmethod
    def _nonsense(request: Request) -> CkptStoreError:
        return error_for(NONSENSE, request)


def _rebuilt(bucket: str, prefix: str, options: Mapping[str, Any], transfer: TransferOptions) -> GcsfsStore:
    return GcsfsStore(bucket, prefix, options=options, transfer=transfer)
