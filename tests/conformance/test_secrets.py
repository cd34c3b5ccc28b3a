"""No secret comes out: not in an error, its causes, an event, a log, a repr, a `--json`, whatever fails and however.

The server of these tests is the worst there is: it says back all that it was told, in headers, bodies and error codes.
"""

from __future__ import annotations

import gzip
import json
import logging
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import storage_writers as sw
from ckptstore import CheckpointStore, CkptStoreError, RetryOptions, TransferOptions, UnavailableError
from ckptstore.cli.app import app
from ckptstore.events import HintFailed
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore

SECRET = "Wq7hushZ0"  # noqa: S105  (planted)
"""Stands in every secret that is planted."""
KEY64 = "V3E3aHVzaFowV3E3aHVzaFow"  # base64 of it, for Azure: not to be shown either
PLANTED = (SECRET, KEY64)
ONCE = RetryOptions(
    attempts=1, first_pause_seconds=0.01, longest_pause_seconds=0.02, deadline_seconds=3.0, stall_timeout_seconds=3.0
)
TRANSFER = TransferOptions(retry=ONCE)
STATUSES = (400, 401, 403, 404, 409, 412, 429, 500, 503, 302, 200)


class Echo(ThreadingHTTPServer):
    """Answers with a status, and with what it was asked."""

    daemon_threads = True
    status = 403
    code = f"{SECRET} denied"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Echoing)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_):
        pass


class _Echoing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0) or 0))
        told = f"{self.requestline} {dict(self.headers)} {SECRET} {KEY64}"
        text = f"<Error><Code>{self.server.code}</Code><Message>{told}</Message></Error>"
        if "json" in self.headers.get("Accept", "") or "/o" in self.path:
            text = json.dumps({"error": {"code": self.server.status, "message": told, "errors": [{"reason": told}]}})
        body = text.encode()
        self.send_response(self.server.status, f"{SECRET}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-amz-error-message", SECRET)
        if self.server.status == 302:
            self.send_header("Location", f"http://user:{SECRET}@127.0.0.1:1/?sig={SECRET}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815  (what the standard library calls)

    def log_message(self, *_):
        pass


@pytest.fixture
def echo():
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No credentials but those that a test plants."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))


S3 = {"key": "known", "secret": SECRET, "token": SECRET}
GCS = {"token": SECRET}
AZURE = {"account_name": "account", "account_key": KEY64}
ENGINES = {
    "s3 by obstore": ("s3://bucket/run", "obstore", S3, "endpoint_url"),
    "s3 by s3fs": ("s3://bucket/run", "s3fs", S3, "endpoint_url"),
    "gs by gcsfs": ("gs://bucket/run", "gcsfs", GCS, "endpoint_url"),
    "az by obstore": ("az://container/run", "obstore", AZURE, "endpoint"),
    "az with a signature": (
        "az://container/run",
        "obstore",
        {"account_name": "account", "sas_token": f"sv=2024-01-01&sig={SECRET}"},
        None,
    ),
    "az with a bearer": ("az://container/run", "obstore", {"account_name": "account", "token": SECRET}, None),
}


def _upload(store):
    with store.open_upload("a", size=6 << 20) as upload:
        upload.write(bytes(6 << 20))
        upload.complete()


CALLS = {
    "get": lambda store: store.get("a", max_bytes=10),
    "range": lambda store: store.get_range("a", start=0, length=5),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("log/")),
    "create": lambda store: store.put("a", b"x", mode=PutMode.CREATE),
    "put": lambda store: store.put("a", b"x"),
    "delete": lambda store: store.delete("a"),
    "upload": _upload,
    "uploads": lambda store: list(store.list_uploads("")),
}


def told_by(act, *, log):
    """Return all that a failure tells: messages, facts, causes, reprs, logs."""
    error = None
    try:
        act()
    except CkptStoreError as ours:
        error = ours
    if error is None:
        return ""
    chain = "".join(traceback.format_exception(error))
    return f"{error!r} {error} {error.facts} {error.hint} {chain} {log.text}"


def assert_no_secret(told):
    found = [each for each in PLANTED if each in told]
    at = told.find(found[0]) if found else 0
    assert found == [], told[max(0, at - 300) : at + 60]


def options_for(name, echo):
    _, _, options, endpoint = ENGINES[name]
    if endpoint is None:
        return options
    place = f"{echo.endpoint}/account" if name.startswith("az") else echo.endpoint
    return {**options, endpoint: place}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("name", ["s3 by obstore", "s3 by s3fs", "gs by gcsfs", "az by obstore"])
