"""fsspec: what it says, what it only claims, and what must not come of it."""

import asyncio
import errno
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import traceback

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec_cases import HUSH, opened, registered

from ckptstore.clock import SystemIds
from ckptstore.errors import (
    AccessDeniedError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.probe import probe
from ckptstore.testing.conformance import RefusedConformance, StoreConformance
from ckptstore.units import MIB


class TestFsspecOnMemory(StoreConformance):
    tells_uploads = False

    @pytest.fixture
    def open_again(self):
        url = f"memory://{secrets.token_hex(8)}/run"
        return lambda: opened(url)


class TestFsspecOnFiles(RefusedConformance):
    tells_uploads = False

    @pytest.fixture
    def open_again(self, tmp_path):
        return lambda: opened(f"file://{tmp_path}/above/run")


class TestFsspecOnDir(StoreConformance):
    """A directory of another one, by fsspec's own wrapper."""

    tells_uploads = False

    @pytest.fixture
    def open_again(self):
        path = f"/{secrets.token_hex(8)}"
        return lambda: opened("dir://run", path=path, target_protocol="memory")


# Whether it creates once.
class LooksThenWrites(LocalFileSystem):
    def pipe_file(self, path, value, mode="overwrite", **_):
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        super().pipe_file(path, value)


class SwallowsTheMode(MemoryFileSystem):
    def pipe_file(self, path, value, **_):
        super().pipe_file(path, value)


class IgnoresTheMode(MemoryFileSystem):
    def pipe_file(self, path, value, mode="overwrite", **_):
        del mode
        super().pipe_file(path, value)


def is_found_out(store):
    try:
        probe(store, ids=SystemIds(), prefix="probe/")
    except UnsupportedError as error:
        return "one checkpoint would be lost" in error.message
    return False


@pytest.mark.parametrize("kind", [SwallowsTheMode, IgnoresTheMode])
def test_a_file_system_that_does_not_create_once_is_found_out(kind):
    assert is_found_out(opened(f"{registered(kind)}://run"))


def test_a_file_system_that_looks_and_then_writes_is_found_out_by_racing(tmp_path):
    protocol = registered(LooksThenWrites)
    stores = [opened(f"{protocol}://{tmp_path}/{turn}", auto_mkdir=True) for turn in range(5)]
    assert any(map(is_found_out, stores))  # each time in 49 of 50 on a busy machine


def test_a_file_system_of_which_that_is_known_is_not_even_asked(tmp_path):
    with pytest.raises(UnsupportedError, match=r"looks and then writes.*assume_single_writer"):
        opened(f"file://{tmp_path}").put("a", b"x", mode=PutMode.CREATE)
    assert list(tmp_path.iterdir()) == []


# What can be opened.
@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("simplecache://x", {"target_protocol": "memory"}, UnsupportedError),
        ("filecache://x", {"target_protocol": "memory"}, UnsupportedError),
        ("simplecache::memory://x", {}, UnsupportedError),
        ("abfs://container/x", {}, UnsupportedError),
        ("nonsense://x", {}, InvalidInputError),
        ("memory://x", {"use_listings_cache": True}, InvalidInputError),
        ("memory://x", {"skip_instance_cache": False}, InvalidInputError),
    ],
)
def test_what_cannot_be_trusted_or_used_is_refused_when_it_is_opened(url, options, expected):
    with pytest.raises(expected):
        opened(url, **options)


def test_a_cache_behind_a_directory_is_refused_too():
    store = opened("dir://run", path="/x", target_protocol="simplecache", target_options={"target_protocol": "memory"})
    with pytest.raises(UnsupportedError, match="reads from a cache"):
        store.head("a")


