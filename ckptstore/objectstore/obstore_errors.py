"""What obstore's exceptions say, for the one table in `answers.py`.

obstore's exceptions carry a class and a text, nothing else: most of what a server can say arrives as `GenericError`,
and what a writer says as `OSError`. So the class counts where it says enough, and else what stands in the text in a
fixed form: the server's status and code, the Rust names of what went wrong on the way, and which request it was. The
text itself, many lines of it, is never shown.
"""

from __future__ import annotations

import contextlib
import html
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import unquote

from obstore import exceptions as foreign

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StalledError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.answers import Answer, Request, error_for

_BY_CLASS: dict[type[Exception], type[CkptStoreError]] = {
    FileNotFoundError: NotFoundError,
    foreign.AlreadyExistsError: AlreadyExistsError,
    foreign.PreconditionError: AlreadyExistsError,
    foreign.PermissionDeniedError: AccessDeniedError,
    foreign.UnauthenticatedError: AccessDeniedError,
    foreign.InvalidPathError: InvalidInputError,
    foreign.NotSupportedError: UnsupportedError,
}
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")
_STATUS = re.compile(r"\bstatus(?: code)?: (\d{3})\b")
# Azure is asked to delete in batches of one. Its answer to the batch holds another one, without a code.
_IN_BATCH = re.compile(r'\bDeleteFailed \{[^{}]*?\bcode: "(\d{3})"')
_RETRIES = re.compile(r"\bafter (\d+) retries\b")
_KIND = re.compile(r"\bkind: (\w{1,32})\b")
_ELAPSED = re.compile(r"\bin (\d+(?:\.\d+)?)(ns|µs|ms|s)\b")
# One piece of an upload: whatever becomes of it, nothing is published.
_PIECE = re.compile(r"\bperforming (?:PUT|POST) \S+[?&](?:partNumber=|uploads\b|comp=block&)")
# The answer holds other bytes than were asked for: the object ends before them.
_SHORT = re.compile(r"\b(?:InvalidRangeRequest|ParseContentRange)\b")
_PAGE = re.compile(r"<!doctype html|<html\b", re.IGNORECASE)
_NO_CREDENTIALS = "External AWS credential provider"

_CHECK_ENDPOINT = "Something else answers there: check the endpoint, HTTPS_PROXY and NO_PROXY."
_TRUST = "If it is the right server, name its authority's certificates: AWS_CA_BUNDLE=FILE, or storage_options' verify."
_PLAIN = "Correct the port, or write http:// if the server speaks no TLS."
# Rust's names of what went wrong before a request was on its way, the first that is found; and what to say.
_NEVER_SENT: list[tuple[re.Pattern[str], str, type[CkptStoreError] | None, str]] = [
    (re.compile(r'"dns error"'), "DNS failure", None, "Correct the endpoint's name, or see why it is not resolved."),
    (re.compile(r"\bInvalidCertificate\("), "TLS: the certificate is not trusted", InvalidInputError, _TRUST),
    (re.compile(r"\bInvalidMessage\("), "TLS: the server does not speak it", InvalidInputError, _PLAIN),
    (re.compile(r"\bAlertReceived\("), "TLS: refused by the server", InvalidInputError, _PLAIN),
    (re.compile(r"\bConnectionRefused\b"), "connection refused", None, "See whether the server runs at this endpoint."),
    (re.compile(r"\bkind: Connect\b|legacy::Error\(\s*Connect\b"), "no connection", None, ""),
]
_BY_KIND = {
    "Interrupted": "the connection was cut",
    "Request": "the connection was closed",
    "Decode": "the answer ends in the middle",
}
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_CLOSE_TO = 0.95
_NOT_FOUND = 404
_TEMPORARY = 500
_ABSENT = ("NoSuchKey", "BlobNotFound")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_KEY = re.compile(r"<Key>([^<>]{1,4096})</Key>")
_ELSEWHERE = "performing token request"  # of who hands out credentials; they have other forms


class Provider(Protocol):
    """What hands out credentials; see `credentials.Provider`."""

    failure: CkptStoreError | None

    @property
    def handed(self) -> Any:
        """What was handed out last."""
        ...

    def forget(self, refused: Any) -> None:
        """Look anew before the next request, unless there is something newer."""
        ...


