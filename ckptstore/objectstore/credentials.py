"""Who we are and where the store is, for S3: from options, else the environment, else what aiobotocore's session finds.

The session knows profiles, SSO, roles, containers, instances and web identities. It is loaded only if something is
missing, and runs in the loop of `loop.py`, each time with a limit. obstore asks before each request, so that what was
renewed counts from the next one on.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptstore.errors import AccessDeniedError, CkptStoreError, InvalidInputError, UnavailableError, UnsupportedError
from ckptstore.objectstore import loop
from ckptstore.objectstore.s3_endpoint import DEFAULT_REGION
from ckptstore.objectstore.s3_options import S3Options

if TYPE_CHECKING:
    from obstore.store import S3Credential

ASK_SECONDS = 60.0
"""How long it may take to find or renew credentials."""
LOOK_AGAIN_SECONDS = 5.0
"""How often they are looked for while what is found is what the server refused."""
_ASK_AGAIN_SECONDS = 30.0  # after a renewal that failed while the old ones are still good
_ALWAYS_ASK = datetime(1970, 1, 1, tzinfo=UTC)  # "expired": obstore then asks before each request
_ROLES = ("container-role", "iam-role")  # botocore's names for what is asked over HTTP
_KEY, _SECRET, _TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"


class Provider(Protocol):
    """Hands out credentials, to any thread."""

    failure: CkptStoreError | None
    """Why it could not, the last time it was asked."""

    handed: S3Credential | None
    """What it handed out last."""

    def __call__(self) -> S3Credential:
        """Return the credentials of now.

        Raises:
            CkptStoreError: There are none.
        """
        ...

    def forget(self, refused: S3Credential | None) -> None:
        """Look anew before the next request, unless that was done: the server did not take what was handed out.

        Args:
            refused: What was handed out last when that request began. None: nothing was. What is newer is kept.
        """
        ...


class Given:
    """Credentials that were said in the options."""

    def __init__(self, options: S3Options) -> None:
        self.failure: CkptStoreError | None = None
        self.handed: S3Credential | None = None
        self._fixed = _handed(options.key, options.secret, options.token, expires=None)

    def __call__(self) -> S3Credential:
        """See `Provider`."""
        return self._fixed

    def forget(self, refused: S3Credential | None) -> None:
        """See `Provider`. There is nowhere else to look."""


class FromEnvironment:
    """Credentials of the environment. Whoever renews the variables renews these."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.failure: CkptStoreError | None = None
        self.handed: S3Credential | None = None
        self._environment = environment
        self._held: S3Credential | None = None
        self._refused: S3Credential | None = None
        self._lock = threading.Lock()

    def __call__(self) -> S3Credential:
        """See `Provider`."""
        with self._lock:
            self.handed = held = self._held or self._read()
            if held != self._refused:  # else whoever renews them has not done so yet
                self._held = held
        return held

    def _read(self) -> S3Credential:
        key, secret, token = (self._environment.get(name) or None for name in (_KEY, _SECRET, _TOKEN))
        return _handed(key, secret, token, expires=_ALWAYS_ASK)

    def forget(self, refused: S3Credential | None) -> None:
        """See `Provider`."""
        with self._lock:
            if refused in (None, self._held):
                self._refused, self._held = self._held or self._refused, None


