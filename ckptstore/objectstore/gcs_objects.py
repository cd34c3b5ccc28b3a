"""What Google Cloud Storage's JSON says of objects and buckets, and how its requests are put together."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

import google_crc32c

from ckptstore.objectstore.gcs_client import Call
from ckptstore.objectstore.port import ObjectInfo

FIELDS = "name,size,md5Hash,crc32c,timeCreated"
NO_BUCKET = "NoSuchBucket"
_BYTES = "application/octet-stream"


def bucket_path(bucket: str) -> str:
    """Return the path of a bucket in the JSON API."""
    return f"/storage/v1/b/{quote(bucket, safe='')}"


def object_path(bucket: str, name: str) -> str:
    """Return the path of an object in the JSON API. Everything in its name is quoted, slashes too."""
    return f"{bucket_path(bucket)}/o/{quote(name, safe='')}"


def upload_path(bucket: str) -> str:
    """Return the path that takes objects."""
    return f"/upload{bucket_path(bucket)}/o"


def put_call(bucket: str, name: str, body: bytes, *, create: bool = False) -> Call:
    """Return the one request that stores an object whose bytes the server compares with their CRC32C.

    The name and the checksum come first, then the bytes: RFC 2387.
    """
    described = json.dumps({"name": name, "crc32c": encoded_crc32c(google_crc32c.value(body))})
    boundary = secrets.token_hex(16)
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{described}\r\n"
        f"--{boundary}\r\nContent-Type: {_BYTES}\r\n\r\n"
    )
    parameters = {"uploadType": "multipart", "fields": FIELDS}
    if create:
        parameters["ifGenerationMatch"] = "0"
    return Call(
        "POST",
        upload_path(bucket),
        parameters,
        {"Content-Type": f"multipart/related; boundary={boundary}"},
        (head.encode(), body, f"\r\n--{boundary}--".encode()),
        missing=NO_BUCKET,
    )


def begin_call(bucket: str, name: str, size: int) -> Call:
    """Return the request that begins a resumable upload."""
    return Call(
        "POST",
        upload_path(bucket),
        {"uploadType": "resumable", "fields": FIELDS},
        {
            "Content-Type": "application/json; charset=UTF-8",
            "X-Upload-Content-Type": _BYTES,
            "X-Upload-Content-Length": str(size),
        },
        (json.dumps({"name": name}).encode(),),
        missing=NO_BUCKET,
    )


def encoded_crc32c(value: int) -> str:
    """Return a CRC32C as the server writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def page_of(described: Any) -> tuple[list[tuple[str, Any]], str | None]:
    """Return the objects of a page of a listing, name and description, and what names the next page, if there is one.

    Raises:
        LookupError: Something is missing.
        ValueError: It is something else.
        TypeError: It is no listing at all.
    """
    if described["kind"] != "storage#objects":  # always said, also where nothing is there
        raise ValueError
    items, following = described.get("items") or [], described.get("nextPageToken") or None
    if not isinstance(items, list) or not isinstance(following, str | None):
        raise TypeError
    names = [item["name"] for item in items]
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    return list(zip(names, items, strict=True)), following


def is_about(described: Mapping[str, Any], name: str, checksum: int) -> bool:
    """Return whether a description is of the object of this name, and of bytes with this CRC32C, where it says one."""
    return described.get("name") == name and described.get("crc32c") in (None, encoded_crc32c(checksum))


def info_of(described: Any, key: str) -> ObjectInfo:
    """Return what the server's description of an object says.

    Raises:
        LookupError: Something is missing.
        ValueError: Something is no number, or no time.
        TypeError: It is no description at all.
    """
    return ObjectInfo(
        key,
        int(described["size"]),
        # Of the bytes, so that it survives a copy to another bucket. Composed objects have no MD5.
        described.get("md5Hash") or described.get("crc32c"),
        datetime.fromisoformat(described["timeCreated"]).timestamp(),
    )
