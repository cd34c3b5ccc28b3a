"""s3:// through s3fs as it goes wrong: what servers answer, what never arrives, and what must never be shown."""

import base64
import pickle
import socket
import ssl
import struct
import threading
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme
from scripted import BUCKET, CALLS, HUSH, Scripted, answers, md5, upload

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    StalledError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

ONCE = RetryOptions(attempts=1, stall_timeout_seconds=5)
QUICK = RetryOptions(attempts=4, first_pause_seconds=0.01, longest_pause_seconds=0.1, stall_timeout_seconds=5)
PAGE = "<html><head></head><body>Please log in</body></html>"


def store_at(server, *, retry=ONCE, **options):
    return open_store(
        BUCKET,
        engine="s3fs",
        storage_options=server.options | options,
        transfer=TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=retry),
    )


@pytest.mark.parametrize(
    ("status", "code", "call", "expected"),
    [
        (404, "NoSuchKey", "get", NotFoundError),
        (404, "NoSuchBucket", "get", InvalidInputError),
        (404, "NoSuchBucket", "list", InvalidInputError),
        (404, "NoSuchBucket", "create", InvalidInputError),
        (404, "Whatever", "create", OutcomeUnknownError),
        (404, "Whatever", "list", InvalidInputError),
        (403, "AccessDenied", "get", AccessDeniedError),
        (403, "SignatureDoesNotMatch", "list", AccessDeniedError),
        (403, "RequestTimeTooSkewed", "put", AccessDeniedError),
        (400, "ExpiredToken", "create", AccessDeniedError),
        (401, "Unauthorized", "get_range", AccessDeniedError),
        (412, "PreconditionFailed", "create", AlreadyExistsError),
        (409, "ConditionalRequestConflict", "create", AlreadyExistsError),
        (416, "InvalidRange", "get_range", IntegrityError),
        (400, "BadDigest", "create", UnavailableError),
        (400, "AuthorizationHeaderMalformed", "get", InvalidInputError),
        (301, "PermanentRedirect", "get", InvalidInputError),
        (301, "PermanentRedirect", "create", InvalidInputError),
        (503, "SlowDown", "create", UnavailableError),
        (503, "SlowDown", "get", UnavailableError),
        (503, "ServiceUnavailable", "create", OutcomeUnknownError),
        (500, "InternalError", "put", OutcomeUnknownError),
        (500, "InternalError", "get", UnavailableError),
        (500, "InternalError", "list", UnavailableError),
        (418, "Teapot", "create", OutcomeUnknownError),
        (418, "Teapot", "get", UnavailableError),
        (501, "NotImplemented", "create", UnsupportedError),
    ],
)
def test_every_answer_becomes_one_error_of_ours(scripted, status, code, call, expected):
    scripted.script = answers(status, code)
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](store_at(scripted))
    assert type(caught.value) is expected
    assert code in str(caught.value)
    assert BUCKET in str(caught.value)


@pytest.mark.parametrize(("code", "expected"), [("NoSuchKey", NotFoundError), ("NoSuchBucket", InvalidInputError)])
def test_a_head_says_what_is_missing_though_its_answer_has_no_body(scripted, code, expected):
    scripted.script = answers(404, code)
    with pytest.raises(expected, match=code):
        store_at(scripted).head("a")


def test_an_expired_token_is_named_also_by_a_head(scripted):
    scripted.script = answers(400, "ExpiredToken")
    with pytest.raises(AccessDeniedError, match=r"ExpiredToken.*Log in again"):
        store_at(scripted).head("a")


def test_a_clock_that_is_off_is_named(scripted):
    scripted.script = answers(403, "RequestTimeTooSkewed")
    with pytest.raises(AccessDeniedError, match="clock"):
        CALLS["create"](store_at(scripted))


@pytest.mark.parametrize("call", [*CALLS, "upload"])
def test_no_dump_and_no_secret_is_ever_shown(scripted, call):
    scripted.script = answers(500, "InternalError")
    store = store_at(scripted, token=HUSH)
    with pytest.raises(CkptStoreError) as caught:
        upload(store, 1) if call == "upload" else CALLS[call](store)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.facts) + repr(store) + store.url
    for never in (HUSH, "botocore.exceptions", "aiohttp"):
        assert never not in shown
    assert HUSH.encode() not in pickle.dumps(caught.value)


def test_a_create_is_sent_once_also_on_a_kept_connection_that_breaks(scripted):
    """The client below would send a PUT again by itself, and answer for the second one."""
    scripted.script = lambda _method, _path, turn: (404, "NoSuchKey") if turn == 0 else None
    store = store_at(scripted, retry=QUICK)
    with pytest.raises(NotFoundError):
        CALLS["get"](store)
    with pytest.raises(OutcomeUnknownError, match="the connection broke"):
        CALLS["create"](store)
    (method, _, headers), *others = scripted.seen[1:]
    assert (method, headers["If-None-Match"], others) == ("PUT", "*", [])


