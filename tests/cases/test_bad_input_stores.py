"""A store that is not there, does not let us in, or goes away: a typed error in time, and never an empty run."""

import http.server
import threading
import time

import pytest
from refusals import COMMANDS, command_told, load, loaded, raised, save, state, told

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import AccessDeniedError, InvalidInputError, UnavailableError
from ckptstore.events import UploadBegan
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, RetryOptions, TransferOptions
from localstack.ports import free_port_pairs
from localstack.seaweedfs import SeaweedFS

pytestmark = pytest.mark.servers
SECONDS = 30
IMPATIENT = TransferOptions(retry=RetryOptions(attempts=3, deadline_seconds=10))
"""A store that does not answer is known as such within this time, by every face."""


def faces(url, **options):
    """Return what every face does first."""
    log = LogOptions(deadline_seconds=5)
    return [
        lambda: save(url, "a", log=log, storage_options=options),
        lambda: save(url, "a", call="dcp.save", log=log, storage_options=options),
        lambda: load(url, storage_options=options),
        lambda: load(url, call="dcp.load", storage_options=options),
        lambda: CheckpointStore.open(url, storage_options=options).latest(),
    ]


def test_a_bucket_that_does_not_exist_is_a_wrong_url_and_no_fresh_run(s3_url):
    url = "s3://no-such-bucket/run"
    for face in faces(url):
        error = told(face, InvalidInputError, "no-such-bucket", "NoSuchBucket", seconds=SECONDS)
        assert "URL" in error.hint
    for name in COMMANDS:
        command_told(name, url, kind=InvalidInputError, names=("no-such-bucket",))


@pytest.mark.parametrize(
    "wrong",
    [{"key": "AKIANOBODY", "secret": "x" * 40}, {"secret": "x" * 40}, {"anon": True}],
    ids=["unknown key", "wrong secret", "nobody"],
)
def test_wrong_credentials_are_denied_and_never_an_absent_run(s3_url, seaweedfs, wrong):
    save(s3_url, "a")
    if "secret" in wrong:
        wrong = {"key": seaweedfs.environment["AWS_ACCESS_KEY_ID"]} | wrong
    for face in faces(s3_url, **wrong):
        error = told(face, AccessDeniedError, s3_url, seconds=SECONDS)
        assert "credentials" in error.hint
        assert "x" * 40 not in str(error)
    assert loaded(s3_url)
    assert len(CheckpointStore.open(s3_url).checkpoints()) == 1


def test_wrong_credentials_of_the_environment_are_denied_by_every_command(s3_url, monkeypatch):
    save(s3_url, "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 40)
    for name in COMMANDS:
        command_told(name, s3_url, kind=AccessDeniedError, names=(s3_url,))
    for more in (("pin", "--holder", "x"), ("rollback", "--yes")):
        command_told(more[0], s3_url, "a", *more[1:], kind=AccessDeniedError)


def test_a_server_that_nobody_runs_is_unavailable_in_time_and_never_an_absent_run(s3_url, monkeypatch):
    (port,) = free_port_pairs(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for face in faces(s3_url):
        told(face, UnavailableError, s3_url, seconds=SECONDS)
    for name in COMMANDS:
        began = time.monotonic()
        command_told(name, s3_url, kind=UnavailableError, names=(s3_url,))
        assert time.monotonic() - began < SECONDS


def test_a_server_that_goes_away_in_the_middle_of_a_save_ends_it_in_time_and_what_was_committed_stays(monkeypatch):
    with SeaweedFS(in_memory=True) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{server.bucket}/run"
        save(url, "a")

        def stop(event):
            if isinstance(event, UploadBegan):
                server._process.stop()

        writer = sw.CkptStoreWriter(url, observer=stop, log=LogOptions(deadline_seconds=5), transfer=IMPATIENT)
        began = time.monotonic()
        error = sw.cause(raised(lambda: sw.save(state(), checkpoint_id="b", storage_writer=writer)))
        assert time.monotonic() - began < SECONDS
        assert error.code in ("unavailable", "outcome_unknown")  # nothing, or a shard that no commit names
        assert "rank-00000.safetensors" in str(error)
        told(lambda: load(url), UnavailableError, seconds=SECONDS)


def test_an_endpoint_that_is_no_object_store_is_no_fresh_run(s3_url, monkeypatch, tmp_path):
    """It answers 404 to everything, which for a single object would mean that it is absent."""

    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        do_PUT = do_HEAD = do_POST = do_DELETE = do_GET  # noqa: N815  (the standard library's names)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            for face in faces(s3_url):
                error = told(face, UnavailableError, s3_url, seconds=SECONDS)
                assert "endpoint" in error.hint
        finally:
            server.shutdown()
            thread.join(10)


def test_the_whole_run_is_there_when_the_store_is_back(s3_url, monkeypatch):
    save(s3_url, "a")
    with monkeypatch.context() as gone:
        gone.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        told(lambda: save(s3_url, "b"), UnavailableError, seconds=SECONDS)
    save(s3_url, "b")
    assert [each.checkpoint_id for each in CheckpointStore.open(s3_url).checkpoints()] == ["b", "a"]
    assert open_store(s3_url).engine == "obstore"
