"""s3:// through s3fs: what a server's answer must hold before it is believed."""

import pytest
from scripted import BUCKET, CALLS, THERE, answers, md5, multipart, sized, upload

from ckptstore.errors import NotFoundError, OutcomeUnknownError, UnavailableError
from ckptstore.objectstore.port import PendingUpload, PutMode
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

ONCE = TransferOptions(part_bytes=5 * MIB, retry=RetryOptions(attempts=1, stall_timeout_seconds=5))
TWICE = TransferOptions(part_bytes=5 * MIB, retry=RetryOptions(attempts=2, first_pause_seconds=0.01))


def store_at(server, transfer=ONCE):
    return open_store(BUCKET, engine="s3fs", storage_options=server.options, transfer=transfer)


EMPTY = {
    "200": answers(200, ""),
    "204": answers(204, ""),
    "200 of a page": answers(200, "", ("Content-Type", "text/html")),
}


@pytest.mark.parametrize("script", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("call", [*CALLS, "head"])
def test_a_success_without_a_word_of_s3_is_no_success(scripted, call, script):
    """So answers a load balancer that was told to answer, and keeps nothing."""
    scripted.script = script
    expected = OutcomeUnknownError if call in ("create", "put", "delete") else UnavailableError
    with pytest.raises(expected, match="not S3"):
        store_at(scripted).head("a") if call == "head" else CALLS[call](store_at(scripted))


@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
def test_a_publication_answered_without_a_word_of_s3_is_looked_at(scripted, size):
    def published(method, path):
        return method == "PUT" if size == 1 else method == "POST" and "uploads" not in path

    for head, expected in ((sized(size), None), ((404, "NoSuchKey"), OutcomeUnknownError)):
        scripted.script = lambda method, path, _, head=head: (
            (200, "") if published(method, path) else multipart(method, path, lambda _: head)
        )
        if expected is None:
            assert upload(store_at(scripted, TWICE), size).size == size
        else:
            with pytest.raises(expected, match="not S3"):
                upload(store_at(scripted, TWICE), size)


@pytest.mark.parametrize("said", [{"ETag": '"e"'}, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}], ids=str)
def test_an_object_is_believed_by_its_etag_or_its_time(scripted, said):
    """Some gateways give no ETag to what they hold."""
    scripted.script = lambda *_: (200, "12345", ("Content-Length", "5"), *said.items())
    store = store_at(scripted)
    assert store.get("a", max_bytes=5) == b"12345"
    assert store.head("a").size == 5


