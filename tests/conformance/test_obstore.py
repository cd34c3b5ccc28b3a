"""S3 as it goes wrong: what servers answer, what never arrives, and what must never be shown."""

import contextlib
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace

import pytest
from scripted import BUCKET, CALLS, HUSH, PARTS, QUICK, THERE, answers, md5, multipart, opened, upload

from ckptstore import options
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
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.urls import open_store
from ckptstore.options import MAX_PARTS, TransferOptions
from ckptstore.units import GIB, MIB


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
        (403, "InvalidAccessKeyId", "create", AccessDeniedError),
        (401, "Unauthorized", "get_range", AccessDeniedError),
        (412, "PreconditionFailed", "create", AlreadyExistsError),
        (409, "ConditionalRequestConflict", "create", AlreadyExistsError),
        (416, "InvalidRange", "get_range", IntegrityError),
        (400, "BadDigest", "create", UnavailableError),
        (400, "AuthorizationHeaderMalformed", "get", InvalidInputError),
        (503, "SlowDown", "create", UnavailableError),
        (503, "SlowDown", "get", UnavailableError),
        (503, "ServiceUnavailable", "create", OutcomeUnknownError),
        (500, "InternalError", "create", OutcomeUnknownError),
        (500, "InternalError", "put", OutcomeUnknownError),
        (500, "InternalError", "get", UnavailableError),
        (500, "InternalError", "list", UnavailableError),
        (418, "Teapot", "create", OutcomeUnknownError),
        (418, "Teapot", "get", UnavailableError),
        (404, "NoSuchBucket", "delete", InvalidInputError),
        (403, "AccessDenied", "delete", AccessDeniedError),
        (500, "InternalError", "delete", OutcomeUnknownError),
        (418, "Teapot", "delete", OutcomeUnknownError),
    ],
)
def test_every_answer_becomes_one_error_of_ours(scripted, status, code, call, expected):
    scripted.script = answers(status, code)
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](opened(storage_options=scripted.options))
    assert type(caught.value) is expected
    assert code in str(caught.value)
    assert BUCKET in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_no_dump_and_no_secret_is_ever_shown(scripted, call):
    scripted.script = answers(500, "InternalError")
    store = opened(storage_options=scripted.options | {"token": HUSH})
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](store)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.facts) + repr(store) + store.url
    for never in (HUSH, "Debug source", "RetryError", "<Error>"):
        assert never not in shown


@pytest.mark.parametrize("call", CALLS)
def test_no_answer_means_unknown_for_a_write_and_try_again_for_a_read(scripted, call):
    scripted.script = lambda *_: None
    expected = OutcomeUnknownError if call in ("create", "put", "delete") else UnavailableError
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](opened(storage_options=scripted.options))
    assert type(caught.value) is expected


def test_a_create_is_sent_once_so_that_its_answer_means_something(scripted):
    """A client that sent it again would meet its own landed write, and call it a lost race (I5)."""
    scripted.script = lambda _method, _path, turn: (500, "InternalError") if turn == 0 else (412, "PreconditionFailed")
    with pytest.raises(OutcomeUnknownError):
        CALLS["create"](opened(storage_options=scripted.options))
    ((method, _, headers),) = scripted.seen
    assert (method, headers["if-none-match"]) == ("PUT", "*")


def test_what_a_second_try_answers_proves_nothing_about_the_first(scripted):
    """The first may have been carried out: a denial afterwards is no 'did not happen' (I5)."""
    scripted.script = lambda _method, _path, turn: (500, "InternalError") if turn == 0 else (403, "AccessDenied")
    with pytest.raises(OutcomeUnknownError):
        CALLS["put"](opened(storage_options=scripted.options))
    assert len(scripted.seen) >= 2


