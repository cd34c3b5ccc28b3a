"""Where a bucket's requests go."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.endpoint import is_address, is_private
from ckptstore.objectstore.s3_options import S3Options

DEFAULT_REGION = "us-east-1"
_HOST_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


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
        can = can and not is_address(urlsplit(endpoint).hostname or "")
    if not wanted:
        return endpoint, False
    if not can:
        raise InvalidInputError(
            f"The bucket {bucket} cannot be part of this endpoint's host name.", hint="Pass addressing_style='path'."
        )
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{bucket}.{rest}", True


def check_private_key(options: S3Options, endpoint: str | None) -> None:
    """Check that a key of one's own is sent to nobody else. Without an endpoint there is TLS, unless said otherwise.

    Raises:
        InvalidInputError: It would be.
    """
    endpoint = endpoint or f"http{'s' if options.use_ssl else ''}://unsaid"
    if options.sse_customer_key is not None and not is_private(endpoint, verify=options.verify):
        raise InvalidInputError(
            "SSECustomerKey would be sent where others can read it.", hint="Use https://, and leave verify=False out."
        )