def test_a_page_with_an_etag_is_no_object(scripted):
    """A web server names and dates its files, too."""
    headers = (("Content-Type", "text/html"), ("ETag", '"e"'), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"))
    scripted.script = answers(200, "<html>", *headers)
    with pytest.raises(UnavailableError, match="not S3"):
        store_at(scripted).get("a", max_bytes=10)
    scripted.script = answers(200, "<html>", *headers, ("x-amz-request-id", "1"))
    assert store_at(scripted).get("a", max_bytes=10) == b"<html>"


@pytest.mark.parametrize("name", ["x-amz-request-id", "x-amzn-requestid"])
def test_a_deletion_that_s3_confirms_is_one_request(scripted, name):
    scripted.script = answers(204, "", (name, "1"))
    store = store_at(scripted)
    store.delete("a")
    store.abort_upload(PendingUpload("a", "u1", None))
    assert [method for method, _, _ in scripted.seen] == ["DELETE", "DELETE"]


def test_a_deletion_that_nobody_signed_is_looked_at(scripted):
    """S3-compatible servers need not number their answers."""
    scripted.script = lambda method, *_: (204, "") if method == "DELETE" else (404, "NoSuchKey")
    store_at(scripted).delete("a")
    scripted.script = lambda method, *_: (204, "") if method == "DELETE" else THERE
    with pytest.raises(OutcomeUnknownError, match="not S3"):
        store_at(scripted).delete("a")


def test_an_upload_that_nobody_signed_off_is_looked_at(scripted):
    left = PendingUpload("a", "u1", None)
    scripted.script = lambda method, *_: (204, "") if method == "DELETE" else (404, "NoSuchUpload")
    store_at(scripted).abort_upload(left)
    parts = "<ListPartsResult><Bucket>bucket</Bucket><UploadId>u1</UploadId></ListPartsResult>"
    scripted.script = lambda method, *_: (204, "") if method == "DELETE" else (200, parts)
    with pytest.raises(OutcomeUnknownError, match="not S3"):
        store_at(scripted).abort_upload(left)


def test_what_is_absent_for_a_head_and_there_for_a_get_is_not_absent(scripted):
    scripted.script = lambda method, *_: (404, "") if method == "HEAD" else THERE
    with pytest.raises(UnavailableError, match="contradicts itself"):
        store_at(scripted).head("a")
    assert [method for method, _, _ in scripted.seen] == ["HEAD", "GET", "HEAD"]
    scripted.script = lambda method, *_: (404, "") if method == "HEAD" else (416, "InvalidRange")
    with pytest.raises(UnavailableError, match="contradicts itself"):
        store_at(scripted).head("a")


def test_what_is_stored_between_a_head_and_a_get_is_there(scripted):
    scripted.script = lambda _method, _path, turn: (404, "") if turn == 0 else THERE
    assert store_at(scripted).head("a").size == 6 * MIB


def test_what_is_deleted_while_it_is_looked_at_is_absent_the_next_time(scripted):
    scripted.script = lambda _method, _path, turn: THERE if turn == 1 else (404, "NoSuchKey")
    with pytest.raises(NotFoundError):
        store_at(scripted, TWICE).head("a")


@pytest.mark.parametrize("later", [(412, "PreconditionFailed"), (409, "OperationAborted"), (403, "AccessDenied")])
@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
def test_once_a_publication_is_in_doubt_no_later_answer_settles_it(scripted, size, later):
    """By the same rule as what is overwritten: only the object itself can."""
    said = []

    def script(method, path, _turn):
        if method == "PUT" if size == 1 else method == "POST" and "uploads" not in path:
            said.append(later)
            return later if len(said) > 1 else None
        return multipart(method, path, lambda _: (404, "NoSuchKey"))

    scripted.script = script
    with pytest.raises(OutcomeUnknownError, match=later[1]):
        upload(store_at(scripted, TWICE), size)


def test_an_upload_that_the_server_forgot_is_not_completed_again_and_again(scripted):
    said = []
    scripted.script = lambda method, path, _: multipart(
        method, path, lambda method: said.append(method) or (404, "NoSuchUpload" if method == "POST" else "NoSuchKey")
    )
    with pytest.raises(OutcomeUnknownError, match="NoSuchUpload"):
        upload(store_at(scripted, TWICE), 6 * MIB)
    assert said.count("POST") == 1


ANOTHERS = (200, "", ("ETag", f'"{md5(b"another object")}"'))
"""On a kept connection that is out of step, this is the answer to another request."""


@pytest.mark.parametrize("mode", PutMode)
@pytest.mark.parametrize(
    "there",
    [(404, "NoSuchKey"), (200, "other", ("ETag", '"e"')), (200, "record, and more", ("ETag", '"e"')), (403, "Denied")],
    ids=["nothing", "another", "a longer one", "refused"],
)
def test_a_put_that_is_answered_with_anothers_etag_is_not_called_stored(scripted, mode, there):
    """Else the log gets a hole, and nobody is told."""
    scripted.script = lambda method, *_: ANOTHERS if method == "PUT" else there
    with pytest.raises(OutcomeUnknownError, match="may or may not be there"):
        store_at(scripted).put("a", b"record", mode=mode)
    assert [method for method, _, _ in scripted.seen] == ["PUT", "GET"]


def test_a_put_whose_etag_says_nothing_is_read_back_once_and_believed(scripted):
    """With a key of KMS, or one's own, an ETag is no MD5."""
    scripted.script = lambda method, *_: ANOTHERS if method == "PUT" else (200, "record", ("ETag", '"e"'))
    assert store_at(scripted).put("a", b"record").size == 6
    assert [method for method, _, _ in scripted.seen] == ["PUT", "GET"]


def test_a_put_that_names_the_bodys_md5_is_one_request(scripted):
    scripted.script = answers(200, "", ("ETag", f'"{md5(b"record")}"'))
    assert store_at(scripted).put("a", b"record").etag == md5(b"record")
    assert [method for method, _, _ in scripted.seen] == ["PUT"]


def test_a_small_upload_that_is_answered_with_anothers_etag_is_looked_at(scripted):
    scripted.script = lambda method, *_: ANOTHERS if method == "PUT" else (404, "NoSuchKey")
    with pytest.raises(OutcomeUnknownError, match="cannot be seen"):
        upload(store_at(scripted), 6)
    scripted.script = lambda method, *_: ANOTHERS if method == "PUT" else sized(6)
    assert upload(store_at(scripted), 6).size == 6


def refusal(status, inside):
    """Return a refusal of S3 with more than a code in it."""
    return status, f"<Error>{inside}</Error>", ("Raw", ""), ("Content-Type", "application/xml")


READS = {
    "get": CALLS["get"],
    "get_range": CALLS["get_range"],
    "head": lambda store: store.head("a"),
}


@pytest.mark.parametrize("call", READS)
@pytest.mark.parametrize(
    "code",
    ["NoSuchTenant", "NoSuchAccessPoint", "NoSuchWebsiteConfiguration", "NoSuchVersion", "NoSuchUpload", "NotFound"],
)
def test_that_something_else_is_missing_is_no_absence_of_the_object(scripted, call, code):
    """Else a run's log looks shorter than it is."""
    scripted.script = answers(404, code)
    with pytest.raises(UnavailableError, match=rf"404 {code}.*Something else than the object"):
        READS[call](store_at(scripted))


@pytest.mark.parametrize("call", [*READS, "delete"])
def test_the_absence_of_another_object_is_no_absence_of_this_one(scripted, call):
    """On a kept connection that is out of step, this is the answer to another request."""
    calls = READS | {"delete": CALLS["delete"]}
    for other in ("other/key", "run/b", "n/a", "run/a/b"):
        scripted.script = answers(*refusal(404, f"<Code>NoSuchKey</Code><Key>{other}</Key>"))
        with pytest.raises(OutcomeUnknownError if call == "delete" else UnavailableError, match="not S3"):
            calls[call](store_at(scripted))


@pytest.mark.parametrize("spelled", ["run/a", "/run/a", "/bucket/run/a", "run%2Fa", ""])
def test_an_absence_is_believed_however_the_server_spells_the_key(scripted, spelled):
    scripted.script = answers(*refusal(404, f"<Code>NoSuchKey</Code><Key>{spelled}</Key>"))
    for call in READS.values():
        with pytest.raises(NotFoundError, match="NoSuchKey"):
            call(store_at(scripted))
    CALLS["delete"](store_at(scripted))


@pytest.mark.parametrize(
    ("call", "status"), [("get", 404), ("list", 404), ("list", 200), ("create", 404), ("create", 200)]
)
def test_an_answer_without_end_is_not_read_to_its_end(scripted, call, status):
    sent = []

    def endless():
        yield b"<Error><Code>NoSuchKey</Code><Message>"
        for _ in range(200):
            sent.append(MIB)
            yield bytes(MIB)

    scripted.script = lambda *_: (status, endless(), ("Raw", ""), ("Content-Length", str(400 * MIB)), ("ETag", '"e"'))
    with pytest.raises(OutcomeUnknownError if call == "create" else UnavailableError, match="connection broke"):
        CALLS[call](store_at(scripted))
    assert sum(sent) < 60 * MIB
