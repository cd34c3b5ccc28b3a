"""Uploads that are neither complete nor aborted, for both engines of s3://."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from ckptstore.errors import UnsupportedError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.port import PendingUpload
from ckptstore.objectstore.s3_pages import all_pages
from ckptstore.objectstore.s3_requests import S3Place, code_of, remove

_NO_UPLOAD = "NoSuchUpload"
_RULE = "A lifecycle rule of the bucket removes them: AbortIncompleteMultipartUpload."


def list_uploads(place: S3Place, request: Request, prefix: str) -> list[PendingUpload]:
    """Return the incomplete uploads whose keys, in the bucket, begin with `prefix`, sorted by key.

    Args:
        place: The bucket.
        request: For messages.
        prefix: Of keys in the bucket; so are the keys that are returned.

    Raises:
        UnsupportedError: The server does not tell.
        CkptStoreError: What went wrong.
    """

    async def page(after: Mapping[str, Any]) -> tuple[dict[tuple[str, str], PendingUpload], dict[str, Any]]:
        try:
            answer = await place.send("list_multipart_uploads", Prefix=prefix, **after)
        except ClientError as error:
            if code_of(error) == _NO_UPLOAD:  # so rclone says that there is none
                return {}, {}
            raise
        here = {(said["Key"], said["UploadId"]): _pending(said) for said in answer.get("Uploads", ())}
        following = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker")}
        if not following["UploadIdMarker"]:  # not every server names it
            del following["UploadIdMarker"]
        return here, following if answer.get("IsTruncated", False) else {}

    try:
        found = all_pages(place, request, page)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, hint=_RULE, **error.facts) from error
    return [found[name] for name in sorted(found) if name[0].startswith(prefix)]


def abort_upload(place: S3Place, request: Request, upload_id: str) -> None:
    """Forget an upload. See `ObjectStore.abort_upload`.

    If killed: it is there, or not.
    """

    async def abort() -> None:
        await remove(
            lambda: place.send("abort_multipart_upload", UploadId=upload_id),
            lambda: place.send("list_parts", UploadId=upload_id, MaxParts=1),
            _NO_UPLOAD,
        )

    place.run(request, abort, requests=2)


def _pending(upload: dict[str, Any]) -> PendingUpload:
    began = upload.get("Initiated")
    return PendingUpload(upload["Key"], upload["UploadId"], began.timestamp() if began else None)
