"""What obstore's S3 client is told, from the settings of s3://."""

from __future__ import annotations

import base64
import ipaddress
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.credentials import DEFAULT_REGION
from ckptstore.objectstore.s3_options import S3Options, refuse_for_engine

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


def client_options(options: S3Options, bucket: str, *, connect: timedelta) -> dict[str, Any]:
    """Return what the HTTP client is told.

    Raises:
        InvalidInputError: The authorities' certificates cannot be read.
    """
    said: dict[str, Any] = {
        "allow_http": endpoint_for(options, bucket)[0].startswith("http://"),
        "allow_invalid_certificates": options.verify is False,
        "connect_timeout": connect,
    }
    if options.connect_timeout_seconds is not None:
        said["connect_timeout"] = timedelta(seconds=options.connect_timeout_seconds)
    if options.read_timeout_seconds is not None:
        said["read_timeout"] = timedelta(seconds=options.read_timeout_seconds)
    if isinstance(options.verify, str):
        try:
            said["root_certificate"] = Path(options.verify).read_bytes()
        except OSError as error:
            raise InvalidInputError(
                f"The certificates in {options.verify} cannot be read: {error.strerror}.",
                hint="Correct verify or AWS_CA_BUNDLE.",
            ) from error
    return said


def attributes(options: S3Options) -> dict[str, str] | None:
    """Return what each written object is marked with."""
    return {"Storage-Class": options.storage_class} if options.storage_class else None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
