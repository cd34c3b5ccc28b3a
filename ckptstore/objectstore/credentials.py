"""Who we are and where the store is, for S3: from options, else the environment, else what botocore finds.

The names are those that s3fs users know. What is not known is refused by name, so that a typing error is not silence.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptstore.errors import AccessDeniedError, InvalidInputError

if TYPE_CHECKING:
    from obstore.store import S3Credential

DEFAULT_REGION = "us-east-1"
CHECKSUMS = ("CRC64NVME", "SHA256", None)

# botocore renews credentials itself; asked for this often it always has fresh ones.
_ASK_AGAIN = timedelta(minutes=10)

_CLIENT_KWARGS = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "endpoint_url": "endpoint_url",
    "region_name": "region_name",
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """What a user may say in `storage_options`. What is None is looked up.

    Args:
        key: The access key's id. Comes with `secret`.
        secret: The access key's secret.
        token: The session's token, of temporary credentials.
        endpoint_url: `https://host` or `http://host` of an S3-compatible server.
        region_name: The region.
        profile: A profile of `~/.aws`.
        anon: Sign nothing.
        checksum_algorithm: What the server checks each object and part with: `CRC64NVME`, `SHA256`, or None for a
            server that knows neither.
    """

    key: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    region_name: str | None = None
    profile: str | None = None
    anon: bool = False
    checksum_algorithm: str | None = "CRC64NVME"

    def __post_init__(self) -> None:
        for name in ("key", "secret", "token", "endpoint_url", "region_name", "profile"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):  # not shown: it could be a secret
                raise InvalidInputError(f"`{name}` must be text that is not empty.", hint="Leave it out.")
        if (self.key is None) != (self.secret is None):
            raise InvalidInputError("`key` and `secret` come together.", hint="Give both, or neither.")
        if self.checksum_algorithm not in CHECKSUMS:
            known = ", ".join(map(repr, CHECKSUMS))
            raise InvalidInputError(f"checksum_algorithm is {self.checksum_algorithm!r}.", hint=f"It can be {known}.")
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)


def read_options(given: Mapping[str, Any]) -> S3Options:
    """Return `storage_options` as options.

    Raises:
        InvalidInputError: A name is not known, or a value makes no sense. No value of a secret is shown.
    """
    values = {name: value for name, value in given.items() if name != "client_kwargs"}
    nested = given.get("client_kwargs") or {}
    if not isinstance(nested, Mapping):
        raise InvalidInputError("`client_kwargs` must be a mapping.", hint=f"Known are {', '.join(_CLIENT_KWARGS)}.")
    known = list(S3Options.__dataclass_fields__)
    unknown = [name for name in values if name not in known]
    unknown += [f"client_kwargs.{name}" for name in nested if name not in _CLIENT_KWARGS]
    if unknown:
        raise InvalidInputError(
            f"storage_options has names that s3:// does not know: {', '.join(sorted(unknown))}.",
            hint=f"Known are: {', '.join(known)}, and client_kwargs of {', '.join(_CLIENT_KWARGS)}.",
        )
    return S3Options(**{_CLIENT_KWARGS[name]: value for name, value in nested.items()} | values)


def fill_from_environment(options: S3Options, environment: Mapping[str, str] = os.environ) -> S3Options:
    """Return `options` with what the usual `AWS_` variables say where the user said nothing.

    Raises:
        InvalidInputError: The endpoint in the environment is no URL.
    """

    def first(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    filled = replace(
        options,
        endpoint_url=options.endpoint_url or first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        region_name=options.region_name or first("AWS_REGION", "AWS_DEFAULT_REGION"),
    )
    key, secret = first("AWS_ACCESS_KEY_ID"), first("AWS_SECRET_ACCESS_KEY")
    if options.key is None and options.profile is None and not options.anon and key and secret:
        # As a whole: a token of the environment never goes with a key of the options.
        filled = replace(filled, key=key, secret=secret, token=first("AWS_SESSION_TOKEN"))
    return filled


def fill_from_botocore(options: S3Options) -> tuple[S3Options, Callable[[], S3Credential] | None]:
    """Return `options` with nothing missing, and what hands out credentials (None: sign nothing).

    botocore is loaded only if something is missing. It knows profiles, SSO, roles, containers and instances.

    Raises:
        AccessDeniedError: There are no credentials anywhere.
        InvalidInputError: The profile is not there, or `~/.aws` cannot be read.
    """
    session = None
    if options.profile or not options.region_name or not (options.key or options.anon):
        session, options = _ask_botocore(options)
    if options.anon:
        return options, None
    if options.key:
        fixed: S3Credential = {
            "access_key_id": options.key,
            "secret_access_key": options.secret or "",
            "token": options.token,
            "expires_at": None,
        }
        return options, lambda: fixed
    found = _credentials(session) if session is not None else None
    if found is None:
        raise AccessDeniedError(
            "There are no credentials for s3://.",
            hint="Export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with `aws sso login`.",
        )

    def current() -> S3Credential:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _ASK_AGAIN,
        }

    return options, current


def is_private(endpoint: str | None) -> bool:
    """Return whether nobody on the way to `endpoint` can change a byte: TLS, or this machine's loopback."""
    if endpoint is None or urlsplit(endpoint).scheme == "https":
        return True
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and parts.hostname and not (parts.username or parts.query)
        _ = parts.port
    except (ValueError, AttributeError):
        sound = False
    if not sound:  # it is not shown: it could hold credentials
        raise InvalidInputError("The endpoint is no plain http:// or https:// URL.", hint="Write https://host:port.")


def _ask_botocore(options: S3Options) -> tuple[Any, S3Options]:
    """Return botocore's session and `options` with what its configuration adds."""
    import botocore.exceptions  # noqa: PLC0415  (0.2 s that most processes need not spend)
    import botocore.session  # noqa: PLC0415  (the same)

    try:
        session = botocore.session.Session(profile=options.profile)
        return session, replace(
            options,
            endpoint_url=options.endpoint_url or session.get_scoped_config().get("endpoint_url"),
            region_name=options.region_name or session.get_config_variable("region") or DEFAULT_REGION,
        )
    except botocore.exceptions.BotoCoreError as error:
        raise InvalidInputError(
            f"botocore cannot use its configuration: {type(error).__name__}: {error}.",
            hint="Run `aws configure list`, and correct the profile or AWS_PROFILE.",
        ) from error


def _credentials(session: Any) -> Any:
    """Return what botocore finds, or None."""
    import botocore.exceptions  # noqa: PLC0415  (loaded already)

    try:
        return session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise AccessDeniedError(
            f"botocore found no credentials: {type(error).__name__}: {error}.",
            hint="Run `aws sts get-caller-identity`; log in again, or correct the profile.",
        ) from error
