"""Where requests go, for every cloud: whether that is a place, and who on the way there could read or change them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInputError


def check_endpoint(endpoint: str) -> None:
    """Check that an endpoint is a plain URL.

    Raises:
        InvalidInputError: It is none, or has more in it than a place. It is not shown: it could hold credentials.
    """
    try:
        parts = urlsplit(endpoint)
        surplus = "@" in parts.netloc or parts.query or parts.fragment
        # As it is written: clients compare the scheme with case, and Python leaves out what it does not like.
        plain = (
            endpoint.startswith(("http://", "https://")) and endpoint.isprintable() and not set(endpoint) & set(" \\")
        )
        sound = plain and parts.hostname and not surplus
        _ = parts.port
    except (ValueError, AttributeError, TypeError):
        sound = False
    if not sound:
        raise InvalidInputError("The endpoint is no plain http:// or https:// URL.", hint="Write https://host:port.")


def check_secrecy(endpoint: str, said: Iterable[str], *, instead: str) -> None:
    """Check that what is sent as it is, such as a token, can be read by nobody on the way to `endpoint`.

    Args:
        endpoint: A sound one.
        said: The names of what would be sent.
        instead: What else can be said, for people.

    Raises:
        InvalidInputError: There is something in `said`, and it could be read.
    """
    names = sorted(said)
    if names and not is_private(endpoint):
        raise InvalidInputError(
            f"What {' and '.join(names)} would send to the endpoint could be read by everybody on the way: it is not "
            "https://.",
            hint=f"Use an https:// endpoint, or {instead}.",
        )


def is_private(endpoint: str, *, verify: bool | str | None = None) -> bool:
    """Return whether nobody on the way to `endpoint` can read or change a byte: checked TLS, or the loopback.

    Args:
        endpoint: Where requests go.
        verify: False: the server's certificate is not checked, so anybody may be it.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "https" and verify is not False:
        return True
    host = parts.hostname or ""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Return whether a host is named by its number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