def test_options_that_do_not_fit_are_refused_without_being_shown():
    with pytest.raises(InvalidInputError, match=r"dir:// cannot be made") as caught:
        opened("dir://run", target_protocol=HUSH).head("a")
    assert HUSH not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("root", "public"),
    [
        (f"me:{HUSH}@127.0.0.1:1/runs/a", "me@127.0.0.1:1/runs/a"),
        (f"me:p@{HUSH}@127.0.0.1/runs/a", "me@127.0.0.1/runs/a"),
        (f"me:p@:{HUSH}:@@127.0.0.1/runs/a", "me@127.0.0.1/runs/a"),
        (f":{HUSH}@127.0.0.1/runs/a", "@127.0.0.1/runs/a"),
        (f"me:{HUSH}@127.0.0.1/runs/a:b@c", "me@127.0.0.1/runs/a:b@c"),
        (f"me:{HUSH}@[::1]:21/a", "me@[::1]:21/a"),
        (f"me:{HUSH}@127.0.0.1", "me@127.0.0.1"),
        ("me@127.0.0.1:22/runs/a", "me@127.0.0.1:22/runs/a"),
        ("127.0.0.1:22/runs/a@b", "127.0.0.1:22/runs/a@b"),
        ("127.0.0.1:/runs/a@b", "127.0.0.1:/runs/a@b"),
        ("c1@acct/run", "c1@acct/run"),
        ("/path/with:colon@x", "/path/with:colon@x"),
    ],
)
def test_of_who_we_are_only_the_name_is_shown_with_the_url(root, public):
    store = opened(f"ftp://{root}")
    assert store.url == f"ftp://{public}"
    assert HUSH not in repr(store)


def test_two_places_never_have_one_url_and_one_place_never_two():
    names = ("ftp://a:1@host/run", "ftp://b:1@host/run", "ftp://host/run", "ftp://c1@host/run", "ftp://c2@host/run")
    assert len({opened(url).url for url in names}) == len(names)
    assert opened("ftp://a:2@host/run").url == opened("ftp://a@host/run").url


@pytest.mark.parametrize("root", [f"me:{HUSH}/x@127.0.0.1/runs", f"me:x/{HUSH}@127.0.0.1:21/runs", f"me:1x/{HUSH}@h"])
def test_a_password_that_cannot_be_told_from_a_path_is_refused_and_not_shown(root):
    with pytest.raises(InvalidInputError, match="storage_options") as caught:
        opened(f"ftp://{root}")
    assert HUSH not in str(caught.value)


# How it goes wrong.
class Fails(MemoryFileSystem):
    """Raises what it was made with."""

    def __init__(self, error=None, **options):
        super().__init__(**options)
        self.error = error

    def _fail(self, *_, **__):
        raise self.error

    info = ls = cat_file = pipe_file = rm_file = _fail


CALLS = {
    "get": lambda store: store.get("a", max_bytes=1),
    "list": lambda store: list(store.list("")),
    "put": lambda store: store.put("a", b"x"),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize(
    ("error", "call", "expected"),
    [
        (FileNotFoundError(HUSH), "get", NotFoundError),
        (NotADirectoryError(HUSH), "get", NotFoundError),
        (FileNotFoundError(HUSH), "put", UnsupportedError),
        (IsADirectoryError(HUSH), "put", UnsupportedError),
        (FileExistsError(HUSH), "put", UnsupportedError),
        (PermissionError(HUSH), "get", AccessDeniedError),
        (PermissionError(HUSH), "list", AccessDeniedError),
        (PermissionError(HUSH), "put", AccessDeniedError),
        (NotImplementedError(HUSH), "delete", UnsupportedError),
        (OSError(errno.EROFS, HUSH), "put", AccessDeniedError),
        (OSError(errno.ENAMETOOLONG, HUSH), "put", InvalidInputError),
        (OSError(errno.ENOSPC, HUSH), "put", OutcomeUnknownError),
        (OSError(errno.EIO, HUSH), "get", UnavailableError),
        (OSError(errno.EIO, HUSH), "put", OutcomeUnknownError),
        (TimeoutError(HUSH), "list", UnavailableError),
        (RuntimeError(HUSH), "get", UnavailableError),
        (RuntimeError(HUSH), "delete", OutcomeUnknownError),
        (KeyError(HUSH), "list", UnavailableError),
    ],
    ids=repr,
)
def test_errors_mean_what_the_table_says_and_their_text_is_not_shown(error, call, expected):
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](opened(f"{registered(Fails)}://run", error=error))
    assert type(caught.value) is expected
    assert HUSH not in "".join(traceback.format_exception(caught.value))