def test_nobody_listening_means_that_a_create_did_not_happen():
    options = {"key": "k", "secret": HUSH, "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(UnavailableError, match="connection refused"):
        CALLS["create"](opened(storage_options=options))


@pytest.fixture
def held():
    """What a server waits for before it answers; in the end it goes on."""
    stop = threading.Event()
    yield stop
    stop.set()


SHORT = TransferOptions(part_bytes=5 * MIB, retry=replace(QUICK, stall_timeout_seconds=1.0))


@pytest.mark.parametrize(
    ("call", "expected", "tries"), [("create", OutcomeUnknownError, 1), ("get", StalledError, QUICK.attempts)]
)
def test_a_server_that_never_answers_is_given_up(scripted, held, call, expected, tries):
    scripted.script = lambda *_: held.wait(30) and None
    began = time.monotonic()
    with pytest.raises(expected, match="no answer in 1 s"):
        CALLS[call](opened(storage_options=scripted.options, transfer=SHORT))
    assert 0.9 * tries < time.monotonic() - began < 20


def test_a_read_that_comes_slowly_goes_on_and_one_that_stands_still_is_given_up(scripted, held):
    """Of what may be large, the time without a byte is what ends it early."""

    def slowly(stands_still):
        def body():
            for _ in range(8):
                yield b"x"
                held.wait(30 if stands_still else 0.25)

        return 200, body(), ("Content-Length", "8"), *THERE[3:]

    store = opened(storage_options=scripted.options, transfer=SHORT)
    scripted.script = lambda *_: slowly(stands_still=False)
    assert store.get("a", max_bytes=2 * MIB) == b"x" * 8
    scripted.script = lambda *_: slowly(stands_still=True)
    began = time.monotonic()
    with pytest.raises(StalledError):
        store.get("a", max_bytes=64 * MIB)
    assert time.monotonic() - began < 20


def test_a_part_that_stands_still_ends_the_upload_as_stalled(scripted, held):
    def script(method, path, _turn):
        if method == "PUT":
            held.wait(30)
        return multipart(method, path, lambda _: (404, "NoSuchKey"))

    scripted.script = script
    transfer = replace(SHORT, retry=replace(SHORT.retry, attempts=1), parts_in_flight=1)
    with pytest.raises(StalledError, match="no answer in"):
        upload(opened(storage_options=scripted.options, transfer=transfer), 6 * MIB)
    methods = [method for method, path, _ in scripted.seen if "partNumber" not in path]
    assert methods == ["POST", "DELETE"]


@pytest.mark.parametrize("call", [*CALLS, "head"])
def test_each_request_is_sent_exactly_once_by_the_engine(scripted, call):
    """Only so does an answer say what happened; whoever is above decides about another try."""
    scripted.script = answers(500, "InternalError")
    once = replace(PARTS, retry=replace(QUICK, attempts=1))
    store = opened(storage_options=scripted.options, transfer=once)
    with pytest.raises(CkptStoreError):
        (CALLS | {"head": lambda store: store.head("a")})[call](store)
    assert len(scripted.seen) == 1


def test_an_answer_that_breaks_off_is_not_asked_for_again_by_the_engine(scripted):
    scripted.script = lambda *_: (200, iter([b"12345"]), ("Content-Length", "8"), *THERE[3:])
    once = replace(PARTS, retry=replace(QUICK, attempts=1))
    with pytest.raises(UnavailableError):
        opened(storage_options=scripted.options, transfer=once).get("a", max_bytes=10)
    assert len(scripted.seen) == 1


def test_a_part_is_tried_again_as_often_as_the_options_say(scripted):
    failures = iter([(503, "SlowDown")] * 3)

    def script(method, path, _turn):
        if method == "PUT":
            return next(failures, None) or multipart(method, path, None)
        return multipart(method, path, lambda method: THERE if method == "HEAD" else (200, "<R><ETag>e-2</ETag></R>"))

    scripted.script = script
    for attempts, expected in ((4, None), (2, UnavailableError)):
        transfer = replace(PARTS, retry=replace(QUICK, attempts=attempts), parts_in_flight=1)
        with contextlib.nullcontext() if expected is None else pytest.raises(expected, match="SlowDown"):
            upload(opened(storage_options=scripted.options, transfer=transfer), 6 * MIB)
        failures = iter([(503, "SlowDown")] * 3)


WRONG_REGION = "AuthorizationHeaderMalformed</Code><Region>eu-south-9</Region><Code>"


@pytest.mark.parametrize(
    ("answer", "call", "expected", "said", "hinted"),
    [
        ((301, "PermanentRedirect"), "get", InvalidInputError, "PermanentRedirect", "AWS_REGION"),
        ((400, "ExpiredToken"), "get", AccessDeniedError, "ExpiredToken", "Log in again"),
        ((403, "RequestTimeTooSkewed"), "list", AccessDeniedError, "RequestTimeTooSkewed", "clock"),
        ((400, WRONG_REGION), "get", InvalidInputError, "eu-south-9", "AWS_REGION"),
    ],
)
def test_what_a_user_can_put_right_is_said_in_plain_words(scripted, answer, call, expected, said, hinted):
    scripted.script = answers(*answer)
    with pytest.raises(expected, match=said) as caught:
        CALLS[call](opened(storage_options=scripted.options))
    assert hinted in caught.value.hint


def test_a_name_that_is_not_resolved_is_said_to_be_so():
    options = {"key": "k", "secret": HUSH, "endpoint_url": "http://no-such-host.invalid:9000"}
    with pytest.raises(UnavailableError, match="DNS failure"):
        CALLS["create"](opened(storage_options=options))


def test_a_server_without_tls_is_said_to_be_so(scripted):
    options = scripted.options | {"endpoint_url": scripted.endpoint.replace("http:", "https:")}
    with pytest.raises(InvalidInputError, match="TLS") as caught:
        CALLS["create"](opened(storage_options=options))
    assert "http://" in caught.value.hint


def test_a_connection_that_never_stands_means_that_a_create_did_not_happen():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(3):  # the kernel lets no more in, and says nothing to who comes next
            client = waiting.enter_context(socket.socket())
            client.settimeout(0)
            client.connect_ex(full.getsockname())
        options = {"key": "k", "secret": HUSH, "endpoint_url": f"http://127.0.0.1:{full.getsockname()[1]}"}
        options |= {"config_kwargs": {"connect_timeout": 0.5}}
        with pytest.raises(UnavailableError, match="no connection"):
            CALLS["create"](opened(storage_options=options))


def test_an_object_that_no_store_could_take_is_refused_before_the_first_byte(scripted):
    store = opened(storage_options=scripted.options)
    with pytest.raises(InvalidInputError, match=r"10000 parts of at most 5\.0 GiB"):
        store.open_upload("shard", size=MAX_PARTS * 5 * GIB + 1)
    assert scripted.seen == []


def test_small_requests_share_their_connections(scripted):
    scripted.script = lambda *_: (200, "", ("ETag", f'"{md5(scripted.bodies[-1])}"'))
    store = opened(storage_options=scripted.options)
    for size in range(0, 200_000, 20_000):
        store.put("a", bytes(size))
        store.put("b", bytes(size), mode=PutMode.CREATE)
    assert len(store._inner._clients._here.clients) == 1


def test_no_object_is_ever_copied(scripted):
    """A copy has a limit of 5 GiB, and a rename is no commit."""
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: THERE if method == "HEAD" else (200, "<R><ETag>e-2</ETag></R>")
    )
    store = opened(storage_options=scripted.options)
    upload(store, 6 * MIB)
    for call in CALLS.values():
        with contextlib.suppress(CkptStoreError):
            call(store)
    assert not [name for _, _, headers in scripted.seen for name in headers if "copy-source" in name.lower()]


