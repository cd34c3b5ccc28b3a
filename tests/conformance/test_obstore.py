"""S3 as it goes wrong: what servers answer, what never arrives, and what must never be shown."""

import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from datetime import timedelta

import pytest
from scripted import BUCKET, CALLS, HUSH, PARTS, THERE, answers, multipart, upload

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
from ckptstore.objectstore import via_obstore
from ckptstore.objectstore.credentials import fill_from_environment
from ckptstore.objectstore.s3_options import S3Options
from ckptstore.objectstore.urls import open_store
from ckptstore.units import MIB


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing is tried more often than once again, and nothing takes long."""
    quick = timedelta(seconds=5)
    monkeypatch.setattr(via_obstore, "_CREATE", via_obstore._Patience(quick, 0, quick))
    monkeypatch.setattr(via_obstore, "_SMALL", via_obstore._Patience(quick, 1, quick))
    monkeypatch.setattr(via_obstore, "_BULK", via_obstore._Patience(quick * 2, 1, quick))


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
    ],
)
def test_every_answer_becomes_one_error_of_ours(scripted, status, code, call, expected):
    scripted.script = answers(status, code)
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](open_store(BUCKET, storage_options=scripted.options))
    assert type(caught.value) is expected
    assert code in str(caught.value)
    assert BUCKET in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_no_dump_and_no_secret_is_ever_shown(scripted, call):
    scripted.script = answers(500, "InternalError")
    store = open_store(BUCKET, storage_options=scripted.options | {"token": HUSH})
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](store)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.facts) + repr(store) + store.url
    for never in (HUSH, "Debug source", "RetryError", "<Error>"):
        assert never not in shown


@pytest.mark.parametrize("call", CALLS)
def test_no_answer_means_unknown_for_a_write_and_try_again_for_a_read(scripted, call):
    scripted.script = lambda *_: None
    expected = OutcomeUnknownError if call in ("create", "put") else UnavailableError
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](open_store(BUCKET, storage_options=scripted.options))
    assert type(caught.value) is expected


def test_a_create_is_sent_once_so_that_its_answer_means_something(scripted):
    """A client that sent it again would meet its own landed write, and call it a lost race (I5)."""
    scripted.script = lambda _method, _path, turn: (500, "InternalError") if turn == 0 else (412, "PreconditionFailed")
    with pytest.raises(OutcomeUnknownError):
        CALLS["create"](open_store(BUCKET, storage_options=scripted.options))
    ((method, _, headers),) = scripted.seen
    assert (method, headers["if-none-match"]) == ("PUT", "*")


def test_what_a_second_try_answers_proves_nothing_about_the_first(scripted):
    """The first may have been carried out: a denial afterwards is no 'did not happen' (I5)."""
    scripted.script = lambda _method, _path, turn: (500, "InternalError") if turn == 0 else (403, "AccessDenied")
    with pytest.raises(OutcomeUnknownError):
        CALLS["put"](open_store(BUCKET, storage_options=scripted.options))
    assert len(scripted.seen) >= 2


def test_nobody_listening_means_that_a_create_did_not_happen():
    options = {"key": "k", "secret": HUSH, "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(UnavailableError, match="no answer"):
        CALLS["create"](open_store(BUCKET, storage_options=options))


def test_a_server_that_never_answers_is_given_up(scripted, monkeypatch):
    short = timedelta(seconds=1)
    monkeypatch.setattr(via_obstore, "_CREATE", via_obstore._Patience(short, 0, short))
    stop = threading.Event()
    scripted.script = lambda *_: stop.wait(30) and None
    began = time.monotonic()
    try:
        with pytest.raises(OutcomeUnknownError):
            CALLS["create"](open_store(BUCKET, storage_options=scripted.options))
    finally:
        stop.set()
    assert 0.9 < time.monotonic() - began < 5


def test_a_completion_whose_answer_was_lost_is_found_by_asking(scripted):
    """The second try hears of no such upload, because the first one had completed it."""

    def completes(method):
        if method == "HEAD":
            return THERE
        first = sum(seen[0] == "POST" for seen in scripted.seen) == 2
        return None if first else (404, "NoSuchUpload")

    scripted.script = lambda method, path, _: multipart(method, path, completes)
    info = upload(open_store(BUCKET, storage_options=scripted.options, transfer=PARTS), 6 * MIB)
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
        upload(open_store(BUCKET, storage_options=scripted.options, transfer=PARTS), 6 * MIB)
    assert type(caught.value) is expected


def test_a_part_that_fails_ends_the_upload_and_nothing_is_completed(scripted):
    def script(method, path, _turn):
        if method == "PUT":
            return 500, "InternalError"
        return multipart(method, path, lambda _: (404, "NoSuchKey"))

    scripted.script = script
    with pytest.raises(OutcomeUnknownError):
        upload(open_store(BUCKET, storage_options=scripted.options, transfer=PARTS), 30 * MIB)
    assert not [path for method, path, _ in scripted.seen if method == "POST" and "uploads" not in path]


@pytest.mark.parametrize("size", [1, 6 * MIB], ids=["one request", "parts"])
@pytest.mark.parametrize("algorithm", ["CRC64NVME", None])
def test_every_body_carries_its_checksum_unless_told_not_to(scripted, size, algorithm):
    scripted.script = lambda method, path, _: multipart(
        method,
        path,
        lambda method: (
            (*THERE[:2], ("Content-Length", str(size)), *THERE[3:])
            if method == "HEAD"
            else (200, "<CompleteMultipartUploadResult><ETag>e-2</ETag></CompleteMultipartUploadResult>")
        ),
    )
    options = scripted.options | {"checksum_algorithm": algorithm}
    upload(open_store(BUCKET, storage_options=options, transfer=PARTS), size)
    bodies = [{name.lower(): value for name, value in h.items()} for method, _, h in scripted.seen if method == "PUT"]
    assert len(bodies) == (1 if size == 1 else 2)
    for headers in bodies:
        assert ("x-amz-checksum-crc64nvme" in headers) == (algorithm is not None)
        assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"  # the loopback is private


def test_the_environment_fills_what_was_not_said_and_never_mixes_credentials():
    environment = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": HUSH,
        "AWS_SESSION_TOKEN": HUSH,
        "AWS_ENDPOINT_URL": "http://general",
        "AWS_ENDPOINT_URL_S3": "http://special",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }
    expected = {"endpoint_url": "http://special", "region_name": "eu-west-1"}
    assert fill_from_environment(S3Options(), environment) == S3Options(key="k", secret=HUSH, token=HUSH, **expected)
    own = S3Options(key="mine", secret=HUSH)
    assert fill_from_environment(own, environment) == S3Options(key="mine", secret=HUSH, **expected)
    assert fill_from_environment(S3Options(anon=True), environment) == S3Options(anon=True, **expected)
    assert fill_from_environment(S3Options(), {"AWS_REGION": ""}) == S3Options()


def test_what_was_said_wins_over_every_variable(scripted, monkeypatch, no_aws):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "wrong")
    with pytest.raises(NotFoundError):
        CALLS["get"](open_store(BUCKET, storage_options=scripted.options))
    ((_, _, headers),) = scripted.seen
    assert "Credential=known/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


@pytest.mark.parametrize("given", [{"profile": "typo"}, {}], ids=["option", "environment"])
def test_a_profile_that_does_not_exist_is_bad_input_and_no_outage(scripted, no_aws, monkeypatch, given):
    if not given:
        monkeypatch.setenv("AWS_PROFILE", "typo")
    store = open_store("s3://bucket/run", storage_options={**given, "endpoint_url": scripted.options["endpoint_url"]})
    for call in CALLS.values():
        with pytest.raises(InvalidInputError, match="typo") as raised:
            call(store)
        assert "aws configure list" in raised.value.hint


def test_a_profile_is_found(scripted, no_aws):
    (no_aws / "credentials").write_text(f"[team]\naws_access_key_id=of-the-team\naws_secret_access_key={HUSH}\n")
    (no_aws / "config").write_text("[profile team]\nregion=eu-central-1\n")
    options = {"profile": "team", "endpoint_url": scripted.options["endpoint_url"]}
    with pytest.raises(NotFoundError):
        CALLS["get"](open_store(BUCKET, storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert re.search(r"Credential=of-the-team/\d+/eu-central-1/s3/", headers["authorization"])


def test_without_credentials_nothing_is_sent(scripted, no_aws):
    store = open_store(BUCKET, storage_options={"endpoint_url": scripted.options["endpoint_url"]})
    with pytest.raises(AccessDeniedError, match="no credentials"):
        CALLS["get"](store)
    assert scripted.seen == []


def test_an_anonymous_request_is_not_signed(scripted, no_aws):
    options = {"anon": True, "endpoint_url": scripted.options["endpoint_url"]}
    with pytest.raises(NotFoundError):
        CALLS["get"](open_store(BUCKET, storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert "authorization" not in {name.lower() for name in headers}


def test_a_pickled_store_takes_no_secret_of_the_environment_along(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", HUSH)
    assert HUSH.encode() not in pickle.dumps(open_store(BUCKET))


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "ckptstore.objectstore.via_obstore")
    with pytest.raises(UnsupportedError, match=r"pip install 'ckptstore\[s3\]'"):
        open_store(BUCKET)


def test_a_backslash_is_refused_because_some_servers_take_it_for_a_slash():
    with pytest.raises(InvalidInputError, match="backslash"):
        open_store("s3://bucket/a\\b")


def run(code, *arguments):
    """Run code in a process of its own; return its exit status and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


