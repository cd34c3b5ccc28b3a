"""S3 for obstore: what its client is told, from the settings of s3://."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.credentials import (
    Provider,
    fill_from_environment,
    fill_from_session,
    find_credentials,
)
from ckptstore.objectstore.obstore_service import tls_options
from ckptstore.objectstore.port import PendingUpload
from ckptstore.objectstore.s3_endpoint import DEFAULT_REGION, endpoint_for, is_private
from ckptstore.objectstore.s3_options import S3Options, read_s3_options, refuse_for_engine
from ckptstore.units import GIB

if TYPE_CHECKING:
    from ckptstore.objectstore.s3_client import S3Client
    from ckptstore.objectstore.s3_requests import S3Place

USUAL_CHECKSUM = "CRC64NVME"
_CHECKSUMS = (USUAL_CHECKSUM, "SHA256", None)


def check_for_obstore(options: S3Options, bucket: str) -> None:
    """Check that obstore can do all that `options` say.

    Raises:
        InvalidInputError: The bucket was to be part of a host's name, and cannot be.
        UnsupportedError: It cannot; what is named is for another engine.
    """
    checksum = options.checksum(USUAL_CHECKSUM)
    cannot = {
        f"checksum_algorithm {checksum}": checksum not in _CHECKSUMS,
        # obstore follows redirects, and would take the key along, to any host.
        "SSECustomerKey": options.sse_customer_key is not None,
        "response_checksum_validation": options.response_checksum_validation == "when_supported",
        "signature_version s3": options.signature_version == "s3",
        "ACL": options.acl is not None,
        "verify with a directory": isinstance(options.verify, str) and Path(options.verify).is_dir(),
    }
    refuse_for_engine("obstore", [name for name, said in cannot.items() if said], instead="s3fs")
    endpoint_for(options, bucket)


def store_config(options: S3Options, bucket: str) -> dict[str, Any]:
    """Return what `S3Store` is told. Everything is said, because obstore reads the environment for what is not.

    Raises:
        InvalidInputError: The bucket was to be part of a host's name, and cannot be.
    """
    endpoint, virtual = endpoint_for(options, bucket)
    config: dict[str, Any] = {
        "region": options.region_name or DEFAULT_REGION,
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "virtual_hosted_style_request": virtual,
        "skip_signature": options.anon,
        "conditional_put": "etag",
        "disable_bulk_delete": True,  # not every server has it; here keys go one by one anyway
        "unsigned_payload": is_private(endpoint, options),
        "request_payer": options.requester_pays,
        "s3_express": False,
    }
    checksum = options.checksum(USUAL_CHECKSUM)
    if options.server_side_encryption is not None:
        config["server_side_encryption"] = options.server_side_encryption
    if options.sse_kms_key_id is not None:
        config["sse_kms_key_id"] = options.sse_kms_key_id
    if options.bucket_key_enabled is not None:
        config["sse_bucket_key_enabled"] = options.bucket_key_enabled
    if checksum is not None:
        config["checksum_algorithm"] = checksum
    return config


class S3Bucket:
    """A bucket of S3, or of what speaks its language. See `obstore_service.Service`.

    Args:
        bucket: The bucket's name.
        given: See `s3_options.S3Options`.

    Raises:
        InvalidInputError: An option is not known, or makes no sense.
        UnsupportedError: An option is for another engine.
    """

    longest_part_bytes = 5 * GIB
    ends_are_told = False

    def __init__(self, bucket: str, given: Mapping[str, Any]) -> None:
        self.url = f"s3://{bucket}"
        self._bucket, self._given = bucket, dict(given)
        self.options = fill_from_environment(read_s3_options(given))
        self.endpoint = self.options.endpoint_url or self.options.profile
        check_for_obstore(self.options, bucket)
        self.attributes = {"Storage-Class": self.options.storage_class} if self.options.storage_class else None
        self.silence_seconds = self.options.read_timeout_seconds
        self._client: S3Client | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # What the environment says is not carried along: another process asks its own.
        return S3Bucket, (self._bucket, self._given)

    def reach(self) -> S3Reached:
        """See `Service`."""
        return S3Reached(self._bucket, fill_from_session(self.options))

    def get_range(self, path: str, start: int, end: int, request: Request, *, seconds: float) -> bytes:
        """See `Service`."""
        from ckptstore.objectstore.s3_requests import range_of  # noqa: PLC0415  (only for what obstore cannot do)

        place = self._place(path, seconds)
        return place.run(request, lambda: range_of(place, request, start, end), requests=2, size=end - start)

    def list_uploads(self, root: str, prefix: str, request: Request, *, seconds: float) -> Iterator[PendingUpload]:
        """See `Service`. obstore cannot, aiobotocore can."""
        from ckptstore.objectstore import s3_pending  # noqa: PLC0415  (only for what obstore cannot do)

        for upload in s3_pending.list_uploads(self._place(None, seconds), request, root + prefix):
            yield replace(upload, key=upload.key.removeprefix(root))

    def abort_upload(self, path: str, upload_id: str, request: Request, *, seconds: float) -> None:
        """See `Service`. obstore cannot, aiobotocore can."""
        from ckptstore.objectstore import s3_pending  # noqa: PLC0415  (only for what obstore cannot do)

        s3_pending.abort_upload(self._place(path, seconds), request, upload_id)

    def _place(self, path: str | None, seconds: float) -> S3Place:
        from ckptstore.objectstore import s3_client, s3_requests  # noqa: PLC0415  (only for what obstore cannot do)

        if self._client is None:  # of two that are made at once, one is closed before it is opened
            self._client = s3_client.open_client(self.options)
        return s3_requests.S3Place(self._client, self._bucket, path, seconds)


class S3Reached:
    """A bucket, the place where it is, and credentials for it. Of one process. See `obstore_service.Reached`.

    Args:
        bucket: The bucket's name.
        options: With nothing missing.

    Raises:
        AccessDeniedError: There are no credentials anywhere.
        InvalidInputError: The profile is not there, or the bucket cannot be part of a host's name.
        UnavailableError: Whoever hands credentials out does not answer.
    """

    def __init__(self, bucket: str, options: S3Options) -> None:
        check_for_obstore(options, bucket)
        self._bucket, self._options = bucket, options
        self.provider: Provider | None = find_credentials(options)

    def client(self, *, http: dict[str, Any], retry: Any) -> Any:
        """See `Reached`."""
        from obstore.store import S3Store  # noqa: PLC0415  (others look at the settings without it)

        config = store_config(self._options, self._bucket)
        if self.provider is not None:
            config["credential_provider"] = self.provider
        told: Any = {**http, **tls_options(config["endpoint"], verify=self._options.verify)}
        if self._options.connect_timeout_seconds is not None:
            told["connect_timeout"] = timedelta(seconds=self._options.connect_timeout_seconds)
        return S3Store(self._bucket, client_options=told, retry_config=retry, **config)
