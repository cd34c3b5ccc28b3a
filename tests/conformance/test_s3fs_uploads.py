"""s3:// through s3fs as uploads go wrong: parts that fail, publications in doubt, and how much is held."""

import base64
import re
import threading
import time
import tracemalloc

import pytest
from scripted import BUCKET, COMPLETED, multipart, sized, upload

from ckptstore.errors import (
    IntegrityError,
    InvalidInputError,
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


def store_at(server, *, retry=ONCE, **options):
    return open_store(
        BUCKET,
        engine="s3fs",
        storage_options=server.options | options,
        transfer=TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=retry),
    )


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