FORKED = """
    import os, sys
    from ckptstore.objectstore.urls import open_store
    store = open_store(sys.argv[1])
    if sys.argv[2] == "used":
        store.put("a", b"parent")
    child = os.fork()
    if not child:
        try:
            store.put("a", b"child")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(store.get("a", max_bytes=10), flush=True)
"""


@pytest.mark.servers
def test_a_forked_child_may_use_a_store_that_its_parent_did_not(s3_url):
    code, said = run(FORKED, s3_url, "unused")
    assert (code, said) == (0, "b'child'\n")


@pytest.mark.servers
def test_a_forked_child_of_a_process_that_used_obstore_is_refused_instead_of_hanging(s3_url):
    code, said = run(FORKED, s3_url, "used")
    assert code == 0
    assert re.fullmatch(r"UnsupportedError obstore was used before .*forkserver.*\nb'parent'\n", said)


@pytest.mark.servers
def test_a_process_killed_in_the_middle_of_an_upload_publishes_nothing(s3_url):
    code = """
        import os, signal, sys
        from ckptstore.objectstore.urls import open_store
        from ckptstore.options import TransferOptions
        store = open_store(sys.argv[1], transfer=TransferOptions(part_bytes=5 << 20))
        upload = store.open_upload("data/0/shard", size=40 << 20)
        for _ in range(int(sys.argv[2])):
            upload.write(bytes(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for written in (1, 12, 40):
        assert run(code, s3_url, str(written))[0] == -signal.SIGKILL
        assert list(open_store(s3_url).list("")) == []


@pytest.mark.servers
def test_parts_grow_so_that_an_object_has_at_most_the_allowed_number(s3_url, monkeypatch):
    monkeypatch.setattr(via_obstore, "MAX_PARTS", 3)
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
    for call in (CALLS["get"], CALLS["list"], CALLS["create"]):
        with pytest.raises(InvalidInputError, match="NoSuchBucket"):
            call(store)
