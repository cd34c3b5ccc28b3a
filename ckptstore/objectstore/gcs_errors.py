"""What Google Cloud Storage and its clients say, read into an `Answer`. What that means is decided in `answers.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import google.auth.exceptions as auth
import requests

from ckptstore.errors import (
    AccessDeniedError,
    InvalidInputError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.answers import Answer, seconds_of

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_LOG_IN = "Log in (`gcloud auth application-default login`), or pass storage_options={'token': …}."
_WHAT_TOKENS_ARE = "Correct `token`: what it names is no key of a service account, and no credentials of a user."
_TRUST = "If it is the right server, name its authority's certificates in SSL_CERT_FILE; else correct the endpoint."
_SOMETHING_ELSE = "Something else answers there: check the endpoint, HTTPS_PROXY and NO_PROXY."
_PAYS = "If the requester pays for this bucket, pass requester_pays=True and project=…; else check the options."

_Table = tuple[tuple[tuple[type[BaseException], ...], Answer], ...]

# The first line that fits counts.
_FAILURES: _Table = (
    (
        (aiohttp.ClientConnectorDNSError,),
        Answer(sent=False, reason="no address is known for the endpoint (DNS)"),
    ),
    (
        (aiohttp.ClientConnectorCertificateError,),
        Answer(sent=False, kind=InvalidInputError, reason="TLS: the certificate is not trusted", hint=_TRUST),
    ),
    ((aiohttp.ClientSSLError,), Answer(sent=False, reason="no TLS connection")),
    (
        (aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError),
        Answer(sent=False, reason="no way through the proxy"),
    ),
    ((aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError), Answer(sent=False, reason="no connection")),
    ((aiohttp.ClientPayloadError,), Answer(reason="the connection ended in the middle of an answer")),
    ((TimeoutError,), Answer(reason="no answer in time", stalled=True)),
    ((aiohttp.ClientConnectionError, ConnectionError), Answer(reason="the connection ended without an answer")),
)
_NO_ISSUER = Answer(sent=False, reason="whoever issues credentials did not answer, or could not do so now")
_REFUSED = Answer(kind=AccessDeniedError, reason="no valid credentials", hint=_LOG_IN)
_SENSELESS = Answer(kind=InvalidInputError, reason="the credentials make no sense", hint=_WHAT_TOKENS_ARE)
_CREDENTIALS: _Table = (
    ((auth.TransportError, requests.RequestException, TimeoutError), _NO_ISSUER),
    ((auth.MalformedError,), _SENSELESS),
    ((auth.GoogleAuthError,), _REFUSED),
    ((PermissionError,), Answer(kind=AccessDeniedError, reason="the file with the credentials may not be read")),
    (
        (ModuleNotFoundError,),
        Answer(kind=UnsupportedError, reason="these credentials need a package that is not installed"),
    ),
    ((OSError, ValueError, LookupError, TypeError, AttributeError), _SENSELESS),
)

# Where 403 does not mean "denied" but "too much".
_TOO_MUCH = ("rateLimitExceeded", "userRateLimitExceeded")
# What is absent: so says Google, and so does fake-gcs-server.
_ABSENT = ("notFound", "Not Found")
_REDIRECT, _BAD_REQUEST, _UNAUTHORIZED, _NOT_FOUND = 300, 400, 401, 404
_PAGE = re.compile(rb"\s*(<!doctype html|<html\b)", re.IGNORECASE)
WEB_PAGE = Answer(reason="a web page", hint=_SOMETHING_ELSE)
NONSENSE = Answer(reason="an answer that makes no sense", hint=_SOMETHING_ELSE)


def is_page(body: bytes) -> bool:
    """Return whether an answer's body is a page, for people. The service's own errors about objects are none."""
    return _PAGE.match(body) is not None


def answer_of_reply(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    """Return what a server's refusal says: its status, its own name for the error, and how long to leave it alone."""
    if is_page(body):
        return WEB_PAGE  # without its status: that something else finds nothing there is no proof of absence
    code = _reason(body)
    hint = {_UNAUTHORIZED: _LOG_IN, _BAD_REQUEST: _PAYS if code == "required" else ""}.get(status, "")
    return Answer(
        status=status,
        code=code,
        kind=UnavailableError if code in _TOO_MUCH else None,
        hint=hint,
        retry_after_seconds=seconds_of(headers.get("Retry-After")),
    )


def is_foreign(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether an answer proves nothing, because anybody on the way could have given it: a proxy's page, say.

    That something is absent the service says in its JSON; only of an object's bytes in a plain text, which counts as
    foreign, too. A success is a web page of nobody but a proxy, except if an object is one: then its headers say so.
    """
    if status == _NOT_FOUND:
        error = _error(body)
        return error.get("code") != _NOT_FOUND or _first_of(error).get("reason") not in _ABSENT
    page = headers.get("Content-Type", "").startswith("text/html")
    return status < _REDIRECT and page and "X-Goog-Generation" not in headers


def answer_of_foreign(status: int, *, writes: bool) -> Answer:
    """Return what is known when something else has answered."""
    return Answer(
        status=status,
        kind=OutcomeUnknownError if writes else UnavailableError,
        reason="by something that is not Google's storage",
        hint=_SOMETHING_ELSE,
    )


def answer_of_failure(error: Exception) -> Answer:
    """Return what is known when no answer came, or none that could be read to its end."""
    return _first(_FAILURES, error, Answer(reason=type(error).__name__))


def answer_of_credentials(error: Exception) -> Answer:
    """Return what is known when no credentials could be had: nothing was sent to the store."""
    cause = error.__cause__ if isinstance(error.__cause__, auth.GoogleAuthError) else error
    if isinstance(cause, auth.GoogleAuthError) and cause.retryable:
        return _NO_ISSUER
    return _first(_CREDENTIALS, cause, _REFUSED)


def _first(table: _Table, error: BaseException, default: Answer) -> Answer:
    return next((answer for kinds, answer in table if isinstance(error, kinds)), default)


def _reason(body: bytes) -> str | None:
    """Return the server's own name for an error, out of its JSON; a name, never a sentence."""
    reason = _first_of(_error(body)).get("reason")
    return reason if isinstance(reason, str) and _NAME.fullmatch(reason) else None


def _error(body: bytes) -> dict[str, Any]:
    try:
        error: Any = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _first_of(error: Mapping[str, Any]) -> dict[str, Any]:
    try:
        first: Any = error["errors"][0]
    except (LookupError, TypeError):
        return {}
    return first if isinstance(first, dict) else {}