def translated(error: Exception, request: Request, *, limit: float) -> CkptStoreError:
    """Return our error for one of obstore's.

    Args:
        error: obstore's.
        request: What was being asked for.
        limit: How many seconds one try of it could take.
    """
    text = str(error)
    answer = _read(error, text, limit)
    if _is_foreign(answer, text, request):
        what = "a web page" if _PAGE.search(text) else "something that is no object store"
        said = " ".join(filter(None, [str(answer.status), answer.code, "by", what]))
        answer = Answer(reason=said, hint=_CHECK_ENDPOINT, ambiguous=answer.ambiguous)
    named = answer.code in _ABSENT or _IN_BATCH.search(text) is not None
    if request.doing == "DELETE" and answer.status == _NOT_FOUND and named:
        request = replace(request, writes=False)  # there was nothing to change
    if not _PIECE.search(text.partition("\n")[0]):
        return error_for(answer, request)
    if answer.status in (_NOT_FOUND, 409, 412):
        gone = "The upload was removed while it went on: a rule of the bucket may abort incomplete uploads too soon."
        answer = replace(answer, kind=UnavailableError, hint=gone if answer.code == "NoSuchUpload" else "")
    elif answer.status is None and answer.sent and _elapsed(text) >= _CLOSE_TO * limit:
        answer = replace(answer, kind=StalledError, reason=f"no answer in {limit:g} s")
    return error_for(replace(answer, ambiguous=False), replace(request, writes=False))


def _is_foreign(answer: Answer, text: str, request: Request) -> bool:
    """Return whether a status is not the store's own: what it seems to say is neither done, nor refused, nor absent.

    A store says why it refuses, except to a HEAD, and in Azure's answers to a batch. Only a store can say that an
    object is absent, and it says so by name, and of this object.
    """
    if answer.status is None or answer.status >= _TEMPORARY or request.doing == "HEAD":
        return False
    if answer.code is None:
        return _IN_BATCH.search(text) is None and _ELSEWHERE not in text
    if request.doing != "GET" or answer.status != _NOT_FOUND or answer.code in _NO_BUCKET:
        return False
    key = html.unescape(_find(_KEY, text) or "").lstrip("/")
    ours = not key or any(request.url.endswith(f"/{each}") for each in (key, unquote(key)))
    return answer.code not in _ABSENT or not ours


@contextlib.contextmanager
def translating(request: Request, *, limit: float, provider: Callable[[], Provider | None]) -> Iterator[None]:
    """Let nothing foreign out of the block. Credentials that were refused are looked up anew for the next request.

    Raises:
        CkptStoreError: What went wrong, as ours.
        KeyboardInterrupt: An interrupt came while obstore asked for credentials.
    """
    asked = provider()
    handed, noted = (asked.handed, asked.failure) if asked is not None else (None, None)
    try:
        yield
    except CkptStoreError:
        raise
    except Exception as error:  # noqa: BLE001  (obstore raises its own, OSError and ValueError; the table has a default)
        asked = provider()
        # `from None`: its text is a dump of many lines, which nobody should meet in a log.
        if asked is not None and _NO_CREDENTIALS in str(error):
            if asked.failure is noted and threading.current_thread() is threading.main_thread():
                # Failures are noted; an interrupt is not, of which obstore makes a text like of everything there.
                raise KeyboardInterrupt("while credentials were handed out") from None
            if asked.failure is not None:
                raise asked.failure from None
        ours = translated(error, request, limit=limit)
        if asked is not None and isinstance(ours, AccessDeniedError):
            asked.forget(handed)
        raise ours from None


def _read(error: Exception, text: str, limit: float) -> Answer:
    """Return what is known of a request, as obstore tells it."""
    code, said = _find(_CODE, text), _find(_STATUS, text) or _find(_IN_BATCH, text)
    status = int(said) if said else None
    ambiguous = int(_find(_RETRIES, text) or 0) > 0
    ours = next((ours for theirs, ours in _BY_CLASS.items() if isinstance(error, theirs)), None)
    if "BareRedirect" in text or "redirect without LOCATION" in text:
        answer = Answer(301, "PermanentRedirect")
    elif status is not None:
        page, region = code is None and _PAGE.search(text), _find(_REGION, text)
        reason = "a web page" if page else f"the bucket is in {region}" if code and region else ""
        answer = Answer(status, code, kind=ours, reason=reason, hint=_CHECK_ENDPOINT if page else "")
    elif code is not None:
        answer = Answer(code=code, kind=ours)
    elif ours is not None:
        answer = Answer(kind=ours, reason=type(error).__name__)
    elif _SHORT.search(text):
        answer = Answer(kind=IntegrityError, reason="the object ends before what was asked for")
    else:
        answer = _read_silence(text, limit)
    return replace(answer, ambiguous=ambiguous)


def _read_silence(text: str, limit: float) -> Answer:
    """Return what is known of a request that no server has answered."""
    for pattern, reason, kind, hint in _NEVER_SENT:
        if pattern.search(text):
            return Answer(sent=False, kind=kind, reason=reason, hint=hint)
    what = _find(_KIND, text) or ""
    if what == "Timeout":
        return Answer(reason=f"no answer in {limit:g} s", stalled=True)
    if "NotPartial" in text:
        return Answer(kind=UnsupportedError, reason="a piece was asked for, and its answer says that it is the whole")
    if "HTTP error" in text:
        return Answer(reason=_BY_KIND.get(what, "no answer"))
    return Answer(reason="an answer that is none of an object store")


def _elapsed(text: str) -> float:
    match = _ELAPSED.search(text)
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _find(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
