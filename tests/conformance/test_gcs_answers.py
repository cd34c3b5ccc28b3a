"""What answers of Google Cloud Storage mean, and what never arrives."""

import json
import socket
import ssl
import time
import traceback

import pytest
import trustme
from gcs_cases import BUCKET, CALLS, HUSH, opened

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
from ckptstore.objectstore.port import PutMode
from ckptstore.options import RetryOptions, TransferOptions


@pytest.fixture
def store(gcs):
    return opened("gs://bucket/run")


# What servers answer.
@pytest.mark.parametrize(
    ("status", "reason", "call", "expected"),
    [
        (404, "notFound", "get", NotFoundError),
        (404, "notFound", "head", NotFoundError),
        (404, "notFound", "list", InvalidInputError),
        (404, "notFound", "create", InvalidInputError),
        (403, "forbidden", "get", AccessDeniedError),
        (403, "forbidden", "list", AccessDeniedError),
        (403, "forbidden", "create", AccessDeniedError),
        (403, "userRateLimitExceeded", "create", UnavailableError),
        (401, "authError", "delete", AccessDeniedError),
        (412, "conditionNotMet", "create", AlreadyExistsError),
        (409, "conflict", "create", AlreadyExistsError),
        (416, "requestedRangeNotSatisfiable", "get_range", IntegrityError),
        (400, "required", "get", InvalidInputError),
        (429, "rateLimitExceeded", "put", UnavailableError),
        (429, "rateLimitExceeded", "get", UnavailableError),
        (503, "backendError", "get", UnavailableError),
        (503, "backendError", "create", OutcomeUnknownError),
        (500, "internalError", "put", OutcomeUnknownError),
        (502, "", "delete", OutcomeUnknownError),
        (408, "", "list", UnavailableError),
        (0, "", "get", UnavailableError),
        (0, "", "list", UnavailableError),
        (0, "", "create", OutcomeUnknownError),
        (0, "", "put", OutcomeUnknownError),
        (0, "", "delete", OutcomeUnknownError),
    ],
)
def test_answers_mean_what_the_table_says_and_are_asked_for_once(gcs, store, status, reason, call, expected):
    store._check_bucket(store._request("GET", "a"))
    gcs.refuse = lambda _method, _path: (status, reason)
    gcs.seen.clear()
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](store)
    assert type(caught.value) is expected
    assert HUSH not in "".join(traceback.format_exception(caught.value))
    assert len(gcs.seen) == 1 if status or call in ("create", "put") else len(gcs.seen) <= 2


PAGE = (b"<html>hush-hush</html>", {"Content-Type": "text/html; charset=UTF-8"})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (404, *PAGE),
        (404, b"", {}),
        (404, b"Not Found\n", {"Content-Type": "text/plain"}),
        (404, b'{"error": "not found"}', {"Content-Type": "application/json"}),
        (404, b'{"error": {"code": 404, "errors": []}}', {"Content-Type": "application/json"}),
        (404, b'{"error": {"code": 404, "errors": [{"reason": "hush-hush"}]}}', {"Content-Type": "application/json"}),
        (404, b"[" + b" " * 70_000, {"Content-Type": "application/json"}),
        (200, *PAGE),
    ],
    ids=["page", "empty", "text", "other JSON", "no reason", "other reason", "huge", "success"],
)
def test_what_something_else_answers_is_neither_absence_nor_success(gcs, store, status, body, headers, call):
    store.put("a", b"x")
    gcs.refuse = lambda _method, _path: (status, body, headers)
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](store)
    expected = OutcomeUnknownError if call in ("create", "put", "delete") else UnavailableError
    assert type(caught.value) is expected
    assert HUSH not in "".join(traceback.format_exception(caught.value))
    assert "NO_PROXY" in caught.value.hint
    gcs.refuse = lambda _method, _path: None
    assert gcs.objects == {"run/a": b"x"}


@pytest.mark.parametrize("call", CALLS)
def test_a_page_instead_of_a_bucket_is_no_missing_one(gcs, store, call):
    gcs.refuse = lambda _method, _path: (404, *PAGE)
    with pytest.raises(UnavailableError, match=r"404 by something that is not Google's storage.*NO_PROXY"):
        CALLS[call](store)


def test_whether_an_object_is_absent_is_asked_of_its_metadata(gcs, store):
    for call in ("get", "get_range"):
        gcs.seen.clear()
        with pytest.raises(NotFoundError):
            CALLS[call](store)
        assert [method for method, path, _ in gcs.seen if path != BUCKET] == ["GET", "GET"]
    gcs.objects["run/a"] = b"12345"
    pages = [(404, *PAGE)]
    gcs.refuse = lambda _method, _path: pages.pop() if pages else None
    with pytest.raises(UnavailableError, match="404 by something"):
        store.get("a", max_bytes=10)
    assert store.get("a", max_bytes=10) == b"12345"


def test_an_object_that_is_a_web_page_can_be_read(gcs, store):
    gcs.objects["run/a"] = b"x"
    store.head("a")
    gcs.refuse = lambda _method, _path: (200, PAGE[0], PAGE[1] | {"X-Goog-Generation": "1"})
    assert store.get("a", max_bytes=100) == PAGE[0]


def test_a_server_that_asks_to_be_left_alone_says_for_how_long(gcs, store):
    gcs.refuse = lambda _method, _path: (429, "rateLimitExceeded", {"Retry-After": "7"})
    with pytest.raises(UnavailableError) as caught:
        store.head("a")
    assert caught.value.facts["retry_after_seconds"] == 7


