"""What aiobotocore raises, read into an `Answer`: by class, status and the server's own code, never by text.

A trap: `EndpointConnectionError` is also raised for a connection that broke in the middle of a request. Only the error
inside it says whether the request ever left.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import aiohttp
from botocore import exceptions as foreign
from botocore.parsers import ResponseParserError

from ckptstore.errors import AccessDeniedError, CkptStoreError, InvalidInputError, UnavailableError
from ckptstore.objectstore.answers import Answer, Request, error_for, seconds_of

_LOG_IN = "Log in again (`aws sso login`, say); `aws sts get-caller-identity` tells who you are."
_NO_CREDENTIALS = "Export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with `aws sso login`."
_PROFILE = "Run `aws configure list`, and correct the profile, AWS_PROFILE, or the files in ~/.aws."
_TRUST = "Pass the authority's certificates as verify or AWS_CA_BUNDLE; or correct the endpoint."
_NOT_S3 = "A proxy or another server answers there: check the endpoint, HTTPS_PROXY and NO_PROXY."
_NOT_THE_OBJECT = "Something else than the object is missing there: check the endpoint, the bucket and the credentials."
_CONTRADICTS = "A HEAD finds nothing where a GET finds an object: check what stands between here and the server."
_PROXY = "Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY."
_SETTINGS = "Check the endpoint, the region and storage_options."

_CODE = re.compile(r"[A-Za-z][\w.]{0,63}")
# What every server says in its answer, one of them at least: a well-formed page of a proxy would else be an empty
# listing, and the bare success of a load balancer a stored record. Some give no ETag to what they hold.
_ALWAYS = {
    "complete_multipart_upload": ("ETag", "Key", "Location"),
    "create_multipart_upload": ("UploadId",),
    "get_object": ("ETag", "LastModified"),
    "head_object": ("ETag", "LastModified"),
    "list_multipart_uploads": ("Bucket",),
    "list_objects_v2": ("IsTruncated",),
    "list_parts": ("UploadId",),
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
}
_ANY = Request("", "", "")
_NO_CONTENT, _NOT_FOUND, _TEMPORARY = 204, 404, 500
_ABSENT = "NoSuchKey"

# OpenSSL's own numbers, X509_V_ERR_…
_CERTIFICATE_FAULTS = {
    9: "the certificate is not valid yet",
    10: "the certificate has expired",
    62: "the certificate is for another host",
    64: "the certificate is for another host",
}


_SETTINGS_FAULT: dict[str, Any] = {"kind": InvalidInputError, "sent": False, "hint": _SETTINGS}


class NoAnswerError(TimeoutError):
    """A request took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class NotOpenedError(Exception):
    """There is no client, because of the error inside; nothing was sent."""

    def __init__(self, inner: Exception) -> None:
        super().__init__(inner)
        self.inner = inner


class NotS3Error(Exception):
    """What came as an answer is none of S3's."""


class ContradictionError(Exception):
    """What the server said is absent is there, and absent again."""