def test_what_a_server_says_back_is_not_told(echo, caplog, name, status):
    caplog.set_level(logging.INFO)
    echo.status = status
    url, engine, _, _ = ENGINES[name]
    try:
        store = open_store(url, engine=engine, storage_options=options_for(name, echo), transfer=TRANSFER)
    except CkptStoreError as error:
        pytest.fail(f"it opens: {error}")
    assert_no_secret(f"{store!r} {store.url} {store.endpoint}")
    told = [told_by(lambda call=call: call(store), log=caplog) for call in CALLS.values()]
    assert status == 200 or sum(map(bool, told)) >= 5
    for each in told:
        assert_no_secret(each)


def test_a_secret_that_came_out_would_be_seen(caplog):
    def leak():
        try:
            int(f"no such key: {SECRET}")
        except ValueError as error:
            raise CkptStoreError("it failed") from error

    with pytest.raises(AssertionError, match="no such key"):
        assert_no_secret(told_by(leak, log=caplog))


@pytest.mark.parametrize("name", ENGINES)
def test_a_server_that_cannot_be_reached_is_told_of_without_secrets(caplog, monkeypatch, name):
    """The address of a request may hold a signature, and clients say the address."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{SECRET}@127.0.0.1:9")
    url, engine, options, endpoint = ENGINES[name]
    place = "http://127.0.0.1:9/account" if name.startswith("az") else "http://127.0.0.1:9"
    given = {**options, **({endpoint: place} if endpoint else {})}
    store = open_store(url, engine=engine, storage_options=given, transfer=TRANSFER)
    for call in CALLS.values():
        assert_no_secret(told_by(lambda call=call: call(store), log=caplog))


URLS = [
    f"s3://user:{SECRET}@bucket/run",
    f"s3://{SECRET}:@/run",
    f"gs://user:{SECRET}@bucket/run",
    f"az://user:{SECRET}@container/run",
    f"https://user:{SECRET}@host/bucket?X-Amz-Signature={SECRET}#{SECRET}",
    f"http://host/{SECRET}?sig={SECRET}",
    f"ftp://user:{SECRET}@host//run",
    f"sftp://user:{SECRET}@host/../run",
    f"webdav://user:{SECRET}@host/./run",
    f"unheard-of://user:{SECRET}@host/run",
    f"s3:/user:{SECRET}@bucket",
    f"file://user:{SECRET}@host/run",
    f"s3a://user:{SECRET}@bucket/run",
    f"gcs://user:{SECRET}@bucket/run",
    f"smb://user:{SECRET}@host/run/\x00",
    f"hdfs://user:{SECRET}@host//run",
    f"abfss://c@account.dfs.core.windows.net/run?sig={SECRET}",
]


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_a_url_with_credentials_is_refused_without_them(url, caplog):
    for act in (
        lambda: open_store(url),
        lambda: CheckpointStore.open(url, transfer=TRANSFER),
        lambda: sw.CkptStoreWriter(url),
        lambda: sw.CkptStoreReader(url),
    ):
        told = told_by(act, log=caplog)
        assert told
        assert_no_secret(told)
    for command in (["ls"], ["latest", "--json"], ["doctor", "--json"], ["verify"], ["log", "--json"], ["show"]):
        answer = CliRunner().invoke(app, [command[0], url, *command[1:]])
        assert answer.exit_code != 0
        assert_no_secret(answer.output + answer.stderr)


WRONG = [
    ("s3://bucket/run", {"secret": SECRET}),
    ("s3://bucket/run", {"key": SECRET}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET, "endpoint_url": f"ftp://u:{SECRET}@host"}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET, "endpoint_url": f"http://u:{SECRET}@host"}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET, "endpoint_url": f"http://host?sig={SECRET}"}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET, "endpoint_url": "http://example.org"}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET.encode()}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET, "client_kwargs": {"aws_secret_access_key": SECRET}}),
    ("s3://bucket/run", {"key": "k", "secret": SECRET, "client_kwargs": f"{SECRET}"}),
    ("s3://bucket/run", {"key": "k", "secrets": SECRET}),
    ("s3://bucket/run", {"profile": {"a": SECRET}}),
    ("s3://bucket/run", {"key": "k", "secret": [SECRET]}),
    ("gs://bucket/run", {"token": {"private_key": SECRET}}),
    ("gs://bucket/run", {"token": {"type": "service_account", "private_key": SECRET, "client_email": "a@b"}}),
    ("gs://bucket/run", {"token": [SECRET]}),
    ("gs://bucket/run", {"tokens": SECRET}),
    ("gs://bucket/run", {"token": SECRET, "endpoint_url": f"http://u:{SECRET}@host"}),
    ("gs://bucket/run", {"token": SECRET, "endpoint_url": "http://example.org"}),
    ("az://container/run", {"account_name": "a", "account_key": SECRET + "!"}),
    ("az://container/run", {"account_name": "a", "sas_token": SECRET, "token": SECRET}),
    ("az://container/run", {"connection_string": f"AccountKey={SECRET}"}),
    ("az://container/run", {"connection_string": f"AccountName=a;AccountKey={SECRET};Wrong={SECRET}"}),
    ("az://container/run", {"connection_string": SECRET}),
    ("az://container/run", {"account_name": "a", "client_secret": SECRET}),
    ("az://container/run", {"account_name": "a", "account_key": KEY64, "endpoint": f"http://u:{SECRET}@127.0.0.1:9/a"}),
    ("az://container/run", {"account_name": "a", "account_keys": SECRET}),
    ("file:///x", {"key": SECRET}),
    ("memory://x", {"password": SECRET}),
]


@pytest.mark.parametrize(("url", "options"), WRONG, ids=range(len(WRONG)))
def test_options_that_are_wrong_are_refused_without_their_values(url, options, caplog):
    told = told_by(lambda: CheckpointStore.open(url, storage_options=options, transfer=TRANSFER), log=caplog)
    assert told
    assert_no_secret(told)


FAILING = {
    "a provider that raises": f"[profile p]\ncredential_process = sh -c 'echo {SECRET} >&2; exit 3'\n",
    "a provider that talks nonsense": f"[profile p]\ncredential_process = echo {SECRET}\n",
    "a provider that is not there": f"[profile p]\ncredential_process = /absent/{SECRET}-x\n",
    "a file that is none": f"{SECRET} = {SECRET}\n",
    "a role that cannot be had": f"[profile p]\nrole_arn = {SECRET}\nsource_profile = q\n",
}


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", FAILING)
def test_what_goes_wrong_while_credentials_are_looked_up_is_told_without_them(
    name, engine, tmp_path, monkeypatch, caplog, capfd
):
    """obstore makes a text of whatever its provider raises."""
    caplog.set_level(logging.INFO)
    config = tmp_path / "config"
    config.write_text(FAILING[name])
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "p")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    options = {"endpoint_url": "http://127.0.0.1:9"}
    told = told_by(
        lambda: CheckpointStore.open("s3://bucket/run", engine=engine, storage_options=options, transfer=TRANSFER),
        log=caplog,
    )
    assert told
    assert_no_secret(told)
    assert_no_secret("".join(capfd.readouterr()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["s3 by obstore", "s3 by s3fs", "gs by gcsfs", "az by obstore"])
def test_writers_readers_and_events_hold_no_secret(echo, caplog, name):
    caplog.set_level(logging.INFO)
    url, engine, _, _ = ENGINES[name]
    events = []
    given = {"engine": engine, "storage_options": options_for(name, echo), "transfer": TRANSFER}
    writer = sw.CkptStoreWriter(url, **given, observer=events.append)
    reader = sw.CkptStoreReader(url, **given, observer=events.append)
    told = f"{writer!r} {reader!r} {vars(writer).get('_session')!r}"
    for act in (
        lambda: sw.save({"a": 1}, checkpoint_id="a", storage_writer=writer),
        lambda: sw.load({"a": 1}, storage_reader=reader),
        lambda: CheckpointStore.open(url, **given, observer=events.append),
    ):
        told += told_by(act, log=caplog)
    assert_no_secret(told + repr(events))


@pytest.mark.parametrize("name", ["s3 by obstore", "s3 by s3fs", "az by obstore"])
@pytest.mark.parametrize("command", [["ls"], ["doctor", "--quick"], ["doctor", "--uploads"], ["verify"]])
def test_commands_print_no_secret(echo, name, command):
    url, engine, _, _ = ENGINES[name]
    given = options_for(name, echo)
    echo.code = "AccessDenied"  # which is not tried again
    words = [word for key, value in given.items() for word in ("-o", f"{key}={value}")]
    for extra in ([], ["--json"]):
        answer = CliRunner().invoke(app, [command[0], url, *command[1:], "--engine", engine, *words, *extra])
        assert answer.exit_code != 0
        assert_no_secret(answer.output + answer.stderr)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_holds_nothing_of_the_environment(tmp_path, monkeypatch):
    """Records, parts and shards say what was saved and on which host, and nothing else of where it was saved."""
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HTTPS_PROXY", "CKPTSTORE_ANYTHING", "USER"):
        monkeypatch.setenv(name, SECRET)
    url = tmp_path / "run"
    sw.save({"a": 1}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    bodies = [path.read_bytes() for path in url.rglob("*") if path.is_file()]
    texts = [gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body for body in bodies]
    assert len(texts) >= 5
    assert [text for text in texts if SECRET.encode() in text] == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError(f"{SECRET} is no signature"), "ValueError"),
        (UnavailableError("It is down.", hint="Wait."), "It is down. Wait."),
    ],
    ids=["foreign", "ours"],
)
def test_an_event_says_nothing_of_an_error_that_is_not_ours_but_its_type(error, reason):
    def failing(call, act):
        if call.writes:
            raise error
        return act()

    events = []
    RunLog.open(TappedStore(MemoryStore(), failing), observer=events.append).write_hint("latest.json", b"x")
    assert events == [HintFailed(key="latest.json", reason=reason)]