def test_a_key_in_whose_way_a_file_stands_is_not_called_existing():
    store = opened(f"memory://{secrets.token_hex(8)}")
    store.put("a", b"x")
    with pytest.raises(UnsupportedError, match="stands in its way"):
        store.put("a/b", b"x")
    with pytest.raises(NotFoundError):
        store.head("a/b")


def test_a_key_that_is_also_a_directory_is_still_a_key():
    store = opened(f"memory://{secrets.token_hex(8)}")
    store.put("a/b", b"x")
    with pytest.raises(NotFoundError):
        store.head("a")
    store.put("a", b"four")
    assert (store.head("a").size, store.get("a", max_bytes=4)) == (4, b"four")


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PROCESS) + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


PROCESS = """
    import os, signal, sys
    from ckptstore.objectstore.via_fsspec import FsspecStore
    from ckptstore.options import TransferOptions
    protocol, _, root = sys.argv[1].partition("://")
    options = dict(pair.split("=") for pair in sys.argv[2:])
    store = FsspecStore(protocol, root, options=options, transfer=TransferOptions(part_bytes=5 << 20))
"""


def test_a_process_killed_in_the_middle_of_an_upload_publishes_nothing(tmp_path, monkeypatch):
    code = """
    upload = store.open_upload("data/0/shard", size=11 << 20)
    upload.write(bytes(11 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    assert run(code, f"file://{tmp_path}/run")[0] == -signal.SIGKILL
    assert list(opened(f"file://{tmp_path}/run").list("")) == []


# A service, by a client of fsspec's kind.
@pytest.fixture
def s3(s3_url, seaweedfs):
    known = seaweedfs.options()
    return s3_url, {name: known[name] for name in ("key", "secret", "endpoint_url")}


@pytest.mark.servers
def test_a_service_is_read_and_written_and_no_part_is_left(s3, seaweedfs):
    url, options = s3
    store, other = opened(url, **options), opened(url, **options)
    assert list(other.list("")) == []
    body = os.urandom(11 * MIB)
    for completes in (True, False):
        with store.open_upload(f"data/{completes}", size=len(body)) as upload:
            upload.write(body)
            if completes:
                upload.complete()
    store.put("log/0", b"x")
    assert [info.key for info in other.list("")] == ["data/True", "log/0"]
    assert other.get("data/True", max_bytes=len(body)) == body
    assert other.get_range("data/True", start=7 * MIB, length=9) == body[7 * MIB : 7 * MIB + 9]
    store.delete("log/0")
    with pytest.raises(NotFoundError):
        other.head("log/0")
    uploads = seaweedfs.client().list_multipart_uploads(Bucket=seaweedfs.bucket).get("Uploads", [])
    assert [one for one in uploads if one["Key"] in url] == []


@pytest.mark.servers
def test_a_service_can_be_used_where_a_loop_runs_and_in_a_forked_process(s3):
    url, options = s3
    store = opened(url, **options)

    async def work():
        store.put("a", b"x")
        return store.head("a").size

    assert asyncio.run(work()) == 1
    code = """
    store.head("a")
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        store.put("b", store.get("a", max_bytes=1))
        os._exit(0)
    print(os.waitpid(pid, 0)[1], store.get("b", max_bytes=1))
    """
    assert run(code, url, *(f"{name}={value}" for name, value in options.items())) == (0, "0 b'x'\n")