# The first that fits. Not sent is only what provably never left.
_BY_CLASS: list[tuple[tuple[type[Exception], ...], dict[str, Any]]] = [
    ((TimeoutError, foreign.ReadTimeoutError), {"reason": "no answer in time", "stalled": True}),
    ((foreign.ConnectTimeoutError,), {"sent": False, "reason": "no connection in time", "hint": _SETTINGS}),
    ((foreign.ProxyConnectionError,), {"sent": False, "reason": "the proxy does not connect", "hint": _PROXY}),
    ((NotS3Error, ResponseParserError), {"reason": "the answer is not S3's", "hint": _NOT_S3}),
    ((ContradictionError,), {"reason": "the store contradicts itself", "hint": _CONTRADICTS}),
    ((foreign.FlexibleChecksumError,), {"kind": UnavailableError, "reason": "the bytes changed on the way"}),
    ((foreign.HTTPClientError, foreign.IncompleteReadError), {"reason": "the connection broke"}),
    ((aiohttp.ClientError, OSError), {"reason": "the connection broke"}),
    (
        (foreign.NoCredentialsError, foreign.PartialCredentialsError),
        {"kind": AccessDeniedError, "sent": False, "reason": "no credentials", "hint": _NO_CREDENTIALS},
    ),
    (
        (
            foreign.CredentialRetrievalError,
            foreign.TokenRetrievalError,
            foreign.NoAuthTokenError,
            foreign.SSOError,
            foreign.LoginError,
            foreign.MetadataRetrievalError,
        ),
        {"kind": AccessDeniedError, "sent": False, "reason": "credentials cannot be renewed", "hint": _LOG_IN},
    ),
    (
        (foreign.ConfigParseError, foreign.ConfigNotFound),
        {"kind": InvalidInputError, "sent": False, "reason": "~/.aws cannot be read", "hint": _PROFILE},
    ),
    ((foreign.InvalidProxiesConfigError,), {**_SETTINGS_FAULT, "reason": "the proxy's settings", "hint": _PROXY}),
    ((foreign.BotoCoreError,), _SETTINGS_FAULT),
]


@contextlib.contextmanager
def translating(request: Request) -> Iterator[None]:
    """Let nothing foreign out of the block.

    Args:
        request: What is being asked for.

    Raises:
        CkptStoreError: What went wrong, as ours.
    """
    try:
        yield
    except CkptStoreError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever it is, the table has a default)
        if isinstance(_inside(error), CkptStoreError):
            raise _inside(error) from None
        # `from None`: what it says is of no use to whoever reads it, and could hold a secret.
        raise error_for(answer_of(error), request) from None


def answer_of(error: Exception) -> Answer:
    """Return what one of aiobotocore's errors says."""
    known: dict[str, Any]
    if isinstance(error, NotOpenedError):
        usual = {"kind": InvalidInputError, "reason": f"refused here: {type(error.inner).__name__}", "hint": _SETTINGS}
        known = {**(_of_client(error.inner) or usual), "sent": False}
    elif isinstance(error, foreign.ClientError):
        known = _of_server(error)
    else:
        known = _of_client(error) or {"reason": type(error).__name__}
    return Answer(**known)


def is_refusal(error: Exception) -> bool:
    """Return whether one of aiobotocore's errors says that the credentials are not taken, or that there are none."""
    return isinstance(error_for(answer_of(error), _ANY), AccessDeniedError)


def refuse_foreign(operation: str, answer: Mapping[str, Any]) -> None:
    """Check that a success is one of S3, and not a page that something on the way shows.

    Raises:
        NotS3Error: It is not.
    """
    metadata = answer["ResponseMetadata"]
    headers = metadata.get("HTTPHeaders", {})
    is_empty = metadata.get("HTTPStatusCode") == _NO_CONTENT or headers.get("content-length") == "0"
    page = headers.get("content-type", "").startswith("text/html") and not is_empty and not is_signed(answer)
    said = operation not in _ALWAYS or any(name in answer for name in _ALWAYS[operation])
    if page or not said:
        if "Body" in answer:
            answer["Body"].close()
        raise NotS3Error


def refuse_absence_of_another(error: Exception, path: str | None) -> None:
    """Check that what is said to be absent is what was asked for, where the server names it.

    Raises:
        NotS3Error: It is another key: on a connection that is out of step the answer is another request's.
    """
    if path is None or not isinstance(error, foreign.ClientError):
        return
    said = error.response.get("Error", {})
    name = said.get("Key") if said.get("Code") == _ABSENT else None
    if not isinstance(name, str) or not name:  # not every server names it
        return
    # Some begin it with a slash, or with the bucket; some quote it.
    if not any(f"/{spelled}".endswith(f"/{path}") for spelled in (name, unquote(name))):
        raise NotS3Error from None


