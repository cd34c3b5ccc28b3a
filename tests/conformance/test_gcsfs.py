"""Google Cloud Storage as it goes wrong: what it answers, what never arrives, and what must never be shown."""

import asyncio
import os
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
import traceback

import pytest
import trustme
from gcs_by_the_book import Gcs

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
from ckptstore.objectstore.gcs_options import GcsOptions, fill_from_environment, read_options
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.via_gcsfs import GcsfsStore
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.testing.conformance import StoreConformance
from ckptstore.units import MIB

HUSH = "hush-hush"
BUCKET = "/storage/v1/b/bucket"
QUICK = RetryOptions(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.02, stall_timeout_seconds=5)
PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=QUICK)

CALLS = {
    "get": lambda store: store.get("a", max_bytes=10),
    "get_range": lambda store: store.get_range("a", start=0, length=5),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("")),
    "create": lambda store: store.put("a", b"x", mode=PutMode.CREATE),
    "put": lambda store: store.put("a", b"x"),
    "delete": lambda store: store.delete("a"),
}


def opened(url, *, transfer=PARTS, **options):
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    return GcsfsStore(bucket, prefix, options=options, transfer=transfer)


@pytest.fixture
def gcs(monkeypatch):
    """A server that goes by the book, with faults."""
    with Gcs() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.fixture
def store(gcs):
    return opened("gs://bucket/run")


@pytest.mark.servers
class TestGcsfsOnFakeGcs(StoreConformance):
    tells_uploads = False

    @pytest.fixture
    def open_again(self, gs_url):
        return lambda: opened(gs_url)


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
        assert time.monotonic() - began < 5


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
    with pytest.raises(UnavailableError, match="not trusted"):
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


# Who we are.
def test_an_option_that_is_not_known_is_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"does not know: cache_timeout, tokn\..*Known are: project, token"):
        read_options({"tokn": HUSH, "cache_timeout": 1, "project": "p"})


