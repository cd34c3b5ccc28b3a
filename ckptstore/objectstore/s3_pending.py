"""Uploads that are neither complete nor aborted, for both engines of s3://."""

from __future__ import annotations

from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from ckptstore.errors import UnsupportedError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.port import PendingUpload
from ckptstore.objectstore.s3_errors import NotS3Error
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
    found: list[PendingUpload] = []

    async def page(after: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await place.send("list_multipart_uploads", Prefix=prefix, **after)
        except ClientError as error:
            if code_of(error) == _NO_UPLOAD:  # so rclone says that there is none
                return {}
            raise
        found.extend(_pending(upload) for upload in answer.get("Uploads", ()) if upload["Key"].startswith(prefix))
        if not answer.get("IsTruncated", False):
            return {}
        following = {"KeyMarker": answer.get("NextKeyMarker", ""), "UploadIdMarker": answer.get("NextUploadIdMarker")}
        following = {name: value for name, value in following.items() if value is not None}
        if following in (after, {"KeyMarker": ""}):  # it would never end
            raise NotS3Error
        return following

    try:
        following = place.client.run(request, partial(page, {}))
        while following:
            following = place.client.run(request, partial(page, following))
    except UnsupportedError as error:
        raise UnsupportedError(error.message, hint=_RULE, **error.facts) from error
    return sorted(found, key=lambda upload: (upload.key, upload.upload_id))


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

    place.client.run(request, abort)


def _pending(upload: dict[str, Any]) -> PendingUpload:
    began = upload.get("Initiated")
    return PendingUpload(upload["Key"], upload["UploadId"], began.timestamp() if began else None)