def is_signed(answer: Mapping[str, Any]) -> bool:
    """Return whether the answer has a header that only S3 sends. Not every server that is compatible with it does."""
    return any(name.startswith("x-amz") for name in answer["ResponseMetadata"].get("HTTPHeaders", {}))


def _of_server(error: foreign.ClientError) -> dict[str, Any]:
    metadata = error.response.get("ResponseMetadata", {})
    status, headers = metadata.get("HTTPStatusCode"), metadata.get("HTTPHeaders", {})
    code = error.response.get("Error", {}).get("Code")
    code = code if isinstance(code, str) and _CODE.fullmatch(code) else None
    known: dict[str, Any] = {
        "status": status,
        "code": code,
        "retry_after_seconds": seconds_of(headers.get("retry-after")),
    }
    page = headers.get("content-type", "").startswith("text/html")
    if code is None and status is not None and status >= _TEMPORARY and page:
        return known | {"reason": "a web page", "hint": _NOT_S3}
    if code is None and status is not None and status < _TEMPORARY and not error.operation_name.startswith("Head"):
        # S3 says why it refuses, except to a HEAD. That something else finds nothing here is no proof of absence.
        return {"reason": f"{status} by something that is not S3", "hint": _NOT_S3}
    if status == _NOT_FOUND and error.operation_name == "GetObject" and code != _ABSENT:
        # A tenant, an access point, a web site's settings or a version is missing: that says nothing of the object.
        return known | {"kind": UnavailableError, "hint": _NOT_THE_OBJECT}
    return known


def _inside(error: Exception) -> Any:
    """Return what botocore's error was raised for, if anything."""
    return getattr(error, "kwargs", {}).get("error")


def _of_client(error: Exception) -> dict[str, Any]:
    """Return what is known of a request that no server answered, by the class of its error; else nothing."""
    inner = _inside(error)
    if isinstance(error, foreign.SSLError):
        kind = InvalidInputError if _certificate_fault(inner) else None  # it stays so, however often it is asked
        return {"kind": kind, "sent": False, "reason": _fault_of_tls(inner), "hint": _TRUST}
    if isinstance(error, foreign.EndpointConnectionError):
        return _of_connection(inner)
    if isinstance(error, foreign.HTTPClientError) and isinstance(inner, foreign.BotoCoreError):
        error = inner  # it was found when the connections were to be made
    elif isinstance(error, foreign.HTTPClientError) and isinstance(inner, FileNotFoundError | ssl.SSLError):
        return {"kind": InvalidInputError, "sent": False, "reason": "certificates cannot be read", "hint": _TRUST}
    if isinstance(error, foreign.ProfileNotFound):
        profile = error.kwargs.get("profile")
        return {**_SETTINGS_FAULT, "reason": f"there is no profile {profile!r:.80}", "hint": _PROFILE}
    known = next((known for classes, known in _BY_CLASS if isinstance(error, classes)), {})
    if isinstance(error, NoAnswerError):
        known = {"reason": f"no answer in {error.seconds:.3g} s", "stalled": True}
    elif known is _SETTINGS_FAULT:
        known = {**known, "reason": f"refused here: {type(error).__name__}"}
    return known


def _of_connection(inner: object) -> dict[str, Any]:
    if isinstance(inner, aiohttp.ClientConnectorDNSError):
        return {"sent": False, "reason": "DNS failure", "hint": _SETTINGS}
    if isinstance(inner, aiohttp.ClientConnectorError):
        refused = isinstance(inner.os_error, ConnectionRefusedError)
        return {"sent": False, "reason": "connection refused" if refused else "no connection"}
    return {"reason": "the connection broke"}


def _fault_of_tls(inner: object) -> str:
    return f"TLS: {_certificate_fault(inner) or 'no secure connection'}"


def _certificate_fault(inner: object) -> str:
    cause = getattr(inner, "certificate_error", None) or getattr(inner, "os_error", None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _CERTIFICATE_FAULTS.get(cause.verify_code, "the certificate is not trusted")
    return ""