def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        retry = RetryOptions(stall_timeout_seconds=0.3)
        store = opened(
            "gs://bucket",
            transfer=TransferOptions(retry=retry),
            endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="no answer in time"):
            store.head("a")
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://nowhere.invalid"])
def test_what_never_left_did_not_happen(call, endpoint):
    with pytest.raises(UnavailableError, match=r"no connection|no address|DNS"):
        CALLS[call](opened("gs://bucket", endpoint_url=endpoint))


def test_a_certificate_that_nobody_vouches_for_is_not_accepted(gcs):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    gcs.socket = context.wrap_socket(gcs.socket, server_side=True)
    store = opened("gs://bucket", endpoint_url=gcs.endpoint.replace("http:", "https:"), token="anon")  # noqa: S106  (nobody)
    with pytest.raises(InvalidInputError, match="not trusted"):
        store.put("a", b"x", mode=PutMode.CREATE)


# The bucket.
@pytest.mark.parametrize("call", CALLS)
def test_a_bucket_that_does_not_exist_is_no_fresh_run(gcs, store, call):
    gcs.bucket = None
    with pytest.raises(InvalidInputError, match=r"NoSuchBucket.*create the bucket"):
        CALLS[call](store)


@pytest.mark.servers
def test_a_bucket_is_never_created(gs_url, fake_gcs):
    store = opened("gs://no-such-bucket/run")
    for call in (*CALLS.values(), lambda store: store.open_upload("a", size=1)):
        with pytest.raises(InvalidInputError, match="NoSuchBucket"):
            call(store)
    assert [bucket.name for bucket in fake_gcs.client().list_buckets()] == [fake_gcs.bucket]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tells", ["bucket", "layout"])
def test_a_zonal_bucket_is_refused_because_a_create_may_overwrite_there(gcs, store, call, tells):
    if tells == "layout":
        gcs.refuse = lambda _method, path: (403, "forbidden") if path == BUCKET else None
    gcs.bucket = gcs.layout = {"locationType": "zone"}
    with pytest.raises(UnsupportedError, match=r"zonal bucket.*regional"):
        CALLS[call](store)
    assert {method for method, _, _ in gcs.seen} == {"GET"}


def test_a_bucket_whose_metadata_nobody_may_read_can_be_used_and_is_asked_about_once(gcs, store):
    gcs.refuse = lambda _method, path: (403, "forbidden") if path.startswith(BUCKET) and "/o" not in path else None
    for _ in range(3):
        store.put("a", b"x")
    assert [path for _, path, _ in gcs.seen] == [BUCKET, f"{BUCKET}/storageLayout"] + [f"/upload{BUCKET}/o"] * 3


# Listings.
def item(name):
    return {"name": f"run/{name}", "size": "1", "timeCreated": "2026-01-02T03:04:05Z"}


def page(*names, then=None):
    return {"kind": "storage#objects", "items": list(map(item, names))} | ({"nextPageToken": then} if then else {})


@pytest.mark.parametrize("page_keys", [1, 2, 7, 1000])
def test_a_listing_has_as_many_pages_as_it_needs(gcs, store, page_keys):
    gcs.page_keys = page_keys
    gcs.objects = {f"run/{name}": b"x" for name in ("log/10", "log/9", "log-", "log/a/b", "é", "log//x", "a", "log/")}
    assert [info.key for info in store.list("")] == ["a", "log-", "log/10", "log/9", "log/a/b", "é"]
    assert [info.key for info in store.list("log/", after="log/10")] == ["log/9", "log/a/b"]


def test_a_page_with_nothing_in_it_is_not_the_end(gcs, store):
    pages = {None: page("a", then="1"), "1": page(then="2"), "2": page(then="3"), "3": page("b")}
    gcs.listing = lambda query: pages[query.get("pageToken")]
    assert [info.key for info in store.list("")] == ["a", "b"]


@pytest.mark.parametrize(
    "listing",
    [
        lambda _: page("a", then="1"),
        lambda query: page("a", then="2") if query.get("pageToken") == "1" else page("b", then="1"),
        lambda query: page(then="2" if query.get("pageToken") == "1" else "1"),
        lambda query: page("a" if "pageToken" in query else "b", then="" if "pageToken" in query else "1"),
        lambda _: page("b", "a"),
        lambda _: page("a", "a"),
        lambda _: page("a") | {"items": [item("a") | {"name": "other/a"}]},
        lambda _: page("a", then=7),
        lambda _: page("a") | {"items": {"name": "run/a"}},
        lambda _: page("a") | {"items": ["run/a"]},
        lambda _: page("a") | {"items": [{"name": 7}]},
        lambda _: page("a") | {"items": [{"name": "run/a"}]},
        lambda _: {},
        lambda _: {"kind": "storage#object"},
    ],
    ids=[
        "the same page",
        "two pages in turn",
        "empty pages",
        "back",
        "down",
        "twice",
        "elsewhere",
        "no token",
        "no list",
        "no description",
        "no name",
        "no size",
        "nothing",
        "something else",
    ],
)
def test_a_listing_that_makes_no_sense_ends_and_is_none(gcs, store, listing):
    gcs.listing = listing
    with pytest.raises(UnavailableError, match="makes no sense"):
        store.list("")
    assert len(gcs.seen) <= 110


@pytest.mark.parametrize("mode", PutMode)
@pytest.mark.parametrize("said", [{"name": "run/other"}, {"crc32c": "AAAAAA=="}, {"size": "7"}], ids=str)
def test_a_put_that_is_answered_with_another_object_is_not_called_stored(gcs, store, mode, said):
    """On a kept connection that is out of step; else the log gets a hole, and nobody is told."""
    store.put("a", b"record")
    described = json.dumps(gcs.described("run/a") | said).encode()
    gcs.refuse = lambda _method, _path: (200, described, {"Content-Type": "application/json"})
    with pytest.raises(OutcomeUnknownError, match="something else"):
        store.put("a", b"record", mode=mode)
