"""Who we are and where the store is, for S3: from options, else the environment, else what botocore finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ckptstore.errors import AccessDeniedError, InvalidInputError
from ckptstore.objectstore.s3_options import S3Options

if TYPE_CHECKING:
    from obstore.store import S3Credential

DEFAULT_REGION = "us-east-1"

# botocore renews credentials itself; asked for this often it always has fresh ones.
_ASK_AGAIN = timedelta(minutes=10)


def fill_from_environment(options: S3Options, environment: Mapping[str, str] = os.environ) -> S3Options:
    """Return `options` with what the usual `AWS_` variables say where the user said nothing.

    Raises:
        InvalidInputError: The endpoint in the environment is no URL, or AWS_CA_BUNDLE no file.
    """

    def first(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    calculation = first("AWS_REQUEST_CHECKSUM_CALCULATION")
    filled = replace(
        options,
        endpoint_url=options.endpoint_url or first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        region_name=options.region_name or first("AWS_REGION", "AWS_DEFAULT_REGION"),
        verify=options.verify if options.verify is not None else first("AWS_CA_BUNDLE"),
        request_checksum_calculation=options.request_checksum_calculation or (calculation and calculation.lower()),
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