def test_a_completion_whose_answer_was_lost_is_found_by_asking(scripted):
    """The second try hears of no such upload, because the first one had completed it."""

    def completes(method):
        if method == "HEAD":
            return THERE
        first = sum(seen[0] == "POST" for seen in scripted.seen) == 2
        return None if first else (404, "NoSuchUpload")

    scripted.script = lambda method, path, _: multipart(method, path, completes)
    info = upload(opened(storage_options=scripted.options), 6 * MIB)
    assert (info.key, info.size, info.etag) == ("shard", 6 * MIB, "e-2")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ((404, "NoSuchKey"), OutcomeUnknownError),
        ((403, "AccessDenied"), OutcomeUnknownError),
        ((500, "InternalError"), OutcomeUnknownError),
        ((200, "", ("Content-Length", "5"), *THERE[3:]), IntegrityError),
    ],
)
def test_a_completion_that_cannot_be_seen_is_not_called_done(scripted, head, expected):
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: head if method == "HEAD" else (500, "InternalError")
    )
    with pytest.raises(CkptStoreError) as caught:
        upload(opened(storage_options=scripted.options), 6 * MIB)
    assert type(caught.value) is expected


def test_a_part_that_fails_ends_the_upload_and_nothing_is_completed(scripted):
    def script(method, path, _turn):
        if method == "PUT":
            return 500, "InternalError"
        return multipart(method, path, lambda _: (404, "NoSuchKey"))

    scripted.script = script
    with pytest.raises(UnavailableError):
        upload(opened(storage_options=scripted.options), 30 * MIB)
    assert not [path for method, path, _ in scripted.seen if method == "POST" and "uploads" not in path]