class FromSession:
    """Credentials that aiobotocore's session finds, renewed before they expire.

    Args:
        profile: A profile of `~/.aws`, or None: AWS_PROFILE, or what else there is.
    """

    def __init__(self, profile: str | None) -> None:
        self.failure: CkptStoreError | None = None
        self.handed: S3Credential | None = None
        self._profile = profile
        self._found: Any = None
        self._held: S3Credential | None = None
        self._refused: S3Credential | None = None
        self._quiet_until, self._look_again_at = 0.0, math.inf
        self._lock = threading.Lock()

    def __call__(self) -> S3Credential:
        """See `Provider`."""
        if not self._lock.acquire(timeout=ASK_SECONDS):
            self.failure = _reason(TimeoutError(), self._profile)
            raise self.failure
        try:
            if self._held is not None and self._held == self._refused and time.monotonic() > self._look_again_at:
                self._held = self._found = None
            held, rests = self._held, time.monotonic() < self._quiet_until and not self._is_due(0)
            self.handed = self._ask() if held is None or (self._is_due() and not rests) else held
            return self.handed
        finally:
            self._lock.release()

    def _ask(self) -> S3Credential:
        # botocore renews long before the end, and asks again with every request where that does not help yet.
        self._look_again_at = time.monotonic() + LOOK_AGAIN_SECONDS
        self._quiet_until = time.monotonic() + _ASK_AGAIN_SECONDS
        old = self._held
        try:
            self._found, self._held = loop.run(self._asked(self._found), timeout=ASK_SECONDS)
        except Exception as error:  # noqa: BLE001  (botocore has many)
            if old is None or self._is_due(0):  # else the old ones still do
                self.failure = _reason(error, self._profile)
                raise self.failure from None
            return old
        return self._held

    def forget(self, refused: S3Credential | None) -> None:
        """See `Provider`. Files and caches are read anew."""
        if not self._lock.acquire(timeout=ASK_SECONDS):  # they are asked for at this moment, so what comes is newer
            return
        try:
            if refused in (None, self._held):
                self._refused, self._held, self._found = self._held or self._refused, None, None
        finally:
            self._lock.release()

    def _is_due(self, seconds: int | None = None) -> bool:
        """Return whether the credentials end within `seconds`; by default: within botocore's time for renewing."""
        asks = getattr(self._found, "refresh_needed", None)
        return bool(asks(seconds)) if asks is not None else False

    async def _asked(self, found: Any) -> tuple[Any, S3Credential]:
        found = found or await _new_session(self._profile).get_credentials()
        if found is None:
            raise AccessDeniedError(
                "There are no credentials for s3://.",
                hint="Export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with `aws sso login`.",
            )
        frozen = await found.get_frozen_credentials()
        return found, _handed(frozen.access_key, frozen.secret_key, frozen.token, expires=_ALWAYS_ASK)


