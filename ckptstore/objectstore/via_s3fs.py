"""S3 through s3fs: its client, its settings, and none of its caches, retries and file objects.

s3fs makes the aiobotocore client, and every request is made on that client directly. s3fs's own methods look before
they write, expand globs, list from caches, and upload one part after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import s3fs

from ckptstore.errors import IntegrityError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.credentials import fill_from_environment
from ckptstore.objectstore.keys import checked_key, checked_prefix, checked_range
from ckptstore.objectstore.port import ObjectInfo, PendingUpload, PutMode
from ckptstore.objectstore.s3_checksum import check_checksum, checksum, usual_checksum
from ckptstore.objectstore.s3_client import Opened, S3Client, client_arguments, config_arguments, new_session
from ckptstore.objectstore.s3_endpoint import check_private_key
from ckptstore.objectstore.s3_options import S3Options, read_s3_options
from ckptstore.objectstore.s3_pages import all_pages
from ckptstore.objectstore.s3_pending import abort_upload, list_uploads
from ckptstore.objectstore.s3_requests import (
    S3Place,
    check_stored,
    head_of,
    info_of,
    plain_etag,
    range_of,
    read_body,
    remove,
)
from ckptstore.objectstore.s3_upload import S3Upload
from ckptstore.options import TransferOptions


class S3fsStore:
    """A prefix of a bucket. Thread-safe; may be pickled; a forked child may go on using it.

    Args:
        bucket: The bucket's name.
        prefix: Where the run's root is in it, without slashes at its ends; may be empty.
        options: See `s3_options.S3Options`.
        transfer: How large objects are moved.

    Raises:
        InvalidInputError: An option is not known, or makes no sense; or a key of one's own would be sent without TLS.
        UnsupportedError: A checksum needs a package that is not installed.
    """

    engine = "s3fs"

    def __init__(self, bucket: str, prefix: str, *, options: Mapping[str, Any], transfer: TransferOptions) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._root = bucket, f"{prefix}/" if prefix else ""
        self._given, self._transfer = dict(options), transfer
        access = fill_from_environment(read_s3_options(options))
        self.endpoint = access.endpoint_url or access.profile
        check_private_key(access, access.endpoint_url)
        self._checksum = access.checksum(usual_checksum())
        check_checksum(self._checksum)
        self._client = S3Client(access, partial(_open, access, transfer))
        self._stall_seconds = transfer.retry.stall_timeout_seconds

    def __reduce__(self) -> tuple[object, ...]:
        # What the environment says is not carried along: another process asks its own.
        return _rebuilt, (self._bucket, self._root.rstrip("/"), self._given, self._transfer)

    def __repr__(self) -> str:
        return f"S3fsStore({self.url!r})"

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store a small object in one request. See `ObjectStore.put`.

        It is believed if the answer names the body's MD5, and else looked at; see `check_stored`.

        Raises:
            AlreadyExistsError: `mode` is CREATE and an object is there, perhaps ours.
            OutcomeUnknownError: It may or may not have been stored.

        If killed: the whole object or none.
        """
        place, request = self._place(key), self._request("PUT", key, writes=True)
        said: dict[str, Any] = {"IfNoneMatch": "*"} if mode is PutMode.CREATE else {}
        said |= checksum(self._checksum, body)

        async def put() -> ObjectInfo:
            answer = await place.send("put_object", size=len(body), Body=body, **said)
            etag = plain_etag(answer.get("ETag"))
            await check_stored(place, request, body, etag)
            return ObjectInfo(key, len(body), etag)

        return place.run(request, put, requests=3, size=2 * len(body))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. See `ObjectStore.get`."""
        place = self._place(key)

        async def get() -> bytes:
            answer = await place.send("get_object")
            size = answer.get("ContentLength")
            if size is not None and size > max_bytes:
                answer["Body"].close()
                raise IntegrityError(f"{key} has {size} bytes, at most {max_bytes} are allowed.", key=key)
            whole = await read_body(place, answer["Body"], size=size, at_most=max_bytes)
            if len(whole) > max_bytes:
                raise IntegrityError(f"{key} has more than the {max_bytes} bytes that are allowed.", key=key)
            return whole

        return place.run(self._request("GET", key), get, requests=2, size=max_bytes)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. See `ObjectStore.get_range`."""
        place, end = self._place(key), checked_range(key, start, length)
        request = self._request("GET", key)
        piece = place.run(request, lambda: range_of(place, request, start, end), requests=2, size=length)
        if len(piece) != length:
            raise IntegrityError(f"{key} ends before {start + length}.", key=key)
        return piece

    def head(self, key: str) -> ObjectInfo:
        """Return what is known of `key`. See `ObjectStore.head`."""
        place = self._place(key)
        return place.run(self._request("HEAD", key), lambda: head_of(place, key), requests=3)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under `prefix`. See `ObjectStore.list`.

        All pages are fetched before the first object is yielded: S3-compatible servers differ in how they sort `a-b`
        and `a/b`, and so in what a page that starts after a key holds.
        """
        checked_prefix(prefix)
        request = Request("LIST", f"{self.url}/{prefix}", prefix)
        place = S3Place(self._client, self._bucket, None, self._stall_seconds)

        async def page(after_page: Mapping[str, Any]) -> tuple[dict[str, ObjectInfo], dict[str, Any]]:
            answer = await place.send("list_objects_v2", Prefix=self._root + prefix, **after_page)
            found = {said["Key"]: info_of(said, said["Key"][len(self._root) :]) for said in answer.get("Contents", ())}
            following = {"ContinuationToken": answer.get("NextContinuationToken")}
            return found, following if answer["IsTruncated"] else {}

        found = all_pages(place, request, page)
        # A folder's marker (`log/`, empty) is no object of ours.
        own = [found[key] for key in found if key.startswith(self._root + prefix) and not key.endswith("/")]
        return iter(sorted((info for info in own if after is None or info.key > after), key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete exactly this key. See `ObjectStore.delete`."""
        place = self._place(key)

        async def delete() -> None:
            await remove(lambda: place.send("delete_object"), lambda: head_of(place, key), "NoSuchKey")

        place.run(self._request("DELETE", key, writes=True), delete, requests=4)

    def open_upload(self, key: str, *, size: int) -> S3Upload:
        """Begin to stream an object. See `ObjectStore.open_upload`.

        If killed: an incomplete upload, invisible under its key, which a rule of the bucket or a collection removes.
        """
        return S3Upload(
            self._place(key),
            self._request("PUT", key, writes=True),
            size=size,
            transfer=self._transfer,
            checksum_algorithm=self._checksum,
        )

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the incomplete uploads under `prefix`. See `ObjectStore.list_uploads`."""
        checked_prefix(prefix)
        request = Request("LIST", f"{self.url}/{prefix}", prefix)
        place = S3Place(self._client, self._bucket, None, self._stall_seconds)
        found = list_uploads(place, request, self._root + prefix)
        own = [replace(upload, key=upload.key[len(self._root) :]) for upload in found]
        return iter(own)

    def abort_upload(self, upload: PendingUpload) -> None:
        """Forget exactly this upload. See `ObjectStore.abort_upload`.

        If killed: it is there, or not.
        """
        abort_upload(self._place(upload.key), self._request("DELETE", upload.key, writes=True), upload.upload_id)

    def _place(self, key: str) -> S3Place:
        path, together = (
            self._root + checked_key(key),
            max(self._transfer.parts_in_flight, self._transfer.fetches_in_flight),
        )
        return S3Place(self._client, self._bucket, path, self._stall_seconds, together)

    def _request(self, doing: str, key: str, *, writes: bool = False) -> Request:
        return Request(doing, f"{self.url}/{key}", key, writes)


def _rebuilt(bucket: str, prefix: str, options: Mapping[str, Any], transfer: TransferOptions) -> S3fsStore:
    return S3fsStore(bucket, prefix, options=options, transfer=transfer)


def s3fs_arguments(options: S3Options, transfer: TransferOptions) -> dict[str, Any]:
    """Return what s3fs's file system is told. All of it is said, so that fsspec's own settings add nothing."""
    client = client_arguments(options)
    config = config_arguments(options, connections=2 * (transfer.parts_in_flight + transfer.fetches_in_flight))
    return {
        "anon": options.anon,
        "key": client.pop("aws_access_key_id", None),
        "secret": client.pop("aws_secret_access_key", None),
        "token": client.pop("aws_session_token", None),
        "endpoint_url": client.pop("endpoint_url", None),
        "use_ssl": client.pop("use_ssl"),
        "client_kwargs": client,
        "config_kwargs": config,
        "requester_pays": options.requester_pays,
        "cache_regions": False,
        "use_listings_cache": False,
        "skip_instance_cache": True,
        "asynchronous": True,
    }


async def _open(options: S3Options, transfer: TransferOptions) -> Opened:
    files = s3fs.S3FileSystem(**s3fs_arguments(options, transfer), session=new_session(options.profile))
    client = await files.set_session()
    return client, client.close
