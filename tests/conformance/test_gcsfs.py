"""The whole suite on Google Cloud Storage; who we are there, and what must never be shown; threads and processes."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import traceback

import pytest
from gcs_cases import HUSH, opened

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.gcs_options import GcsOptions, fill_from_environment, read_options
from ckptstore.testing.conformance import StoreConformance
from ckptstore.units import MIB


@pytest.fixture
def store(gcs):
    return opened("gs://bucket/run")


@pytest.mark.servers
class TestGcsfsOnFakeGcs(StoreConformance):
    tells_uploads = False

    @pytest.fixture
    def open_again(self, gs_url):
        return lambda: opened(gs_url)


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
