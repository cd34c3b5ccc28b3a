"""What only a file system can do wrong."""

import contextlib
import errno
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckptstore.errors import (
    AccessDeniedError,
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.durable import WRITE_BACK_BYTES
from ckptstore.objectstore.local import LocalStore
from ckptstore.objectstore.port import PendingUpload, PutMode
from ckptstore.objectstore.urls import open_store


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "above" / "run"))


def everything_under(path):
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def failing(monkeypatch, name, number, *, only=lambda *_: True):
    """Let the system's call `name` fail with `number`."""
    real = getattr(os, name)

    def call(*args, **kwargs):
        if only(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


def path_of(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def is_directory(descriptor):
    return path_of(descriptor).is_dir()


def test_opening_and_reading_make_nothing(store, tmp_path):
    assert list(store.list("")) == []
    with pytest.raises(NotFoundError):
        store.get("run.json", max_bytes=10)
    with pytest.raises(NotFoundError):
        store.head("log/000000000000.json")
    store.delete("run.json")
    assert everything_under(tmp_path) == []


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for root in ("file", "file/run"):
        with pytest.raises(InvalidInputError, match="a file stands there"):
            open_store(tmp_path / root)


def test_nothing_but_the_object_is_left(store, tmp_path):
    store.put("data/0/a", b"x")
    store.put("data/0/a", b"y")
    store.put("log/0", b"z", mode=PutMode.CREATE)
    with store.open_upload("data/1/b", size=1) as upload:
        upload.write(b"b")
        upload.complete()
    files = [name for name in everything_under(tmp_path) if (tmp_path / name).is_file()]
    assert files == ["above/run/data/0/a", "above/run/data/1/b", "above/run/log/0"]


def test_every_directory_is_synced_up_to_the_root_before_a_put_returns(store, tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append(path_of(descriptor))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("data/0/attempt/shard", b"x")
    run = tmp_path / "above" / "run"
    up = [run / "data/0/attempt", run / "data/0", run / "data", run, run.parent, tmp_path]
    assert synced[:6] == up
    assert synced[6].name.startswith(".ckptstore-tmp-")
    assert synced[7:] == [run / "data/0/attempt"]


def test_a_second_process_syncs_what_the_first_one_made(store, tmp_path, monkeypatch):
    store.put("log/0", b"x")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path_of(descriptor)))
    LocalStore(str(tmp_path / "above" / "run")).put("log/1", b"x")
    assert {tmp_path / "above/run/log", tmp_path / "above/run", tmp_path / "above"} < set(synced)


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [
        ("write", errno.ENOSPC, UnavailableError),
        ("write", errno.EDQUOT, UnavailableError),
        ("write", errno.EFBIG, UnavailableError),
        ("fsync", errno.EIO, UnavailableError),
        ("open", errno.EROFS, AccessDeniedError),
        ("open", errno.EACCES, AccessDeniedError),
        ("link", errno.EPERM, UnsupportedError),
        ("link", errno.EOPNOTSUPP, UnsupportedError),
    ],
)
def test_a_failed_write_is_typed_and_leaves_nothing(store, tmp_path, monkeypatch, call, number, expected):
    store.put("log/0", b"x")
    only = (lambda descriptor: not is_directory(descriptor)) if call == "fsync" else lambda *_: True
    with monkeypatch.context() as patch:
        failing(patch, call, number, only=only)
        with pytest.raises(expected) as caught:
            store.put("log/1", b"y", mode=PutMode.CREATE)
    assert caught.value.facts == {"path": str(tmp_path / "above/run/log/1"), "errno": number}
    assert everything_under(tmp_path / "above/run") == ["log", "log/0"]


def uploaded(store):
    with store.open_upload("log/1", size=1) as upload:
        upload.write(b"y")
        upload.complete()


