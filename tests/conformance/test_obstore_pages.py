"""A proxy's pages and redirects, which obstore takes for answers of a store: what is believed of them."""

import contextlib
import itertools
import secrets
import time
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import pytest
from scripted import CALLS, PARTS, QUICK, THERE, answers, multipart, opened, upload

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    NotFoundError,
    OutcomeUnknownError,
    StalledError,
    UnavailableError,
)
from ckptstore.objectstore.port import PutMode
from ckptstore.units import MIB

PAGE = "<!DOCTYPE html><html><body>Please log in</body></html>"
REDIRECTS = [301, 302, 303, 307, 308]


def sent_on(scripted, status, method, *headers):
    """Let a server send requests of a method on to a page, which has headers of its own; else it stores nothing."""

    def script(asked, path, _turn):
        if path == "/page":
            return 200, PAGE, ("Content-Type", "text/html"), *headers
        if asked == method:
            return status, "", ("Location", f"{scripted.endpoint}/page"), ("Raw", "")
        return 404, "NoSuchKey"

    scripted.script = script


@pytest.mark.parametrize("headers", [THERE[3:], THERE[3:4], ()], ids=["as of an object", "an ETag", "no ETag"])
@pytest.mark.parametrize("call", ["create", "put"])
@pytest.mark.parametrize("status", REDIRECTS)
def test_a_put_that_is_sent_on_to_a_page_is_not_called_stored(scripted, status, call, headers):
    """obstore follows redirects. A record that was believed, and is nowhere, would be a lost commit (I5)."""
    sent_on(scripted, status, "PUT", *headers)
    with pytest.raises(OutcomeUnknownError):
        CALLS[call](opened(storage_options=scripted.options))
    assert ("/page" in [path for _, path, _ in scripted.seen]) == (status == 303)


@pytest.mark.parametrize("call", ["create", "put"])
@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ((200, "x", *THERE[3:]), None),
        ((200, "y", *THERE[3:]), OutcomeUnknownError),
        ((200, "xx", *THERE[3:]), OutcomeUnknownError),
        ((404, "NoSuchKey"), OutcomeUnknownError),
        ((403, "AccessDenied"), OutcomeUnknownError),
        ((500, "InternalError"), OutcomeUnknownError),
    ],
)
def test_a_put_whose_answer_does_not_name_its_bytes_is_read_back(scripted, call, there, expected):
    """Encryption by KMS, and other clouds, have other ETags."""
    scripted.script = lambda method, *_: (200, "", ("ETag", '"e"')) if method == "PUT" else there
    store = opened(storage_options=scripted.options)
    if expected is not None:
        with pytest.raises(expected):
            CALLS[call](store)
    else:
        assert CALLS[call](store).etag == "e"
        assert [method for method, _, _ in scripted.seen] == ["PUT", "GET"]


def test_an_empty_page_is_no_empty_object(scripted):
    scripted.script = lambda *_: (200, "", *THERE[3:])
    with pytest.raises(OutcomeUnknownError):
        opened(storage_options=scripted.options).put("a", b"", mode=PutMode.CREATE)


def uploads(head, get):
    """Answer like a server that takes uploads, and then answers HEAD and GET as it is told."""
    return lambda method, path, _turn: (
        {"HEAD": head, "GET": get}.get(method) or multipart(method, path, lambda _: (200, "<R><ETag>e-2</ETag></R>"))
    )


def whole(size, etag):
    return (*THERE[:2], ("Content-Length", str(size)), ("ETag", f'"{etag}"'), THERE[4])


def piece(body, start=0, *, of=None):
    said = ("Content-Range", f"bytes {start}-{start + len(body) - 1}/{of or start + len(body)}")
    return 206, [body], *THERE[3:], said, ("Content-Length", str(len(body)))


@pytest.mark.parametrize(
    ("get", "expected"),
    [
        (piece(b"\0" * 9), None),
        (piece(b"<html>..."), OutcomeUnknownError),
        (piece(b"\0" * 8), OutcomeUnknownError),
        (piece(b"\0" * 9, 1), OutcomeUnknownError),
        ((200, "<html>...", *THERE[3:]), OutcomeUnknownError),
        ((404, "NoSuchKey"), OutcomeUnknownError),
        ((500, "InternalError"), OutcomeUnknownError),
    ],
)
def test_an_upload_is_not_confirmed_by_a_page_of_its_size(scripted, get, expected):
    """A HEAD that is sent on to a page tells the size of the page. So the end of the object is looked at."""
    scripted.script = uploads(whole(9, "of a page"), get)
    store = opened(storage_options=scripted.options)
    if expected is not None:
        with pytest.raises(expected):
            upload(store, 9)
    else:
        assert upload(store, 9).etag == "of a page"


