"""S3 for obstore: what its client is told, from the settings of s3://."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.objectstore.answers import Request
from ckptstore.objectstore.credentials import (
    DEFAULT_REGION,
    Provider,
    fill_from_environment,
    fill_from_session,
    find_credentials,
)
from ckptstore.objectstore.obstore_service import tls_options
from ckptstore.objectstore.port import PendingUpload
from ckptstore.objectstore.s3_options import S3Options, read_s3_options, refuse_for_engine
from ckptstore.units import GIB

USUAL_CHECKSUM = "CRC64NVME"
_CHECKSUMS = (USUAL_CHECKSUM, "SHA256", None)
_HOST_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_for_obstore(options: S3Options, bucket: str) -> None:
    """Check that obstore can do all that `options` say.

    Raises:
        InvalidInputError: The bucket was to be part of a host's name, and cannot be; or a key of one's own would be
            sent without TLS.
        UnsupportedError: It cannot; what is named is for another engine.
    """
    checksum = options.checksum(USUAL_CHECKSUM)
    cannot = {
        f"checksum_algorithm {checksum}": checksum not in _CHECKSUMS,
        # Completing such an upload would have to carry the key, and obstore sends it with the parts only.
        "checksum_algorithm with SSECustomerKey": options.checksum("") not in ("", None)
        and options.sse_customer_key is not None,
        "response_checksum_validation": options.response_checksum_validation == "when_supported",
        "signature_version s3": options.signature_version == "s3",
        "ACL": options.acl is not None,
        "verify with a directory": isinstance(options.verify, str) and Path(options.verify).is_dir(),
    }
    refuse_for_engine("obstore", [name for name, said in cannot.items() if said], instead="s3fs")
    endpoint, _ = endpoint_for(options, bucket)
    if options.sse_customer_key is not None and not is_private(endpoint, options):
        raise InvalidInputError(
            "SSECustomerKey would be sent where others can read it.", hint="Use https://, and leave verify=False out."
        )


def endpoint_for(options: S3Options, bucket: str) -> tuple[str, bool]:
    """Return the URL that a bucket's requests go to, and whether the bucket is part of its host's name.

    Raises:
        InvalidInputError: The bucket was to be part of a host's name, and cannot be.
    """
    can = bool(_HOST_LABEL.fullmatch(bucket))
    if options.endpoint_url is None:
        region = options.region_name or DEFAULT_REGION
        china = ".cn" if region.startswith("cn-") else ""
        endpoint = f"{'https' if options.use_ssl else 'http'}://s3.{region}.amazonaws.com{china}"
        wanted = options.addressing_style == "virtual" or (options.addressing_style == "auto" and can)
    else:
        endpoint, wanted = options.endpoint_url.rstrip("/"), options.addressing_style == "virtual"
        can = can and not _is_address(urlsplit(endpoint).hostname or "")
    if not wanted:
        return endpoint, False
    if not can:
        raise InvalidInputError(
            f"The bucket {bucket} cannot be part of this endpoint's host name.", hint="Pass addressing_style='path'."
        )
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{bucket}.{rest}", True


def is_private(endpoint: str, options: S3Options) -> bool:
    """Return whether nobody on the way to `endpoint` can change a byte: checked TLS, or this machine's loopback."""
    if urlsplit(endpoint).scheme == "https" and options.verify is not False:
        return True
    host = urlsplit(endpoint).hostname or ""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


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
    if options.sse_customer_key is not None:
        config["server_side_encryption"] = "sse-c"
        config["sse_customer_key_base64"] = base64.b64encode(options.sse_customer_key).decode()
        checksum = None  # see check_for_obstore
    elif options.server_side_encryption is not None:
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

    def __init__(self, bucket: str, given: Mapping[str, Any]) -> None:
        self.url = f"s3://{bucket}"
        self._bucket, self._given = bucket, dict(given)
        self.options = fill_from_environment(read_s3_options(given))
        check_for_obstore(self.options, bucket)
        self.attributes = {"Storage-Class": self.options.storage_class} if self.options.storage_class else None
        self.silence_seconds = self.options.read_timeout_seconds

    def __reduce__(self) -> tuple[object, ...]:
        # What the environment says is not carried along: another process asks its own.
        return S3Bucket, (self._bucket, self._given)

    def reach(self) -> S3Reached:
        """See `Service`."""
        return S3Reached(self._bucket, fill_from_session(self.options))

    def list_uploads(self, prefix: str, request: Request, *, seconds: float) -> list[PendingUpload]:
        """See `Service`. obstore cannot."""
        del prefix, seconds
        raise UnsupportedError(
            f"obstore cannot list the incomplete uploads of {request.url}.", hint="Use engine='s3fs' for that."
        )

    def abort_upload(self, upload: PendingUpload, request: Request, *, seconds: float) -> None:
        """See `Service`. obstore cannot."""
        self.list_uploads(upload.key, request, seconds=seconds)


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


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