def created(store):
    store.put("log/1", b"y", mode=PutMode.CREATE)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize(
    ("write", "call"),
    [(created, call) for call in ("open", "write", "fsync", "fstat", "link", "close")]
    + [(uploaded, call) for call in ("open", "write", "fsync", "fstat", "replace", "close")],
)
def test_what_a_signal_s_handler_raises_after_any_system_call_leaves_no_temporary(
    store, monkeypatch, write, call, raised
):
    """What was opened is nobody's yet, say."""
    store.put("log/0", b"x")
    real, came = getattr(os, call), []

    def interrupted(*args, **kwargs):
        result = real(*args, **kwargs)
        if not came:
            came.append(call)
            raise raised
        return result

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt, CkptStoreError):
        patch.setattr(os, call, interrupted)
        write(store)
    assert came == [call]
    assert list(store.list_uploads("")) == []
    assert [store.get(info.key, max_bytes=1) for info in store.list("log/")] in ([b"x"], [b"x", b"y"])


def test_a_full_disk_ends_an_upload_and_leaves_nothing(store, tmp_path, monkeypatch):
    upload = store.open_upload("data/shard", size=10)
    with monkeypatch.context() as patch:
        failing(patch, "write", errno.ENOSPC)
        with pytest.raises(UnavailableError), upload:
            upload.write(b"0123456789")
    assert everything_under(tmp_path / "above/run") == ["data"]


def test_an_advice_that_the_file_system_refuses_fails_no_upload(store, tmp_path, monkeypatch):
    failing(monkeypatch, "posix_fadvise", errno.ESPIPE)
    body = bytes(WRITE_BACK_BYTES + 1)
    with store.open_upload("data/shard", size=len(body)) as upload:
        upload.write(body)
        assert upload.complete().size == len(body)
    assert (tmp_path / "above" / "run" / "data" / "shard").stat().st_size == len(body)


def test_after_a_failed_sync_of_a_directory_nothing_is_called_stored(store, monkeypatch):
    """A second fsync may succeed without having written what the first one lost, so a read-back must not say 'mine'."""
    store.put("log/0", b"x")
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, only=is_directory)
        with pytest.raises(OutcomeUnknownError):
            store.put("log/1", b"y", mode=PutMode.CREATE)
    for call in (
        lambda: store.get("log/1", max_bytes=1),
        lambda: store.put("log/2", b"z"),
        lambda: store.list(""),
        lambda: store.open_upload("a", size=1),
    ):
        with pytest.raises(UnavailableError, match=r"fsync of .*/log failed"):
            call()


def test_a_directory_that_cannot_be_synced_is_refused_for_writing(store, monkeypatch):
    failing(monkeypatch, "fsync", errno.EINVAL, only=is_directory)
    with pytest.raises(UnsupportedError, match="cannot be synced"):
        store.put("log/0", b"x")
    assert list(store.list("")) == []


