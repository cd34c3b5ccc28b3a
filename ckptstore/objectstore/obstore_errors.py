"""obstore's errors as ours: the one table.

obstore's exceptions carry a class and a text, nothing else: most of what a server can say arrives as `GenericError`. So
the class decides where it says enough, and else the server's own error code and status, which stand in the text in a
fixed form. The text itself, many lines of it, is never shown.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from obstore import exceptions as foreign

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)

# What the server calls it. A missing bucket is no absent object: a mistyped URL must not look like a fresh run.
_BY_CODE: dict[str, tuple[type[CkptStoreError], str]] = {
    "NoSuchBucket": (InvalidInputError, "Correct the URL, or create the bucket."),
    "InvalidBucketName": (InvalidInputError, "Correct the URL."),
    "PermanentRedirect": (InvalidInputError, "Set AWS_REGION to the bucket's region."),
    "AuthorizationHeaderMalformed": (InvalidInputError, "Set AWS_REGION to the bucket's region."),
    "KeyTooLongError": (InvalidInputError, "Use a shorter URL."),
    "SlowDown": (UnavailableError, ""),
    "BadDigest": (UnavailableError, "The bytes changed on the way and were refused: send them again."),
    "InvalidRange": (IntegrityError, ""),
}
_BY_CLASS: dict[type[Exception], type[CkptStoreError]] = {
    FileNotFoundError: NotFoundError,
    foreign.AlreadyExistsError: AlreadyExistsError,
    foreign.PreconditionError: AlreadyExistsError,
    foreign.PermissionDeniedError: AccessDeniedError,
    foreign.UnauthenticatedError: AccessDeniedError,
    foreign.InvalidPathError: InvalidInputError,
    foreign.NotSupportedError: UnsupportedError,
}
_BY_STATUS: dict[int, type[CkptStoreError]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: NotFoundError,
    416: IntegrityError,
    429: UnavailableError,
}
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"\bstatus(?: code)?: (\d{3})\b")
_RETRIES = re.compile(r"\bafter (\d+) retries\b")
_KIND = re.compile(r"\bkind: (\w{1,32})\b")


@dataclass(frozen=True, slots=True)
class Request:
    """What was being asked for, for the message.

    Args:
        doing: The request, for people: `GET`, say.
        url: The object's URL.
        key: The object's key.
        writes: Whether it could have changed the store.
    """

    doing: str
    url: str
    key: str
    writes: bool = False


def translated(error: Exception, request: Request) -> CkptStoreError:
    """Return our error for one of obstore's."""
    text = str(error)
    code, status, kind = _find(_CODE, text), _find(_STATUS, text), _find(_KIND, text)
    retried = int(_find(_RETRIES, text) or 0) > 0
    ours, hint = _classified(error, code, int(status or 0))
    if request.doing == "LIST" and ours is NotFoundError:
        # A prefix is empty or not; "not found" is no answer of an S3 server, and no proof that the log is empty.
        ours, hint = InvalidInputError, "Correct the URL, or the endpoint (AWS_ENDPOINT_URL): no bucket answers there."
    if ours is None:
        never_sent = kind == "Connect" and not retried
        ours = UnavailableError if never_sent or not request.writes else OutcomeUnknownError
    if request.writes and (ours is NotFoundError or (retried and ours is not AlreadyExistsError)):
        # Once one try was ambiguous, what a later one answers proves nothing (I5).
        ours, hint = OutcomeUnknownError, ""
    said = " ".join(filter(None, [status, code])) or (f"no answer ({kind})" if kind else type(error).__name__)
    return ours(
        f"{request.doing} {request.url}: {said}.",
        hint=hint,
        key=request.key,
        status=int(status) if status else None,
        server_code=code,
    )


@contextlib.contextmanager
def translating(request: Request) -> Iterator[None]:
    """Let nothing foreign out of the block.

    Raises:
        CkptStoreError: What went wrong, as ours.
    """
    try:
        yield
    except CkptStoreError:
        raise
    except Exception as error:  # noqa: BLE001  (obstore raises its own, OSError and ValueError; the table has a default)
        # `from None`: its text is a dump of many lines, which nobody should meet in a log.
        raise translated(error, request) from None


def _classified(error: Exception, code: str | None, status: int) -> tuple[type[CkptStoreError] | None, str]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    return next((ours for theirs, ours in _BY_CLASS.items() if isinstance(error, theirs)), _BY_STATUS.get(status)), ""


def _find(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
