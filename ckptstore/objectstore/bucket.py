"""What a bucket is set to, as far as it decides what becomes of objects: versions, rules, locks. It only reads.

What cannot be told is `Unknown`, with the reason, and never an error: whoever may read a run need not be allowed to
read the bucket's settings, and many services have no such settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptstore.errors import AccessDeniedError, CkptStoreError, NotFoundError, UnsupportedError
from ckptstore.options import TransferOptions

if TYPE_CHECKING:
    from ckptstore.objectstore.s3_requests import S3Place

NOT_LOOKED_AT = ("gs", "az", "abfs", "oss", "oci")
"""Other clouds, whose buckets have settings, too."""

# botocore's operation, what the server calls "nothing is set", and the right that it takes.
_VERSIONING = ("get_bucket_versioning", "", "s3:GetBucketVersioning")
_RULES = ("get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration", "s3:GetLifecycleConfiguration")
_LOCK = ("get_object_lock_configuration", "ObjectLockConfigurationNotFoundError", "s3:GetBucketObjectLockConfiguration")


@dataclass(frozen=True, slots=True)
class Unknown:
    """A setting that could not be told.

    Args:
        reason: Why.
        hint: What to do about it; empty where nothing can be.
    """

    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A lifecycle rule that is in force.

    Args:
        name: Its own name; may be empty.
        prefix: Of the keys that it is for.
        tagged: It is only for objects that have a tag, which none of ours has.
        larger_than: Only for objects of more bytes than this, or None.
        smaller_than: Only for objects of fewer bytes than this, or None.
        expires: It deletes objects.
        expires_after_days: When; None where it says a date.
        archives_to: Storage classes that it moves objects to.
        expires_old_versions: It deletes what is no longer the current version.
        aborts_uploads_after_days: When it removes incomplete uploads, or None.
    """

    name: str
    prefix: str
    tagged: bool = False
    larger_than: int | None = None
    smaller_than: int | None = None
    expires: bool = False
    expires_after_days: int | None = None
    archives_to: tuple[str, ...] = ()
    expires_old_versions: bool = False
    aborts_uploads_after_days: int | None = None


@dataclass(frozen=True, slots=True)
class Lock:
    """Whether versions of objects can be locked.

    Args:
        enabled: Whether they can at all.
        mode: Of the retention that every new object gets: `GOVERNANCE`, `COMPLIANCE`, or None.
        period: For people: `30 days`.
    """

    enabled: bool = False
    mode: str | None = None
    period: str | None = None


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """What a bucket is set to.

    Args:
        root: Where the run is in it: empty, or with a slash at its end.
        keeps_versions: Whether what is deleted or overwritten stays as an old version.
        rules: Those that are in force.
        lock: Whether objects are locked.
    """

    root: str
    keeps_versions: bool | Unknown
    rules: tuple[Rule, ...] | Unknown
    lock: Lock | Unknown


def bucket_settings(
    url: str, *, storage_options: Mapping[str, object] | None = None, transfer: TransferOptions | None = None
) -> BucketSettings | None:
    """Return what the bucket of a run is set to; None where there is no bucket.

    Args:
        url: The run's root as its store spells it.
        storage_options: As for `open_store`.
        transfer: How often and how long each request is tried.

    Raises:
        InvalidInputError: An option is not known, or makes no sense.
    """
    scheme, _, path = url.partition("://")
    if scheme not in ("s3", *NOT_LOOKED_AT):
        return None
    bucket, _, prefix = path.partition("/")
    root = f"{prefix}/" if prefix else ""
    if scheme != "s3":
        unknown = Unknown(
            f"The settings of {scheme}:// buckets are not looked at.",
            f"Look at its lifecycle rules: none may delete or archive what lies under {root or 'its root'}.",
        )
        return BucketSettings(root, unknown, unknown, unknown)
    try:
        from ckptstore.objectstore.s3_client import open_client  # noqa: PLC0415  (only if asked for)
        from ckptstore.objectstore.s3_requests import S3Place  # noqa: PLC0415  (the same)
    except ModuleNotFoundError as error:
        unknown = Unknown(f"That needs the package {error.name}.", "Run: pip install 'ckptstore[s3fs]'.")
        return BucketSettings(root, unknown, unknown, unknown)
    from ckptstore.objectstore.credentials import fill_from_environment  # noqa: PLC0415  (the same)
    from ckptstore.objectstore.s3_options import read_s3_options  # noqa: PLC0415  (the same)

    transfer = transfer or TransferOptions()
    client = open_client(fill_from_environment(read_s3_options(storage_options or {})))
    place = S3Place(client, bucket, None, transfer.retry.stall_timeout_seconds)
    versioning, rules, lock = (
        _asked(place, f"s3://{bucket}", question, transfer) for question in (_VERSIONING, _RULES, _LOCK)
    )
    return BucketSettings(
        root,
        versioning if isinstance(versioning, Unknown) else versioning.get("Status") == "Enabled",
        rules if isinstance(rules, Unknown) else tuple(_rules(rules)),
        lock if isinstance(lock, Unknown) else _lock(lock),
    )


def _asked(
    place: S3Place, url: str, question: tuple[str, str, str], transfer: TransferOptions
) -> Mapping[str, Any] | Unknown:
    from botocore.exceptions import ClientError  # noqa: PLC0415  (only if asked for)

    from ckptstore.objectstore.answers import Request  # noqa: PLC0415  (the same)
    from ckptstore.objectstore.s3_requests import tried  # noqa: PLC0415  (the same)

    operation, nothing, right = question
    request = Request("GET", f"{url}?{operation.removeprefix('get_')}", "")

    async def ask() -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = await place.send(operation)
        except ClientError as error:
            if not nothing or error.response["Error"].get("Code") != nothing:
                raise
            return {}
        return answer

    try:
        deadline = transfer.retry.deadline_seconds
        return place.run(request, lambda: tried(ask, request, transfer.retry), requests=1, more_seconds=deadline)
    except AccessDeniedError as error:
        return Unknown(f"Denied: {error.message}", f"Allow {right} to see it.")
    except (UnsupportedError, NotFoundError) as error:
        return Unknown(f"The service does not tell: {error.message}")
    except CkptStoreError as error:
        return Unknown(error.message, error.hint)


def _rules(answer: Mapping[str, Any]) -> Iterator[Rule]:
    for said in answer.get("Rules", ()):
        if said.get("Status") != "Enabled":
            continue
        found = said.get("Filter", {})
        found = {**found, **found.get("And", {})}
        expiration = said.get("Expiration", {})
        yield Rule(
            name=said.get("ID", ""),
            prefix=found.get("Prefix") or said.get("Prefix") or "",
            tagged="Tag" in found or bool(found.get("Tags")),
            larger_than=found.get("ObjectSizeGreaterThan"),
            smaller_than=found.get("ObjectSizeLessThan"),
            expires="Days" in expiration or "Date" in expiration,
            expires_after_days=expiration.get("Days"),
            archives_to=tuple(each.get("StorageClass", "") for each in said.get("Transitions", ())),
            expires_old_versions="NoncurrentVersionExpiration" in said,
            aborts_uploads_after_days=said.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"),
        )


def _lock(answer: Mapping[str, Any]) -> Lock:
    said = answer.get("ObjectLockConfiguration", {})
    retention = said.get("Rule", {}).get("DefaultRetention", {})
    period = next((f"{retention[unit]} {unit.lower()}" for unit in ("Days", "Years") if retention.get(unit)), None)
    return Lock(said.get("ObjectLockEnabled") == "Enabled", retention.get("Mode"), period)