@pytest.mark.parametrize("size", [3, 6 * MIB], ids=["one request", "parts"])
def test_of_a_large_object_only_the_end_is_looked_at_and_not_even_that_where_its_name_says_enough(scripted, size):
    written = bytes(range(256)) * (size // 256) + b"end"
    tail = written[-1024:]
    for etag, asked in (("0x8D", ["HEAD", "GET"]), ("e-2", ["HEAD"] if size > 3 else ["HEAD", "GET"])):
        scripted.seen.clear()
        scripted.script = uploads(whole(len(written), etag), piece(tail, len(written) - len(tail)))
        with opened(storage_options=scripted.options).open_upload("shard", size=len(written)) as begun:
            for start in range(0, len(written), MIB + 1):
                begun.write(written[start : start + MIB + 1])
            begun.complete()
        last = [(method, headers.get("range")) for method, _, headers in scripted.seen if method in ("HEAD", "GET")]
        assert [method for method, _ in last] == asked
        assert {said for _, said in last[1:]} <= {f"bytes={len(written) - len(tail)}-{len(written) - 1}"}


class Bucket:
    """A bucket of S3 whose listings have pages of so many keys, some of which are pages of a proxy."""

    def __init__(self, scripted, keys, *, page=2, broken=lambda _query: False):
        self.keys, self.page, self.broken = keys, page, broken
        self.absent = (404, "NoSuchKey")
        scripted.script = self.answer

    def answer(self, _method, path, _turn):
        query = dict(parse_qsl(urlsplit(path).query))
        if "list-type" not in query:
            return self.absent
        if self.broken(query):
            return 200, PAGE
        after = query.get("continuation-token") or query.get("start-after", "").removeprefix("run/")
        keys = [key for key in self.keys if key > after]
        return listing(keys[: self.page], keys[self.page - 1] if len(keys) > self.page else None)


def listing(keys, token):
    of = "<Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag>"
    found = "".join(f"<Contents><Key>run/{key}</Key>{of}</Contents>" for key in keys)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    said = f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}{found}"
    return 200, f"<ListBucketResult><Name>bucket</Name>{said}</ListBucketResult>"


KEYS = ["a", "b", "c", "d", "e"]


def on_azure(scripted):
    said = {"account_name": "models", "sas_token": "sv=2024&sig=c2ln", "endpoint": f"{scripted.endpoint}/models"}
    return opened("az://container/run", storage_options=said)


def keys_of(scripted, *, retry=QUICK):
    store = opened(storage_options=scripted.options, transfer=replace(PARTS, retry=retry))
    return [info.key for info in store.list("")]


@pytest.mark.parametrize("page", [1, 2, 5, 1000])
def test_a_listing_whose_later_pages_are_a_proxys_is_gone_on_with(scripted, page):
    """What is broken off must never look whole: a checkpoint would be missing."""
    Bucket(scripted, KEYS, page=page, broken=lambda query: "continuation-token" in query)
    assert keys_of(scripted) == KEYS


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("until", [1, 2, 3])
def test_a_listing_that_is_a_proxys_now_and_then_is_whole(scripted, page, until):
    turns = itertools.count()
    Bucket(scripted, KEYS, page=page, broken=lambda _query: next(turns) == until)
    assert keys_of(scripted) == KEYS


def test_a_listing_is_not_believed_of_who_does_not_name_what_is_absent(scripted):
    bucket = Bucket(scripted, KEYS, broken=lambda query: len(query) > 2)
    bucket.absent = (200, PAGE, *THERE[3:])
    with pytest.raises(UnavailableError, match="none of an object store"):
        keys_of(scripted)


def test_a_listing_is_not_believed_of_who_begins_from_the_front_again(scripted):
    bucket = Bucket(scripted, KEYS, broken=lambda query: "continuation-token" in query)
    scripted.script = lambda method, path, turn: bucket.answer(method, path.replace("start-after", "x"), turn)
    with pytest.raises(UnavailableError, match="begin after"):
        keys_of(scripted)


def test_what_is_written_while_it_is_listed_may_come_too(scripted):
    bucket = Bucket(scripted, ["a", "b"])
    bucket.broken = lambda _query: bucket.keys.append("c") if len(scripted.seen) == 2 else False
    assert keys_of(scripted) == ["a", "b", "c"]