@pytest.mark.parametrize(
    "options",
    [
        {"token": "/no/such/hush-hush.json"},
        {"token": "hush-hush.json"},
        {"token": "browser"},
        {"token": 7},
        {"token": ""},
        {"access": "all"},
        {"project": 7},
        {"requester_pays": 7},
        {"timeout": 0},
        {"session_kwargs": 7},
        {"endpoint_url": "ftp://x"},
        {"endpoint_url": "https://u:hush-hush@x"},
        {"endpoint_url": "http://:hush-hush@x"},
        {"endpoint_url": "https://x#hush-hush"},
        {"endpoint_url": "https://x/path"},
        {"endpoint_url": "HTTP://far.example"},
        {"endpoint_url": "http://far\n.example"},
        {"endpoint_url": "http://far.example\\@localhost"},
        {"endpoint_url": "http://far.example", "token": HUSH},
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_refused_without_being_shown(options):
    with pytest.raises(InvalidInputError) as caught:
        read_options(options)
    assert HUSH not in str(caught.value)


@pytest.mark.parametrize(
    "token",
    [{"type": "service_account", "private_key": HUSH}, {"refresh_token": HUSH}, {}],
    ids=["service account", "user", "empty"],
)
def test_credentials_that_make_no_sense_are_refused_without_being_shown(gcs, token):
    with pytest.raises(InvalidInputError, match="credentials make no sense") as caught:
        opened("gs://bucket", token=token).head("a")
    assert HUSH not in "".join(traceback.format_exception(caught.value))
    assert gcs.seen == []


def test_an_access_token_is_sent_to_the_endpoint_and_shown_nowhere(gcs, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # nobody else is asked about it
    store = opened("gs://bucket/run", token=HUSH)
    store.put("a", b"x")
    assert gcs.said_to_be == {f"Bearer {HUSH}"}
    again = pickle.loads(pickle.dumps(store))  # noqa: S301  (our own bytes)
    assert again.head("a").size == 1
    assert HUSH not in repr(store) + str(vars(store)["_client"]) + repr(GcsOptions(token=HUSH))


def test_a_file_with_credentials_is_read_when_it_is_needed(gcs, tmp_path):
    path = tmp_path / "key.json"
    path.write_text('{"type": "service_account"}')
    store = opened("gs://bucket", token=str(path))
    path.write_text("hush-hush")
    with pytest.raises(InvalidInputError, match="credentials make no sense"):
        store.head("a")


def test_an_emulator_of_the_environment_is_used_without_credentials():
    there = fill_from_environment(read_options({}), {"STORAGE_EMULATOR_HOST": "localhost:4443"})
    assert (there.endpoint_url, there.token) == ("http://localhost:4443", "anon")
    named = fill_from_environment(GcsOptions(endpoint_url="https://a", token=HUSH), {"STORAGE_EMULATOR_HOST": "b"})
    assert (named.endpoint_url, named.token) == ("https://a", HUSH)
    assert fill_from_environment(GcsOptions(), {}) == GcsOptions()


def test_whoever_pays_is_told_with_every_request(gcs):
    store = opened("gs://bucket", requester_pays="payer")
    with store.open_upload("a", size=6 * MIB) as upload:
        upload.write(bytes(6 * MIB))
        upload.complete()
    assert gcs.paid_by == {"payer"}


# Threads, loops and processes.
def test_a_store_can_be_used_where_a_loop_runs(gcs, store):
    async def work():
        store.put("a", b"x")
        return store.head("a").size

    assert asyncio.run(work()) == 1


def run(code, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GCSFS_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


PROCESS = """
    import os, signal, sys, threading, time
    from ckptstore.objectstore.via_gcsfs import GcsfsStore
    from ckptstore.options import TransferOptions
    bucket, _, prefix = sys.argv[1].removeprefix("gs://").partition("/")
    store = GcsfsStore(bucket, prefix, options={}, transfer=TransferOptions(part_bytes=5 << 20))
"""


@pytest.mark.servers
def test_a_process_ends_without_a_word_and_waits_for_no_grpc(gs_url):
    began = time.monotonic()
    assert run(PROCESS + "    store.put('a', b'x'); print(store.get('a', max_bytes=1))", gs_url) == (0, "b'x'\n")
    assert time.monotonic() - began < 30


@pytest.mark.servers
def test_a_forked_process_connects_anew_also_while_threads_are_at_work(gs_url):
    code = (
        PROCESS
        + """
    store.put("a", b"parent")
    stop = threading.Event()

    def work():
        while not stop.is_set():
            store.head("a")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(5):
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            store.put(f"{turn}", store.get("a", max_bytes=6))
            os._exit(0) if turn else sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
    print([info.key for info in store.list("")])
    """
    )
    assert run(code, gs_url) == (0, "['0', '1', '2', '3', '4', 'a']\n")


@pytest.mark.servers
def test_a_process_killed_in_the_middle_of_an_upload_publishes_nothing(gs_url):
    code = (
        PROCESS
        + """
    upload = store.open_upload("data/0/shard", size=11 << 20)
    upload.write(bytes(11 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    )
    assert run(code, gs_url)[0] == -signal.SIGKILL
    assert list(opened(gs_url).list("")) == []


# Names.
@pytest.mark.servers
@pytest.mark.parametrize("name", ["run[lr=1e-4]", "a*", "q?x", "step#5", "a b+c", "p%20q", "café", "~"])
def test_a_root_is_taken_literally(gs_url, fake_gcs, name):
    opened(f"{gs_url}/axx").put("log/x", b"what a glob `a*` would find")
    store = opened(f"{gs_url}/{name}")
    store.put("log/0", b"x")
    assert [info.key for info in store.list("")] == ["log/0"]
    prefix = gs_url.removeprefix(f"gs://{fake_gcs.bucket}/")
    assert fake_gcs.client().bucket(fake_gcs.bucket).blob(f"{prefix}/{name}/log/0").download_as_bytes() == b"x"


@pytest.mark.servers
def test_what_others_put_there_under_a_name_that_is_no_key_is_not_listed(gs_url, fake_gcs):
    prefix = gs_url.removeprefix(f"gs://{fake_gcs.bucket}/")
    for name in ("log/", "data/", "log/a b?*[x]#%20"):
        fake_gcs.client().bucket(fake_gcs.bucket).blob(f"{prefix}/{name}").upload_from_string(b"")
    assert [info.key for info in opened(gs_url).list("log/")] == ["log/a b?*[x]#%20"]
