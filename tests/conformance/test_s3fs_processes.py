"""s3:// through s3fs in processes that fork, are killed, end, and run loops of their own."""

import asyncio
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted import BUCKET, CALLS, HUSH, answers, upload

from ckptstore import options
from ckptstore.errors import AccessDeniedError, InvalidInputError
from ckptstore.objectstore import s3_upload
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2)


def run(code, *arguments):
    """Run code in a process of its own, in which a warning is an error; return its exit status and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.servers
@pytest.mark.parametrize("used", [True, False])
def test_a_forked_child_goes_on_by_itself_and_leaves_its_parent_alone(s3_url, used):
    code = """
        import os, sys
        from ckptstore.objectstore.urls import open_store
        store = open_store(sys.argv[1], engine="s3fs")
        if sys.argv[2] == "True":
            store.put("a", b"parent")
        child = os.fork()
        if not child:
            store.put("a", b"child")
            sys.exit()                                  # with all of its finalizers
        assert os.waitpid(child, 0)[1] == 0
        print(store.get("a", max_bytes=10), flush=True)
    """
    assert run(code, s3_url, str(used)) == (0, "b'child'\n")


@pytest.mark.servers
def test_forks_in_the_middle_of_everything_hang_nobody(s3_url):
    code = """
        import os, sys, threading
        from ckptstore.objectstore.urls import open_store
        store = open_store(sys.argv[1], engine="s3fs")
        stop = threading.Event()
        def work(name):
            while not stop.is_set():
                store.put(name, b"x")
                assert store.get(name, max_bytes=1) == b"x"
        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(8):
            child = os.fork()
            if not child:
                store.put(f"c{turn}", b"y")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        print(len(list(store.list(""))))
    """
    assert run(code, s3_url) == (0, "12\n")


@pytest.mark.servers
def test_no_module_is_first_imported_in_the_loop_where_a_fork_would_lock_it_for_ever(s3_url):
    code = """
        import sys
        from ckptstore.objectstore.urls import open_store
        store = open_store(sys.argv[1], engine="s3fs")
        before = {*sys.modules}
        store.put("a", b"x")
        with store.open_upload("b", size=1) as upload:
            upload.write(b"x")
            upload.complete()
        assert [info.key for info in store.list("")] == ["a", "b"]
        print(sorted({*sys.modules} - before))
    """
    assert run(code, s3_url) == (0, "[]\n")


@pytest.mark.servers
def test_an_upload_belongs_to_the_process_that_began_it(s3_url):
    code = """
        import os, sys
        from ckptstore.errors import UnsupportedError
        from ckptstore.objectstore.urls import open_store
        from ckptstore.options import RetryOptions, TransferOptions
        store = open_store(sys.argv[1], engine="s3fs", transfer=TransferOptions(part_bytes=5 << 20))
        with store.open_upload("shard", size=12 << 20) as upload:
            upload.write(bytes(6 << 20))
            child = os.fork()
            if not child:
                try:
                    upload.write(b"x")
                except UnsupportedError:
                    upload.abort()
                    os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            upload.write(bytes(6 << 20))
            print(upload.complete().size)
    """
    assert run(code, s3_url) == (0, f"{12 * MIB}\n")


@pytest.mark.servers
def test_a_process_that_used_it_ends_at_once_and_silently(s3_url):
    code = """
        import sys
        from ckptstore.objectstore.urls import open_store
        stores = [open_store(sys.argv[1], engine="s3fs") for _ in range(3)]
        for store in stores:
            store.put("a", b"x")
        del stores[0]
        upload = stores[0].open_upload("left", size=20 << 20)      # and an upload is left as it is
        upload.write(bytes(17 << 20))
    """
    began = time.monotonic()
    assert run(code, s3_url) == (0, "")
    assert time.monotonic() - began < 60


@pytest.mark.servers
def test_a_process_killed_in_the_middle_of_an_upload_publishes_nothing_and_what_it_left_is_found(s3_url):
    code = """
        import os, signal, sys
        from ckptstore.objectstore.urls import open_store
        from ckptstore.options import RetryOptions, TransferOptions
        store = open_store(sys.argv[1], engine="s3fs", transfer=TransferOptions(part_bytes=5 << 20))
        upload = store.open_upload("data/0/shard", size=40 << 20)
        for _ in range(int(sys.argv[2])):
            upload.write(bytes(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    store = open_store(s3_url, engine="s3fs")
    for written in (1, 12, 40):
        assert run(code, s3_url, str(written))[0] == -signal.SIGKILL
        assert list(store.list("")) == []
        left = list(store.list_uploads("data/"))
        assert [upload.key for upload in left] == ["data/0/shard"] * (written > 5)
        for upload_left in left:
            assert abs(upload_left.began - time.time()) < 60
            store.abort_upload(upload_left)
        assert list(store.list_uploads("")) == []


@pytest.mark.servers
def test_it_may_be_called_where_an_asyncio_loop_runs(s3_url):
    store = open_store(s3_url, engine="s3fs", transfer=PARTS)

    async def main():
        store.put("a", b"x")
        assert upload(store, 6 * MIB).size == 6 * MIB
        return await asyncio.to_thread(store.get, "a", max_bytes=1)

    assert asyncio.run(main()) == b"x"


@pytest.mark.servers
def test_many_uploads_share_a_store(s3_url):
    store = open_store(s3_url, engine="s3fs", transfer=PARTS)

    def one(number):
        body = bytes([number]) * (6 * MIB)
        with store.open_upload(f"u/{number}", size=len(body)) as begun:
            begun.write(body)
            begun.complete()
        return store.get_range(f"u/{number}", start=5 * MIB - 1, length=2) == body[:2]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(one, range(6)))


@pytest.mark.servers
def test_parts_grow_so_that_an_object_has_at_most_the_allowed_number(s3_url, monkeypatch):
    monkeypatch.setattr(options, "MAX_PARTS", 3)
    info = upload(open_store(s3_url, engine="s3fs", transfer=PARTS), 31 * MIB)
    assert info.etag.endswith("-3")


@pytest.mark.servers
def test_bytes_that_changed_on_the_way_are_refused_by_the_server(s3_url, monkeypatch):
    transfer = TransferOptions(retry=RetryOptions(attempts=2, first_pause_seconds=0.01))
    store = open_store(s3_url, engine="s3fs", transfer=transfer)
    real = s3_upload.checksum
    monkeypatch.setattr(s3_upload, "checksum", lambda algorithm, body: real(algorithm, bytes(body) + b"more"))
    with pytest.raises(Exception, match="BadDigest"):
        upload(store, 1)
    assert list(store.list("")) == []


@pytest.mark.servers
@pytest.mark.parametrize("name", ["run[lr=1e-4]", "a*", "q?x", "{x}", "step#5", "a b+c", "p%20q", "café", "~"])
def test_a_root_is_taken_literally(s3_url, seaweedfs, name):
    open_store(f"{s3_url}/axx", engine="s3fs").put("log/x", b"what a glob `a*` would find")
    store = open_store(f"{s3_url}/{name}/", engine="s3fs")
    store.put("log/0", b"x")
    assert [info.key for info in open_store(f"{s3_url}/{name}").list("")] == ["log/0"]  # obstore sees the same
    key = f"{s3_url}/{name}/log/0".removeprefix(f"s3://{seaweedfs.bucket}/")
    assert seaweedfs.client().get_object(Bucket=seaweedfs.bucket, Key=key)["Body"].read() == b"x"


@pytest.mark.servers
def test_foreign_objects_do_not_break_a_listing(s3_url, seaweedfs):
    store = open_store(s3_url, engine="s3fs")
    prefix = s3_url.removeprefix(f"s3://{seaweedfs.bucket}/")
    store.put("log/000000000000.json", b"x")
    for key in ("log/", "data/", "log/a b?*[x]#%20"):
        seaweedfs.client().put_object(Bucket=seaweedfs.bucket, Key=f"{prefix}/{key}", Body=b"")
    assert [info.key for info in store.list("log/")] == ["log/000000000000.json", "log/a b?*[x]#%20"]
    assert [info.key for info in store.list("")] == ["log/000000000000.json", "log/a b?*[x]#%20"]


@pytest.mark.servers
def test_wrong_credentials_are_denied_and_never_absent(s3_url):
    store = open_store(s3_url, engine="s3fs", storage_options={"key": "nobody", "secret": HUSH})
    for call in [*CALLS.values(), lambda store: store.head("a"), lambda store: upload(store, 1)]:
        with pytest.raises(AccessDeniedError):
            call(store)


@pytest.mark.servers
def test_a_bucket_that_does_not_exist_is_no_fresh_run(s3_url):
    store = open_store("s3://no-such-bucket/run", engine="s3fs")
    for call in (CALLS["get"], CALLS["list"], CALLS["create"], lambda store: store.head("a")):
        with pytest.raises(InvalidInputError, match="NoSuchBucket"):
            call(store)


def test_a_pickled_store_takes_no_secret_of_the_environment_along(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", HUSH)
    store = open_store(BUCKET, engine="s3fs")
    assert HUSH.encode() not in pickle.dumps(store)
    assert HUSH not in repr(store)


def test_without_credentials_nothing_is_sent(scripted, no_aws):
    store = open_store(BUCKET, engine="s3fs", storage_options={"endpoint_url": scripted.endpoint})
    with pytest.raises(AccessDeniedError, match=r"no credentials.*aws sso login"):
        CALLS["create"](store)
    assert scripted.seen == []


@pytest.mark.parametrize("given", [{"profile": "typo"}, {}], ids=["option", "environment"])
def test_a_profile_that_does_not_exist_is_bad_input_and_no_outage(scripted, no_aws, monkeypatch, given):
    if not given:
        monkeypatch.setenv("AWS_PROFILE", "typo")
    store = open_store(BUCKET, engine="s3fs", storage_options={**given, "endpoint_url": scripted.endpoint})
    for call in CALLS.values():
        with pytest.raises(InvalidInputError, match=r"typo.*aws configure list"):
            call(store)


def test_a_profile_is_found(scripted, no_aws):
    (no_aws / "credentials").write_text(f"[team]\naws_access_key_id=of-the-team\naws_secret_access_key={HUSH}\n")
    (no_aws / "config").write_text("[profile team]\nregion=eu-central-1\n")
    options = {"profile": "team", "endpoint_url": scripted.endpoint}
    with pytest.raises(Exception, match="NoSuchKey"):
        CALLS["get"](open_store(BUCKET, engine="s3fs", storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert "Credential=of-the-team/" in headers["Authorization"]
    assert "/eu-central-1/s3/" in headers["Authorization"]


def test_an_anonymous_request_is_not_signed(scripted, no_aws):
    options = {"anon": True, "endpoint_url": scripted.endpoint}
    with pytest.raises(Exception, match="NoSuchKey"):
        CALLS["get"](open_store(BUCKET, engine="s3fs", storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert "authorization" not in {name.lower() for name in headers}


def test_what_fsspec_is_configured_with_adds_nothing(scripted, no_aws, monkeypatch):
    fsspec_config = pytest.importorskip("fsspec.config")
    monkeypatch.setitem(
        fsspec_config.conf, "s3", {"endpoint_url": "http://127.0.0.1:9", "key": "other", "secret": "other"}
    )
    options = {"endpoint_url": scripted.endpoint, "key": "known", "secret": HUSH}
    with pytest.raises(Exception, match="NoSuchKey"):
        CALLS["get"](open_store(BUCKET, engine="s3fs", storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert "Credential=known/" in headers["Authorization"]


def test_a_process_whose_credentials_were_renewed_ends_silently(scripted, no_aws):
    code = """
        import sys
        from ckptstore.errors import AccessDeniedError
        from ckptstore.objectstore.urls import open_store
        store = open_store(sys.argv[1], engine="s3fs", storage_options={"endpoint_url": sys.argv[2]})
        for _ in range(2):
            try:
                store.get("a", max_bytes=1)
            except AccessDeniedError as error:
                print(error.facts["server_code"])
    """
    (no_aws / "credentials").write_text(f"[default]\naws_access_key_id = old\naws_secret_access_key = {HUSH}\n")
    scripted.script = answers(403, "ExpiredToken")
    ended, said = run(code, BUCKET, scripted.endpoint)
    assert (ended, said.split()) == (0, ["ExpiredToken"] * 2)