@pytest.mark.parametrize("keys", [[], ["a"]], ids=["empty", "the same"])
def test_a_listing_that_never_ends_is_given_up(scripted, keys):
    """Two tokens, one after the other, for ever."""
    scripted.script = lambda _method, _path, turn: listing(keys, f"t{turn % 2}")
    began = time.monotonic()
    with pytest.raises((StalledError, UnavailableError), match=r"no end|again and again"):
        keys_of(scripted, retry=replace(QUICK, attempts=1, deadline_seconds=1.0, stall_timeout_seconds=1.0))
    assert time.monotonic() - began < 20
    asked = len(scripted.seen)
    time.sleep(0.5)
    assert len(scripted.seen) <= asked + 1


def test_a_page_is_no_listing_of_azure_either(scripted):
    scripted.script = lambda *_: (200, PAGE)
    with pytest.raises(UnavailableError):
        list(on_azure(scripted).list(""))


def test_what_the_server_calls_absent_is_deleted(scripted):
    scripted.script = answers(404, "NoSuchKey")
    opened(storage_options=scripted.options).delete("a")


@pytest.mark.parametrize("status", [404, 502])
def test_what_a_page_calls_absent_may_still_be_there(scripted, status):
    scripted.script = lambda *_: (status, PAGE, ("Raw", ""), ("Content-Type", "text/html"))
    for store in (opened(storage_options=scripted.options), on_azure(scripted)):
        with pytest.raises(OutcomeUnknownError):
            store.delete("a")


@pytest.mark.parametrize(("status", "expected"), [(202, None), (404, None), (403, AccessDeniedError)])
def test_azure_says_in_an_answer_to_a_batch_what_became_of_a_delete(scripted, status, expected):
    inner = f"Content-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 {status} Said\r\n\r\n"
    scripted.script = lambda *_: (202, f"--b\r\n{inner}--b--", ("Content-Type", "multipart/mixed; boundary=b"))
    with contextlib.nullcontext() if expected is None else pytest.raises(expected):
        on_azure(scripted).delete("a")


@pytest.mark.parametrize("get", [(200, "", *THERE[3:]), (200, "x", *THERE[3:])], ids=["empty", "one"])
@pytest.mark.parametrize("absences", [1, 2, 9])
def test_what_is_absent_for_a_head_and_there_for_a_get_is_not_called_absent(scripted, get, absences):
    def script(method, _path, _turn):
        if method == "GET":
            return get
        asked = sum(method == "HEAD" for method, _, _ in scripted.seen)
        return (404, "") if asked <= absences else whole(6, "e")

    scripted.script = script
    store = opened(storage_options=scripted.options, transfer=replace(PARTS, retry=replace(QUICK, attempts=1)))
    if absences == 1:
        assert store.head("a").size == 6
    else:
        with pytest.raises(UnavailableError):
            store.head("a")
        assert [method for method, _, _ in scripted.seen] == ["HEAD", "GET", "HEAD"]


@pytest.mark.servers
@pytest.mark.parametrize("name", ["seaweedfs", "moto_server"])
@pytest.mark.parametrize("body", [b"", b"x", bytes(8 * MIB + 1)], ids=["empty", "one", "8 MiB"])
@pytest.mark.parametrize("mode", PutMode)
def test_a_put_is_one_request_where_the_server_names_its_bytes(request, proxied, name, body, mode):
    server = request.getfixturevalue(name)
    proxy = proxied(server)
    store = opened(server.url(f"once/{secrets.token_hex(8)}"), storage_options=server.options(proxy.endpoint))
    store.put("a", body, mode=mode)
    assert [(seen.method, seen.status) for seen in proxy.seen] == [("PUT", 200)]
    assert store.get("a", max_bytes=len(body)) == body


@pytest.mark.parametrize("status", [200, 302, 403, 404, 407, 502])
@pytest.mark.parametrize("call", ["get", "list", "create"])
def test_a_web_page_is_no_answer_of_a_store(scripted, status, call):
    """A proxy's page must be neither an absent object nor an empty log: the run would look like a fresh one."""
    scripted.script = lambda *_: (status, PAGE, ("Raw", ""), ("Content-Type", "text/html"))
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](opened(storage_options=scripted.options))
    assert not isinstance(caught.value, NotFoundError | AlreadyExistsError)
    assert "log in" not in str(caught.value)
