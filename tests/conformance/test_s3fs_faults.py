"""s3:// through s3fs as it goes wrong: what servers answer, what never arrives, and what must never be shown."""

import base64
import pickle
import re
import socket
import ssl
import struct
import threading
import time
import traceback
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme
from scripted import BUCKET, CALLS, COMPLETED, HUSH, Scripted, answers, multipart, sized, upload

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
from ckptstore.objectstore import s3_checksum, s3_upload
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

ONCE = RetryOptions(attempts=1, stall_timeout_seconds=5)
QUICK = RetryOptions(attempts=4, first_pause_seconds=0.01, longest_pause_seconds=0.1, stall_timeout_seconds=5)
PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=QUICK)
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
        with pytest.raises(UnavailableError, match=f"TLS: {said}"):
            CALLS["create"](store_at(server, **verify))
        assert server.seen == []


def test_over_tls_a_body_is_plain_and_its_checksum_beside_it(tmp_path):
    """Some servers refuse the chunks that carry a checksum at their end."""
    CERTIFICATES.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with Scripted(tls=tls("127.0.0.1")).serving() as server:
        server.script = answers(200, "", ("ETag", '"e"'))
        CALLS["create"](store_at(server, verify=str(tmp_path / "ca.pem")))
        ((_, _, headers),) = server.seen
        assert server.bodies == [b"x"]
    assert headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
    assert headers["x-amz-checksum-crc32"] == base64.b64encode(zlib.crc32(b"x").to_bytes(4, "big")).decode()
    assert "aws-chunked" not in str(headers)
    assert "Expect" not in headers  # some servers never say that they are ready for the body


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


def test_an_upload_that_stalls_says_so(scripted):
    stop = threading.Event()
    scripted.script = lambda method, path, _: (
        (stop.wait(60) and None) if method == "PUT" else multipart(method, path, None)
    )
    store = store_at(scripted, retry=RetryOptions(attempts=2, first_pause_seconds=0.01, stall_timeout_seconds=0.2))
    try:
        with pytest.raises(StalledError):
            upload(store, 5 * MIB + 1)  # to each part a second is granted for each MiB
    finally:
        stop.set()


def test_a_part_is_sent_again_with_the_same_bytes_and_the_others_are_not(scripted):
    failed = set()

    def script(method, path, _turn):
        if method == "PUT" and "partNumber=2" in path and len(failed) < 2:
            failed.add(len(scripted.seen))
            return (503, "SlowDown", ("Retry-After", "1")) if len(failed) == 1 else None
        return multipart(method, path, lambda method: sized(16 * MIB) if method == "HEAD" else COMPLETED)

    scripted.script = script
    body = bytes(range(256)) * (16 * MIB // 256)
    began = time.monotonic()
    store = store_at(scripted, retry=RetryOptions(attempts=4, first_pause_seconds=0.01, longest_pause_seconds=1))
    with store.open_upload("shard", size=len(body)) as begun:
        begun.write(body)
        begun.complete()
    assert time.monotonic() - began >= 1  # as long as the server had asked for
    sent = {}
    for (method, path, _), bytes_sent in zip(scripted.seen, scripted.bodies, strict=True):
        if method == "PUT":
            sent.setdefault(int(re.search(r"partNumber=(\d+)", path)[1]), []).append(bytes_sent)
    assert {number: len(bodies) for number, bodies in sent.items()} == {1: 1, 2: 3, 3: 1, 4: 1}
    assert sent[2][0] == sent[2][1] == sent[2][2]
    assert b"".join(sent[number][0] for number in sorted(sent)) == body


def test_a_part_that_fails_for_good_ends_the_upload_and_forgets_its_parts(scripted):
    def script(method, path, _turn):
        if method == "PUT":
            return 500, "InternalError"
        return multipart(method, path, lambda _: (404, "NoSuchKey"))

    scripted.script = script
    with pytest.raises(UnavailableError, match="InternalError"):
        upload(store_at(scripted, retry=QUICK), 30 * MIB)
    assert not [path for method, path, _ in scripted.seen if method == "POST" and "uploads" not in path]
    assert [path for method, path, _ in scripted.seen if method == "DELETE"] == ["/bucket/run/shard?uploadId=u1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnavailableError])
def test_an_upload_that_lost_a_part_is_never_completed(scripted, monkeypatch, error):
    """Whoever goes on after an error or a Ctrl-C does not publish an object with a hole."""
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: sized(16 * MIB) if method == "HEAD" else COMPLETED
    )
    store = store_at(scripted)
    with store.open_upload("shard", size=16 * MIB) as begun:
        begun.write(bytes(6 * MIB))
        monkeypatch.setattr(s3_upload, "checksum", lambda *_: raises(error))
        with pytest.raises(error):
            begun.write(bytes(5 * MIB))
        monkeypatch.undo()
        for call in (lambda: begun.write(bytes(5 * MIB)), begun.complete):
            with pytest.raises(UnavailableError, match="Begin this upload again"):
                call()
    assert not [path for method, path, _ in scripted.seen if method == "POST" and "uploads" not in path]


def raises(error):
    raise error("now")


def test_a_server_that_cannot_forget_the_parts_hides_no_error(scripted):
    scripted.script = lambda method, path, _: (
        (500, "InternalError") if method in ("PUT", "DELETE") else multipart(method, path, None)
    )
    with pytest.raises(UnavailableError, match="InternalError"):
        upload(store_at(scripted, retry=QUICK), 30 * MIB)


@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
def test_a_publication_whose_answer_was_lost_is_found_by_asking(scripted, size):
    def script(method, path, _turn):
        if method == "HEAD":
            return sized(size)
        publishes = method == "POST" and "uploads" not in path if size > 1 else method == "PUT"
        return None if publishes else multipart(method, path, None)

    scripted.script = script
    info = upload(store_at(scripted, retry=QUICK), size)
    assert (info.key, info.size, info.etag) == ("shard", size, "e-2")
    assert sum(method == ("POST" if size > 1 else "PUT") for method, _, _ in scripted.seen) == 2 - (size == 1)


def test_a_completion_that_is_refused_in_a_success_is_tried_again(scripted):
    def script(method, path, _turn):
        if method == "HEAD":
            return sized(6 * MIB) if COMPLETED in said else (404, "NoSuchKey")
        if method == "GET":
            return 404, "NoSuchKey"
        return multipart(method, path, lambda _: said.append(script.answers.pop(0)) or said[-1])

    said = []
    script.answers = [(200, "<Error><Code>InternalError</Code></Error>"), COMPLETED]
    scripted.script = script
    assert upload(store_at(scripted, retry=QUICK), 6 * MIB).size == 6 * MIB
    assert len(said) == 2


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ((404, "NoSuchKey"), OutcomeUnknownError),
        ((403, "AccessDenied"), OutcomeUnknownError),
        ((500, "InternalError"), OutcomeUnknownError),
    ],
)
def test_a_completion_that_cannot_be_seen_is_not_called_done(scripted, head, expected):
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: head if method in ("HEAD", "GET") else (500, "InternalError")
    )
    with pytest.raises(expected):
        upload(store_at(scripted, retry=QUICK), 6 * MIB)