@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
@pytest.mark.parametrize("algorithm", ["CRC64NVME", None])
def test_every_body_carries_its_checksum_unless_told_not_to(scripted, size, algorithm):
    there = (*THERE[:2], ("Content-Length", str(size)), *THERE[3:])
    end = (206, "\0", ("Content-Range", "bytes 0-0/1"), *THERE[3:], ("Raw", ""))
    done = (200, "<CompleteMultipartUploadResult><ETag>e-2</ETag></CompleteMultipartUploadResult>")
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: {"HEAD": there, "GET": end}.get(method, done)
    )
    options = scripted.options | {"checksum_algorithm": algorithm}
    upload(opened(storage_options=options), size)
    bodies = [{name.lower(): value for name, value in h.items()} for method, _, h in scripted.seen if method == "PUT"]
    assert len(bodies) == (1 if size == 1 else 2)
    for headers in bodies:
        assert ("x-amz-checksum-crc64nvme" in headers) == (algorithm is not None)
        assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"  # the loopback is private


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "ckptstore.objectstore.via_obstore")
    with pytest.raises(UnsupportedError, match=r"pip install 'ckptstore\[s3\]'"):
        open_store(BUCKET)


def test_a_backslash_is_refused_because_some_servers_take_it_for_a_slash():
    with pytest.raises(InvalidInputError, match="backslash"):
        open_store("s3://bucket/a\\b")


@pytest.mark.servers
def test_parts_grow_so_that_an_object_has_at_most_the_allowed_number(s3_url, monkeypatch):
    monkeypatch.setattr(options, "MAX_PARTS", 3)
    info = upload(open_store(s3_url, transfer=PARTS), 31 * MIB)
    assert info.etag.endswith("-3")


@pytest.mark.servers
@pytest.mark.parametrize("name", ["run[lr=1e-4]", "a*", "q?x", "{x}", "step#5", "a b+c", "p%20q", "café", "~"])
def test_a_root_is_taken_literally(s3_url, seaweedfs, name):
    open_store(f"{s3_url}/axx").put("log/x", b"what a glob `a*` would find")
    store = open_store(f"{s3_url}/{name}/")
    store.put("log/0", b"x")
    assert [info.key for info in open_store(f"{s3_url}/{name}").list("")] == ["log/0"]
    key = f"{s3_url}/{name}/log/0".removeprefix(f"s3://{seaweedfs.bucket}/")
    assert seaweedfs.client().get_object(Bucket=seaweedfs.bucket, Key=key)["Body"].read() == b"x"


@pytest.mark.servers
def test_foreign_objects_do_not_break_a_listing(s3_url, seaweedfs):
    store = open_store(s3_url)
    prefix = s3_url.removeprefix(f"s3://{seaweedfs.bucket}/")
    store.put("log/000000000000.json", b"x")
    for key in ("log/", "data/", "log/a b?*[x]#%20"):
        seaweedfs.client().put_object(Bucket=seaweedfs.bucket, Key=f"{prefix}/{key}", Body=b"")
    assert [info.key for info in store.list("log/")] == ["log/000000000000.json", "log/a b?*[x]#%20"]


@pytest.mark.servers
def test_wrong_credentials_are_denied_and_never_absent(s3_url):
    store = open_store(s3_url, storage_options={"key": "nobody", "secret": HUSH})
    calls = [*CALLS.values(), lambda store: store.head("a"), lambda store: upload(store, 1)]
    for call in calls:
        with pytest.raises(AccessDeniedError):
            call(store)


@pytest.mark.servers
def test_a_bucket_that_does_not_exist_is_no_fresh_run(s3_url):
    store = open_store("s3://no-such-bucket/run")
    for call in (CALLS["get"], CALLS["list"], CALLS["create"], lambda store: store.head("a")):
        with pytest.raises(InvalidInputError, match="NoSuchBucket"):
            call(store)
