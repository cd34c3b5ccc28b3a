"""What a store said, as ours: the one table, for every engine.

An engine reads its client's exceptions into an `Answer` (a status, the server's own code, what is known of the way
there), and nothing else. What that means, and what to do next, is decided here. No text of a foreign error is shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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

_REGION = "Set AWS_REGION (or storage_options' region_name) to the bucket's region."
_LOG_IN = "Log in again (`aws sso login`, say), or give new credentials; then save again."
_CLOCK = "This machine's clock is off by more than the server allows: set it (`timedatectl`, chrony), and try again."
_ROOM = "Make room or raise the quota there, and save again; `ckptstore ls URL` shows what is committed."
_UNREACHED = "See whether the server runs at this endpoint; else correct the endpoint, or the network's settings."
_OPTIONS = "Check the endpoint and storage_options: the server does not understand this request."

# What the server calls it. A missing bucket is no absent object: a mistyped URL must not look like a fresh run.
_BY_CODE: dict[str, tuple[type[CkptStoreError], str]] = {
    "NoSuchBucket": (InvalidInputError, "Correct the URL, or create the bucket."),
    "ContainerNotFound": (InvalidInputError, "Correct the URL, or create the container."),
    "InvalidBucketName": (InvalidInputError, "Correct the URL."),
    "PermanentRedirect": (InvalidInputError, _REGION),
    "AuthorizationHeaderMalformed": (InvalidInputError, _REGION),
    "IllegalLocationConstraintException": (InvalidInputError, _REGION),
    "KeyTooLongError": (InvalidInputError, "Use a shorter URL."),
    "SlowDown": (UnavailableError, ""),
    "TooManyRequests": (UnavailableError, ""),
    "Throttling": (UnavailableError, ""),
    "ThrottlingException": (UnavailableError, ""),
    "RequestLimitExceeded": (UnavailableError, ""),
    "RequestTimeout": (UnavailableError, ""),
    "BadDigest": (UnavailableError, "The bytes changed on the way and were refused: send them again."),
    "XAmzContentSHA256Mismatch": (UnavailableError, "The bytes changed on the way and were refused: send them again."),
    "InvalidRange": (IntegrityError, ""),
    "ExpiredToken": (AccessDeniedError, _LOG_IN),
    "TokenRefreshRequired": (AccessDeniedError, _LOG_IN),
    "RequestTimeTooSkewed": (AccessDeniedError, _CLOCK),
    "QuotaExceeded": (UnavailableError, _ROOM),
    "quotaExceeded": (UnavailableError, _ROOM),
    "InsufficientStorage": (UnavailableError, _ROOM),
    "XMinioStorageFull": (UnavailableError, _ROOM),
    "NotImplemented": (UnsupportedError, ""),
}
_BY_STATUS: dict[int, tuple[type[CkptStoreError], str]] = {
    301: (InvalidInputError, _REGION),
    307: (InvalidInputError, _REGION),
    308: (InvalidInputError, _REGION),
    400: (InvalidInputError, _OPTIONS),
    401: (AccessDeniedError, ""),
    403: (AccessDeniedError, ""),
    404: (NotFoundError, ""),
    405: (UnsupportedError, ""),
    407: (AccessDeniedError, "A proxy on the way asks for credentials: correct HTTPS_PROXY or NO_PROXY."),
    409: (AlreadyExistsError, ""),
    411: (UnsupportedError, ""),
    412: (AlreadyExistsError, ""),
    413: (InvalidInputError, "The server takes no body of this size: set a smaller part_bytes."),
    416: (IntegrityError, ""),
    429: (UnavailableError, ""),
    501: (UnsupportedError, ""),
    507: (UnavailableError, _ROOM),
}


_SECONDS = re.compile(r"[0-9]{1,9}")


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


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one request that failed.

    Args:
        status: The HTTP status.
        code: The server's own name for the error.
        sent: False: it provably never arrived (no address, no connection, no TLS).
        ambiguous: An earlier try of the same request may have been carried out.
        stalled: It was given up because nothing came in the time that it had.
        kind: Where the client's class of error says enough.
        reason: A few plain words where there is no status: `DNS failure`, `no answer in 20 s`. Never a foreign text.
        hint: What to do next, where the engine knows better than the table.
        retry_after_seconds: How long the server asks to be left alone.
    """

    status: int | None = None
    code: str | None = None
    sent: bool = True
    ambiguous: bool = False
    stalled: bool = False
    kind: type[CkptStoreError] | None = None
    reason: str = ""
    hint: str = ""
    retry_after_seconds: float | None = None


def seconds_of(retry_after: str | None) -> float | None:
    """Return how long a server asks to be left alone: its header Retry-After; None where that is no plain number."""
    return float(retry_after) if retry_after is not None and _SECONDS.fullmatch(retry_after) else None


def error_for(answer: Answer, request: Request) -> CkptStoreError:
    """Return our error for what a store said to a request."""
    ours, hint = _classified(answer)
    if request.doing == "LIST" and ours is NotFoundError:
        # A prefix is empty or not; "not found" is no answer of a store, and no proof that the log is empty.
        ours, hint = InvalidInputError, "Correct the URL or the endpoint: no bucket answers there."
    if ours is None:
        never_sent = not answer.sent and not answer.ambiguous
        ours = UnavailableError if never_sent or not request.writes else OutcomeUnknownError
        hint = _UNREACHED if never_sent else ""
    if request.writes and (ours is NotFoundError or (answer.ambiguous and ours is not AlreadyExistsError)):
        # Once one try was ambiguous, what a later one answers proves nothing (I5).
        ours, hint = OutcomeUnknownError, hint if hint == _ROOM else ""  # which helps in any case
    status = str(answer.status) if answer.status else ""
    said = " ".join(filter(None, [status, answer.code, answer.reason])) or "no answer"
    return ours(
        f"{request.doing} {request.url}: {said}.",
        hint=answer.hint or hint,
        key=request.key,
        status=answer.status,
        server_code=answer.code,
        retry_after_seconds=answer.retry_after_seconds,
        **({"stalled": True} if answer.stalled else {}),
    )


def _classified(answer: Answer) -> tuple[type[CkptStoreError] | None, str]:
    if answer.code in _BY_CODE:
        return _BY_CODE[answer.code]
    if answer.kind is not None:
        return answer.kind, ""
    return _BY_STATUS.get(answer.status or 0, (None, ""))