def test_an_object_of_another_size_is_not_ours(scripted):
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: sized(5) if method == "HEAD" else COMPLETED
    )
    with pytest.raises(IntegrityError, match="5 bytes"):
        upload(store_at(scripted), 6 * MIB)


@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
@pytest.mark.parametrize("algorithm", ["CRC32", "SHA256", None])
def test_every_body_carries_its_checksum_unless_told_not_to(scripted, size, algorithm):
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: sized(size) if method == "HEAD" else COMPLETED
    )
    upload(store_at(scripted, checksum_algorithm=algorithm), size)
    lengths = [
        len(body) for (method, _, _), body in zip(scripted.seen, scripted.bodies, strict=True) if method == "PUT"
    ]
    assert sum(lengths) == size
    for method, path, headers in scripted.seen:
        names = {name.lower() for name in headers if name.lower().startswith("x-amz-checksum")}
        begins = method == "POST" and "uploads" in path
        wanted = {"x-amz-checksum-algorithm"} if begins else {f"x-amz-checksum-{algorithm}".lower()}
        assert names == (wanted if algorithm and (begins or method == "PUT") else set())


def test_a_checksum_that_needs_a_package_names_it(monkeypatch):
    monkeypatch.setattr(s3_checksum, "has_awscrt", lambda: False)
    with pytest.raises(UnsupportedError, match="pip install awscrt"):
        open_store(BUCKET, engine="s3fs", storage_options={"checksum_algorithm": "CRC64NVME"})


def test_no_more_parts_than_allowed_are_on_their_way_or_held(scripted):
    """So much memory is needed, and no more: the parts under way and the one that is being filled."""
    under_way, most, lock = set(), [], threading.Lock()

    def script(method, path, turn):
        if method != "PUT":
            return multipart(method, path, lambda method: sized(100 * MIB) if method == "HEAD" else COMPLETED)
        scripted.bodies[turn] = b""
        with lock:
            under_way.add(turn)
            most.append(len(under_way))
        time.sleep(0.1)
        with lock:
            under_way.remove(turn)
        return multipart(method, path, None)

    scripted.script = script
    piece = bytes(MIB)
    store = store_at(scripted)
    with store.open_upload("shard", size=100 * MIB) as begun:
        tracemalloc.start()
        try:
            for _ in range(100):
                begun.write(piece)
            begun.complete()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert max(most) == 2
    # The server of this test is in the same process: what it reads counts too, two parts of it.
    assert peak < (3 + 2) * 5 * MIB * 1.2 + 4 * MIB


def test_no_object_is_larger_than_s3_takes(scripted):
    with pytest.raises(InvalidInputError, match="smaller shards"):
        store_at(scripted).open_upload("shard", size=10_000 * s3_upload.MAX_PART_BYTES + 1)
    store_at(scripted).open_upload("shard", size=10_000 * s3_upload.MAX_PART_BYTES)
    assert scripted.seen == []


def test_the_options_travel_with_the_requests_that_know_them(scripted):
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: sized(6 * MIB) if method == "HEAD" else COMPLETED
    )
    options = {
        "requester_pays": True,
        "s3_additional_kwargs": {
            "ACL": "bucket-owner-full-control",
            "StorageClass": "STANDARD_IA",
            "SSECustomerKey": "k" * 32,
        },
    }
    upload(store_at(scripted, **options), 6 * MIB)
    kinds = {}
    for method, path, headers in scripted.seen:
        lowered = {name.lower(): value for name, value in headers.items()}
        kinds[method, "uploads" in path] = lowered
        assert lowered["x-amz-request-payer"] == "requester"
        assert lowered["x-amz-server-side-encryption-customer-key"] == base64.b64encode(b"k" * 32).decode()
    assert kinds["POST", True]["x-amz-acl"] == "bucket-owner-full-control"
    assert kinds["POST", True]["x-amz-storage-class"] == "STANDARD_IA"
    assert "x-amz-acl" not in kinds["PUT", False]