def fill_from_environment(options: S3Options, environment: Mapping[str, str] = os.environ) -> S3Options:
    """Return `options` with what the usual `AWS_` variables say of the place where the user said nothing.

    Raises:
        InvalidInputError: The endpoint in the environment is no URL, or AWS_CA_BUNDLE no file.
    """

    def first(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    calculation = first("AWS_REQUEST_CHECKSUM_CALCULATION")
    ignored = (first("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or "").lower() == "true"
    endpoint = None if ignored else first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return replace(
        options,
        endpoint_url=options.endpoint_url or endpoint,
        region_name=options.region_name or first("AWS_REGION", "AWS_DEFAULT_REGION"),
        verify=options.verify if options.verify is not None else first("AWS_CA_BUNDLE"),
        request_checksum_calculation=options.request_checksum_calculation or (calculation and calculation.lower()),
    )


def fill_from_session(options: S3Options, environment: Mapping[str, str] = os.environ) -> S3Options:
    """Return `options` with what `~/.aws/config` says of the place; it is read only if it is there and could matter.

    Raises:
        InvalidInputError: The profile is not there, or `~/.aws` cannot be read.
    """
    missing = None in (options.endpoint_url, options.region_name)
    if not missing or not (options.profile or environment.get("AWS_PROFILE") or _config_file(environment).exists()):
        return replace(options, region_name=options.region_name or DEFAULT_REGION)
    try:
        session = _new_session(options.profile)
        verify = options.verify if options.verify is not None else session.get_config_variable("ca_bundle")
        of_s3 = session.get_scoped_config().get("s3")
        style = of_s3.get("addressing_style") if isinstance(of_s3, dict) else None
        return replace(
            options,
            addressing_style=options.addressing_style if options.addressing_style != "auto" else style or "auto",
            endpoint_url=options.endpoint_url or _endpoint(session),
            region_name=options.region_name or session.get_config_variable("region") or DEFAULT_REGION,
            verify=verify,
        )
    except CkptStoreError:
        raise
    except Exception as error:  # noqa: BLE001  (botocore has many)
        raise _reason(error, options.profile) from None


def find_credentials(options: S3Options, environment: Mapping[str, str] = os.environ) -> Provider | None:
    """Return what hands out credentials, which has handed them out once; None: sign nothing.

    Never mixed: a token of the environment does not go with a key of the options.

    Raises:
        AccessDeniedError: There are no credentials anywhere.
        InvalidInputError: The profile is not there, or `~/.aws` cannot be read.
        UnavailableError: Whoever hands them out does not answer.
    """
    if options.anon:
        return None
    if options.key:
        return Given(options)
    if options.profile is None and environment.get(_KEY) and environment.get(_SECRET):
        return FromEnvironment(environment)
    found = FromSession(options.profile)
    found()
    return found


def _handed(key: str | None, secret: str | None, token: str | None, *, expires: datetime | None) -> S3Credential:
    return {"access_key_id": key or "", "secret_access_key": secret or "", "token": token, "expires_at": expires}


def _config_file(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()


def _new_session(profile: str | None) -> Any:
    try:
        import aiobotocore.session  # noqa: PLC0415  (0.3 s that most processes need not spend)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"Credentials that are not in the environment need the package {error.name}.",
            hint="Run: pip install 'ckptstore[s3]'.",
        ) from error
    return aiobotocore.session.AioSession(profile=profile)


def _endpoint(session: Any) -> Any:
    """Return the endpoint of S3 in `~/.aws/config`: of its section of services, else of the profile."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3")
    chosen: str | None = of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None
    return chosen or profile.get("endpoint_url") or None


def _reason(error: Exception, profile: str | None) -> CkptStoreError:
    """Return what went wrong in finding credentials, as ours. The text of a foreign error could hold a secret."""
    if isinstance(error, CkptStoreError):
        return error
    if isinstance(error, TimeoutError):
        return UnavailableError(
            f"No credentials within {ASK_SECONDS:g} s.", hint="Run `aws sts get-caller-identity` to see what is slow."
        )
    import botocore.exceptions as theirs  # noqa: PLC0415  (loaded already)

    name, code, status = type(error).__name__, "", 0
    if isinstance(error, theirs.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))[:64]
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    missing = (theirs.ProfileNotFound, theirs.ConfigNotFound, theirs.PartialCredentialsError)
    if isinstance(error, (*missing, theirs.ConfigParseError, theirs.InvalidConfigError)):
        return InvalidInputError(
            f"botocore cannot use its configuration: {name}: {error}.",
            hint="Run `aws configure list`, and correct the profile or AWS_PROFILE.",
        )
    role = error.kwargs.get("provider") if isinstance(error, theirs.CredentialRetrievalError) else None
    silent = isinstance(error, theirs.HTTPClientError | theirs.ConnectionError) or role in _ROLES
    if silent or status >= 500 or code.startswith("Throttl"):  # noqa: PLR2004
        what = " ".join(filter(None, [role or name, code]))
        return UnavailableError(f"Nobody hands out credentials: {what}.", hint="Run `aws sts get-caller-identity`.")
    log_in = f"aws sso login{f' --profile {profile}' if profile else ''}"
    if isinstance(error, (theirs.SSOError, theirs.TokenRetrievalError, theirs.LoginError)):
        return AccessDeniedError(f"The login has ended: {name}.", hint=f"Log in again: `{log_in}`.")
    return AccessDeniedError(
        f"botocore found no credentials: {' '.join(filter(None, [name, code]))}.",
        hint=f"Run `aws sts get-caller-identity`; log in again (`{log_in}`), or correct the profile.",
    )