def test_what_a_killed_process_left_harms_nothing(store, tmp_path):
    """A process is killed in the middle of an upload; its temporary is there, and nobody sees it."""
    code = """
        import os, signal, sys
        from ckptstore.objectstore.local import LocalStore
        upload = LocalStore(sys.argv[1]).open_upload("data/0/shard", size=10)
        upload.write(b"01234")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = str(tmp_path / "above" / "run")
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code), root], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "above/run/data/0").iterdir()
    assert list(store.list("")) == []
    with pytest.raises(InvalidInputError):
        store.get(f"data/0/{left.name}", max_bytes=10)
    store.put("data/0/shard", b"whole")
    assert [info.key for info in store.list("")] == ["data/0/shard"]


def test_a_forked_child_writes_while_its_parents_threads_do(store, tmp_path):
    code = """
        import itertools, os, sys, threading, time
        from ckptstore.objectstore.local import LocalStore
        store, over = LocalStore(sys.argv[1]), threading.Event()
        def write():
            for number in itertools.count():
                store.put(f"data/{number}/a", b"x")  # each makes a directory, and syncs it
                if over.is_set():
                    return
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(10):
            child = os.fork()
            if not child:
                store.put(f"child/{turn}/a", b"x")
                os._exit(0)
            deadline = time.monotonic() + 20
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                    print("the child hangs")
                time.sleep(0.01)
        over.set()
    """
    root = str(tmp_path / "above" / "run")
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), root], timeout=240, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert len(list(store.list("child/"))) == 10


def test_links_and_pipes_are_neither_listed_nor_followed(store, tmp_path):
    store.put("data/a", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"s")
    run = tmp_path / "above" / "run"
    (run / "data" / "directory").symlink_to(tmp_path / "outside")
    (run / "data" / "file").symlink_to(tmp_path / "outside" / "secret")
    os.mkfifo(run / "data" / "pipe")
    assert [info.key for info in store.list("")] == ["data/a"]
    (run / "data" / "nowhere").symlink_to(tmp_path / "nowhere")
    for key in ("data/file", "data/nowhere", "data/pipe", "data"):
        for ask in (lambda key: store.get(key, max_bytes=10), store.head):
            with pytest.raises(IntegrityError, match="is no file") as caught:  # never absent: see `_no_file`
                ask(key)
            assert caught.value.facts["path"] == str(run / key)
        store.delete(key)
    assert (run / "data" / "file").is_symlink()


def test_a_directory_that_is_a_link_leads_nowhere(store, tmp_path):
    """Nothing outside of the root is read, written or deleted, whoever put the link there."""
    store.put("data/a", b"x")
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    for name in ("secret", ".ckptstore-tmp-1", "inner/secret"):
        (outside / name).write_bytes(b"s")
    run = tmp_path / "above" / "run"
    (run / "data" / "0").symlink_to(outside)
    (run / "log").symlink_to(outside, target_is_directory=True)
    for key in ("data/0/secret", "data/0/inner/secret", "log/secret", "log/new"):
        for ask in (
            store.head,
            store.delete,
            lambda key: store.get(key, max_bytes=10),
            lambda key: store.get_range(key, start=0, length=1),
            lambda key: store.put(key, b"y"),
            lambda key: store.put(key, b"y", mode=PutMode.CREATE),
            lambda key: store.open_upload(key, size=1),
        ):
            with pytest.raises(IntegrityError, match="is a link") as caught:
                ask(key)
            assert caught.value.facts["path"] in (str(run / "data" / "0"), str(run / "log"))
    for prefix in ("data/0/", "data/0/inner/", "log/"):
        for listing in (store.list, store.list_uploads):
            with pytest.raises(IntegrityError, match="is a link"):
                list(listing(prefix))
    with pytest.raises(IntegrityError, match="is a link"):
        store.abort_upload(PendingUpload("data/0/x", "data/0/.ckptstore-tmp-1", None))
    assert [info.key for info in store.list("")] == ["data/a"]
    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == [
        ".ckptstore-tmp-1",
        "inner",
        "inner/secret",
        "secret",
    ]


def test_the_root_itself_may_be_reached_by_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    store = LocalStore(str(tmp_path / "run"))
    store.put("data/a", b"x")
    assert (tmp_path / "disk" / "data" / "a").read_bytes() == b"x"
    assert [info.key for info in store.list("")] == ["data/a"]


def test_a_file_in_the_way_of_a_directory_is_said(store):
    store.put("data", b"x")
    with pytest.raises(NotFoundError):
        store.get("data/0/a", max_bytes=1)
    for key in ("data/0", "data/0/a"):
        with pytest.raises(UnsupportedError, match="in its way"):
            store.put(key, b"x")


@pytest.mark.parametrize("obstacle", ["directory", "link to nothing", "link to a file", "pipe"])
def test_what_is_no_object_and_stands_where_one_is_created_is_said_at_once(store, tmp_path, obstacle):
    """It could never be read back, so "exists already" would be asked about for ever."""
    path = tmp_path / "above" / "run" / "log" / "0.json"
    path.parent.mkdir(parents=True)
    if obstacle == "directory":
        path.mkdir()
    elif obstacle == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "file").write_text("x")
        path.symlink_to(tmp_path / ("file" if obstacle == "link to a file" else "nothing"))
    with pytest.raises(UnsupportedError, match=r"log/0\.json cannot be written: something else") as caught:
        store.put("log/0.json", b"x", mode=PutMode.CREATE)
    assert str(path) in caught.value.hint
    assert (tmp_path / "file").exists() is obstacle.startswith("link")


def test_a_directory_that_was_removed_is_made_again(store, tmp_path):
    store.put("data/0/a", b"x")
    store.delete("data/0/a")
    assert not (tmp_path / "above/run/data/0").exists()
    (tmp_path / "above/run/data").rmdir()
    store.put("data/0/b", b"y")
    assert [info.key for info in store.list("")] == ["data/0/b"]


def test_an_unreadable_directory_is_not_an_empty_one(store, monkeypatch):
    store.put("data/a", b"x")
    failing(monkeypatch, "scandir", errno.EACCES, only=lambda path: path.name == "data")
    with pytest.raises(AccessDeniedError):
        list(store.list(""))


def test_a_store_survives_pickling(store):
    store.put("a", b"x")
    again = pickle.loads(pickle.dumps(store))  # noqa: S301  (our own bytes)
    assert again.get("a", max_bytes=1) == b"x"
    assert again.url == store.url


def test_above_a_root_that_stands_already_nothing_need_be_readable(store, tmp_path, monkeypatch):
    (tmp_path / "above" / "run").mkdir(parents=True)
    failing(monkeypatch, "open", errno.EACCES, only=lambda path, *_: Path(path) == tmp_path / "above")
    store.put("log/0", b"x")
    assert store.get("log/0", max_bytes=1) == b"x"


def test_a_root_that_cannot_be_made_durable_is_refused(store, tmp_path, monkeypatch):
    failing(monkeypatch, "open", errno.EACCES, only=lambda path, *_: Path(path) == tmp_path)
    with pytest.raises(AccessDeniedError):
        store.put("log/0", b"x")
    assert list(store.list("")) == []


def test_a_directory_goes_with_its_last_object_and_those_at_the_top_stay(tmp_path):
    store = LocalStore(str(tmp_path / "run"))
    for key in ("data/0/a/one", "data/0/a/two", "probe/b/once", "log/0"):
        store.put(key, b"x")
    store.delete("data/0/a/one")
    assert (tmp_path / "run/data/0/a").is_dir()
    for key in ("data/0/a/two", "probe/b/once", "log/0", "data/0/a/two", "data/0/never/was"):
        store.delete(key)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "run", "run/data", "run/data/0", "run/log", "run/probe",
    ]  # fmt: skip


def test_a_killed_upload_that_is_removed_leaves_no_directory(tmp_path):
    store = LocalStore(str(tmp_path / "run"))
    store.open_upload("data/0/a/one", size=1)  # which nobody ends
    (upload,) = store.list_uploads("")
    store.abort_upload(upload)
    assert not (tmp_path / "run/data/0/a").exists()


def put_and_delete(root, name):
    store = LocalStore(root)
    for number in range(400):
        store.put(f"probe/shared/{name}", b"%d" % number, mode=PutMode.CREATE)
        assert store.get(f"probe/shared/{name}", max_bytes=9) == b"%d" % number
        store.delete(f"probe/shared/{name}")


def test_who_writes_where_others_delete_the_last_object_finds_a_directory(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(put_and_delete, [(str(tmp_path / "run"), f"{number}") for number in range(4)])
    assert not (tmp_path / "run/probe/shared").exists()


def test_a_stranger_s_deep_directories_and_odd_temporaries_hinder_no_list(tmp_path):
    store = LocalStore(str(tmp_path / "run"))
    store.put("data/0/a/one", b"x")
    deep, depth = tmp_path / "run/data/0", 400
    for _ in range(depth):
        deep /= "d"
        deep.mkdir()
    (deep / "deep").write_bytes(b"y")
    (tmp_path / "run/data/0/a" / os.fsdecode(b".ckptstore-tmp-\xff")).write_bytes(b"")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + depth // 2)  # each directory is walked by way of the root: few do
    try:
        listed, uploads = [info.key[-5:] for info in store.list("")], [*store.list_uploads("")]
    finally:
        sys.setrecursionlimit(limit)
    (deep / "deep").unlink()
    for _ in range(depth):  # or pytest's own cleaning fails
        deep.rmdir()
        deep = deep.parent
    assert (listed, uploads) == (["a/one", "/deep"], [])
