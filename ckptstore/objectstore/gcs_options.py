"""Who we are and where the store is, for gs://: from options, else the environment, else what Google's library finds.

The names are those that gcsfs users know. What is not known is refused by name, so that a typing error is not silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.endpoint import check_endpoint, check_secrecy
from ckptstore.objectstore.unknown import refuse_unknown
from ckptstore.options import check_kinds, check_seconds

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

ACCESS = ("read_only", "read_write", "full_control")
METHODS = ("google_default", "cache", "cloud", "anon")
"""What `token` may be besides a file, a key or credentials: where gcsfs looks for them."""


@dataclass(frozen=True, slots=True)
class GcsOptions:
    """What a user may say in `storage_options`. What is None is looked up.

    Args:
        project: The project that is billed, if `requester_pays` is True.
        token: A file with credentials, what stands in one (a mapping), an access token, Google's `Credentials`, or one
            of `METHODS`. By default `google_default`, then gcsfs's cache, then the machine's own account, then nobody.
        access: What the credentials are asked to allow, one of `ACCESS`.
        endpoint_url: `https://host` or `http://host`, of a private endpoint or an emulator.
        requester_pays: True: `project` pays for what is read; a text: the project of that name does.
        timeout: How long a request may be without an answer, in seconds; by default as the retries say.
        session_kwargs: For `aiohttp.ClientSession`: a proxy's settings, say.
    """

    project: str | None = None
    token: str | Mapping[str, Any] | Credentials | None = field(default=None, repr=False)
    access: str = "read_write"
    endpoint_url: str | None = None
    requester_pays: bool | str = False
    timeout: float | None = None
    session_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("project", "endpoint_url", "token", "requester_pays"):
            if getattr(self, name) == "":
                raise InvalidInputError(f"`{name}` must not be empty.", hint="Leave it out.")
        check_kinds(
            project=(self.project, str),
            endpoint_url=(self.endpoint_url, str),
            session_kwargs=(self.session_kwargs, Mapping),
        )
        if not isinstance(self.requester_pays, bool | str):
            raise InvalidInputError("requester_pays must be True, False, or a project.", hint="Leave it out.")
        if self.access not in ACCESS:
            raise InvalidInputError(f"access is {self.access!r}.", hint=f"It can be {', '.join(ACCESS)}.")
        if self.timeout is not None:
            check_seconds(timeout=self.timeout)
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
            if urlsplit(self.endpoint_url).path.strip("/"):
                raise InvalidInputError("The endpoint has a path.", hint="Write https://host:port.")
            said = [] if self.token in (None, "anon") else ["token"]
            check_secrecy(self.endpoint_url, said, instead="token='anon'")
        _check_token(self.token)


def read_options(given: Mapping[str, Any]) -> GcsOptions:
    """Return `storage_options` as options.

    Raises:
        InvalidInputError: A name is not known, or a value makes no sense. No value of a secret is shown.
    """
    known = list(GcsOptions.__dataclass_fields__)
    refuse_unknown("gs", given, known)
    return GcsOptions(**given)


def fill_from_environment(options: GcsOptions, environment: Mapping[str, str] = os.environ) -> GcsOptions:
    """Return `options` with the emulator that `STORAGE_EMULATOR_HOST` names, if the user named no endpoint.

    No credentials are looked for to be sent to an emulator, or over a connection without TLS.

    Raises:
        InvalidInputError: The endpoint in the environment is no URL.
    """
    emulator = environment.get("STORAGE_EMULATOR_HOST", "")
    emulated = options.endpoint_url is None and emulator not in ("", "default")
    if emulated:
        options = replace(options, endpoint_url=emulator if "://" in emulator else f"http://{emulator}")
    if options.token is None and (emulated or (options.endpoint_url or "").startswith("http://")):
        options = replace(options, token="anon")  # noqa: S106  (nobody's)
    return options


def _check_token(token: object) -> None:
    """Check what can be checked here; a token is never shown."""
    if token is None or isinstance(token, Mapping):
        return
    if not isinstance(token, str):
        if not hasattr(token, "before_request"):  # what every Credentials of Google's has
            raise InvalidInputError(
                f"`token` cannot be {type(token).__name__}.",
                hint=f"Give a path, a mapping, an access token, Google's Credentials, or one of {', '.join(METHODS)}.",
            )
    elif token == "browser":  # noqa: S105  (a name)
        raise InvalidInputError(
            "token='browser' needs a person.", hint="Log in once by `gcloud auth application-default login`."
        )
    elif (token.endswith(".json") or "/" in token) and not Path(token).is_file():
        # gcsfs would take a mistyped path for an access token, and send it to Google.
        raise InvalidInputError("`token` looks like a path, and no file is there.", hint="Correct the path.")