def test_a_connection_that_is_reset_in_the_middle_proves_nothing():
    """aiobotocore calls it what it calls a server that nobody reaches."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:

        def reset():
            peer, _ = listening.accept()
            peer.recv(100_000)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()

        done = thread.submit(reset)
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        options = {"key": "k", "secret": HUSH, "endpoint_url": endpoint}
        store = open_store(BUCKET, engine="s3fs", storage_options=options, transfer=TransferOptions(retry=ONCE))
        with pytest.raises(OutcomeUnknownError, match="the connection broke"):
            CALLS["create"](store)
        done.result(10)


@pytest.mark.parametrize("call", CALLS)
def test_what_goes_wrong_is_told_and_not_tried_again_by_the_engine(scripted, call):
    scripted.script = lambda _method, _path, turn: (503, "SlowDown") if turn % 2 else None
    store = store_at(scripted)
    for _ in range(2):
        with pytest.raises(CkptStoreError):
            CALLS[call](store)
    assert len(scripted.seen) == 2


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_is_not_followed(scripted, call, status):
    """The login page of a proxy is no object, and storing a record in it stores nothing."""
    with Scripted().serving() as elsewhere:
        elsewhere.script = answers(200, PAGE, ("Content-Type", "text/html"))
        scripted.script = answers(status, PAGE, ("Raw", ""), ("Location", f"{elsewhere.endpoint}/login"))
        with pytest.raises(CkptStoreError, match="not S3"):
            CALLS[call](store_at(scripted))
        assert elsewhere.seen == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [200, 403, 404])
def test_the_page_of_a_proxy_is_no_answer(scripted, call, status):
    """Not absent, not empty, not stored: it says nothing of the store."""
    scripted.script = answers(status, PAGE, ("Raw", ""), ("Content-Type", "text/html; charset=utf-8"))
    expected = OutcomeUnknownError if call in ("create", "put", "delete") else UnavailableError
    with pytest.raises(expected, match=r"not S3.*proxy"):
        CALLS[call](store_at(scripted))


def test_a_page_that_happens_to_be_xml_is_no_empty_listing(scripted):
    scripted.script = answers(200, PAGE, ("Content-Type", "application/xml"))
    with pytest.raises(UnavailableError, match="not S3"):
        list(store_at(scripted).list(""))


def test_a_server_that_serves_no_ranges_is_told_so(scripted):
    scripted.script = answers(200, "0123456789", ("ETag", '"e"'))
    store = store_at(scripted)
    assert store.get_range("a", start=0, length=10) == b"0123456789"
    with pytest.raises(IntegrityError):
        store.get_range("a", start=9, length=2)
    with pytest.raises(UnsupportedError, match="not served in parts"):
        store.get_range("a", start=1, length=2)


def test_a_body_that_ends_early_is_no_short_object(scripted):
    scripted.script = answers(200, [b"0123"], ("Content-Length", "10"), ("ETag", '"e"'))
    with pytest.raises(UnavailableError):
        store_at(scripted).get("a", max_bytes=100)


CERTIFICATES = trustme.CA()


def tls(name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    CERTIFICATES.issue_cert(name).configure_cert(context)
    return context


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://no-such-host.invalid:9", "DNS failure"),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_what_never_left_did_not_happen(endpoint, said, call):
    options = {"key": "k", "secret": HUSH, "endpoint_url": endpoint}
    store = open_store(BUCKET, engine="s3fs", storage_options=options, transfer=TransferOptions(retry=ONCE))
    with pytest.raises(UnavailableError, match=said):
        CALLS[call](store)


@pytest.mark.parametrize(
    ("name", "trusted", "said"),
    [
        ("127.0.0.1", False, "the certificate is not trusted"),
        ("elsewhere.example", True, "the certificate is for another host"),
    ],
)
def test_a_certificate_that_is_not_trusted_is_named_and_nothing_is_sent(tmp_path, name, trusted, said):
    CERTIFICATES.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    verify = {"verify": str(tmp_path / "ca.pem")} if trusted else {}
    with Scripted(tls=tls(name)).serving() as server:
        with pytest.raises(InvalidInputError, match=f"TLS: {said}"):
            CALLS["create"](store_at(server, **verify))
        assert server.seen == []


def test_over_tls_a_body_is_plain_and_its_checksum_beside_it(tmp_path):
    """Some servers refuse the chunks that carry a checksum at their end."""
    CERTIFICATES.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with Scripted(tls=tls("127.0.0.1")).serving() as server:
        server.script = answers(200, "", ("ETag", f'"{md5(b"x")}"'))
        CALLS["create"](store_at(server, verify=str(tmp_path / "ca.pem"), checksum_algorithm="CRC32"))
        ((_, _, said),) = server.seen
        assert server.bodies == [b"x"]
    headers = {name.lower(): value for name, value in said.items()}  # whoever signs, with awscrt or without
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["x-amz-checksum-crc32"] == base64.b64encode(zlib.crc32(b"x").to_bytes(4, "big")).decode()
    assert "aws-chunked" not in str(headers)
    assert "expect" not in headers  # some servers never say that they are ready for the body


def test_a_server_that_never_answers_is_given_up(scripted):
    stop = threading.Event()
    scripted.script = lambda *_: stop.wait(30) and None
    retry = RetryOptions(attempts=1, stall_timeout_seconds=0.5)
    began = time.monotonic()
    try:
        with pytest.raises(OutcomeUnknownError, match=r"no answer in 0\.5 s"):
            CALLS["create"](store_at(scripted, retry=retry))
        with pytest.raises(StalledError, match=r"no answer in 0\.5 s"):
            CALLS["get"](store_at(scripted, retry=retry))
    finally:
        stop.set()
    assert 0.9 < time.monotonic() - began < 10
