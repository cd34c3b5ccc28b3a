"""A local server comes up, says how to reach it, keeps its data over a restart, and never outlives who started it."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import botocore.exceptions
import obstore
import pytest
from obstore.store import AzureStore

from ckptstore.objectstore.urls import open_store
from localstack.__main__ import SERVERS
from localstack.azurite import COMMAND, INSTALL, find_azurite
from localstack.guarded import ServerFailedError
from localstack.seaweedfs import SeaweedFS

pytestmark = pytest.mark.servers

NEEDED = {
    "s3": {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"},
    "gs": {"STORAGE_EMULATOR_HOST"},
    "az": {"AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"},
}
# Azurite comes by npm, not with our packages.
NO_AZURITE = pytest.mark.skipif(find_azurite() is None, reason=f"There is no `{COMMAND}` command here. Run: {INSTALL}")
KINDS = [pytest.param(kind, marks=NO_AZURITE) if kind == "azure" else kind for kind in SERVERS]
S3_KINDS = [name for name, kind in SERVERS.items() if kind.scheme == "s3"]


class Started:
    """`python -m localstack up KIND`, ready; what it said; and the folder that all its files should be in."""

    def __init__(self, kind, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "localstack", "up", kind],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if line.startswith("# ready"):
                break
        self.exported = dict(re.findall(r"^export (\w+)=(.+)$", self.said, re.MULTILINE))

    def close(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    running = []

    def start(kind):
        running.append(Started(kind, tmp_path))
        assert "# ready" in running[-1].said
        return running[-1]

    yield start
    for started in running:
        started.close()


def processes_of(folder):
    """The pids of guards and servers whose folder begins like this: it is in their command line, or their home."""
    mark, found = os.fsencode(folder), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:  # it ended while we looked
            continue
    return found


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_prints_is_where_it_is_and_it_stops_clean(start, kind):
    started = start(kind)
    scheme = SERVERS[kind].scheme
    assert set(started.exported) >= NEEDED[scheme]
    assert re.search(rf"^# ready: {scheme}://[a-z]+/", started.said, re.MULTILINE)

    assert len(processes_of(started.folder / "ckptstore-")) == 2  # the guard and the server
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(20) == 0
    assert processes_of(started.folder / "ckptstore-") == []
    assert list(started.folder.iterdir()) == []


def test_its_exports_are_what_a_store_needs_and_no_socket_of_it_stays(start, monkeypatch):
    started = start("s3")
    for name, value in started.exported.items():
        monkeypatch.setenv(name, value)
    store = open_store(re.search(r"# ready: (s3://[^/]+)/", started.said)[1] + "/run")
    store.put("a", b"x")
    assert store.get("a", max_bytes=1) == b"x"

    sockets = set(Path("/tmp").glob("seaweedfs-*.sock"))  # noqa: S108  (where the server puts them)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(20) == 0
    port = started.exported["AWS_ENDPOINT_URL"].rpartition(":")[2]
    assert any(port in path.name for path in sockets)
    assert not list(Path("/tmp").glob(f"seaweedfs-*{port}.sock"))  # noqa: S108  (as above)


@pytest.mark.parametrize("kind", KINDS)
def test_it_dies_with_its_parent_even_if_that_is_killed(start, kind):
    started = start(kind)
    started.process.kill()
    wait_until(lambda: not processes_of(started.folder / "ckptstore-"))
    wait_until(lambda: not list(started.folder.iterdir()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_dies_with_its_guard(start, kind):
    started = start(kind)
    guard = min(processes_of(started.folder / "ckptstore-"))
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not processes_of(started.folder / "ckptstore-"))
    started.process.terminate()
    assert started.process.wait(20) == 0
    assert list(started.folder.iterdir()) == []


def test_in_memory_is_in_memory_and_the_folder_is_deleted():
    with SeaweedFS(in_memory=True) as server:
        folder = server._process.folder
        assert folder.is_relative_to("/dev/shm")  # noqa: S108  (what was asked for)
        assert (folder / "data").exists()
    assert not folder.exists()


def kept(client, bucket, key):
    """The object's bytes, or None where it is not there."""
    try:
        return client.get_object(Bucket=bucket, Key=key)["Body"].read()
    except client.exceptions.NoSuchKey:
        return None


@pytest.mark.parametrize("kind", S3_KINDS)
def test_a_plain_client_stores_and_a_restart_loses_only_what_is_said_to_be_lost(kind, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # the user's own is neither read nor passed on
    monkeypatch.setenv("MINIO_ROOT_USER", "somebody else")
    with SERVERS[kind]() as server:
        before, running = server.endpoint, processes_of(server._process.folder)
        client = server.client()
        client.put_object(Bucket=server.bucket, Key="a/b", Body=b"x" * 100_000)
        assert kept(client, server.bucket, "a/b") == b"x" * 100_000
        server.restart()
        assert server.endpoint == before
        assert running != processes_of(server._process.folder)
        assert kept(client, server.bucket, "a/b") == (b"x" * 100_000 if server.keeps_data else None)
        client.put_object(Bucket=server.bucket, Key="a/c", Body=b"y")
        assert kept(client, server.bucket, "a/c") == b"y"
        client.close()


@pytest.mark.parametrize("kind", [kind for kind in S3_KINDS if kind != "moto"])
def test_another_ones_key_is_refused(kind):
    with SERVERS[kind]() as server:
        stranger = SERVERS[kind]()
        stranger.endpoint = server.endpoint
        client = stranger.client()
        with pytest.raises(botocore.exceptions.ClientError) as caught:
            client.list_objects_v2(Bucket=server.bucket)
        assert caught.value.response["Error"]["Code"] == "InvalidAccessKeyId"
        client.close()


def send(endpoint, method, path, body=None, **headers):
    """Return the status and what a request to a server without credentials brought."""
    request = urllib.request.Request(endpoint + path, body, headers, method=method)  # noqa: S310  (our own server)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  (the same)
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_fake_gcs_keeps_what_it_has_and_sends_uploads_to_where_it_was_asked():
    with SERVERS["gcs"]() as server:
        objects = f"/upload/storage/v1/b/{server.bucket}/o"
        assert send(server.endpoint, "POST", f"{objects}?uploadType=media&name=a%2Fb", b"hello")[0] == 200
        asked = {"Host": "somewhere.else:99"}
        _, headers, _ = send(server.endpoint, "POST", f"{objects}?uploadType=resumable&name=r", b"{}", **asked)
        assert headers["Location"].startswith("http://somewhere.else:99/")
        server.restart()
        path = f"/download/storage/v1/b/{server.bucket}/o/a%2Fb?alt=media"
        assert send(server.endpoint, "GET", path)[2] == b"hello"


def test_gcsfs_finds_fake_gcs_by_the_environment_and_does_not_wait(gs_url):
    """In a process of its own: gcsfs reads the environment when it is imported."""
    code = (
        "import sys, time, fsspec; began = time.monotonic(); fs, path = fsspec.url_to_fs(sys.argv[1])\n"
        "fs.pipe_file(path, b'x'); assert fs.cat_file(path) == b'x'; assert time.monotonic() - began < 30"
    )
    subprocess.run([sys.executable, "-c", code, gs_url], check=True, timeout=60)


@NO_AZURITE
def test_azurite_keeps_what_it_has_makes_a_blob_once_and_believes_no_other_key(azurite, monkeypatch):
    client, blob = azurite.client(), f"{azurite.bucket}/kept/a b"
    assert client.send("PUT", blob, body=b"hello").status == 201
    again = client.send("PUT", blob, body=b"again", headers={"If-None-Match": "*"})
    assert (again.status, again.headers["x-ms-error-code"]) == (409, "BlobAlreadyExists")
    azurite.restart()
    assert client.send("GET", blob).body == b"hello"
    listed = client.send("GET", azurite.bucket, query={"restype": "container", "comp": "list", "prefix": "kept/"})
    assert b"<Name>kept/a b</Name>" in listed.body
    monkeypatch.setattr("localstack.azurite.KEY", "c29tZXRoaW5nIGVsc2U=")
    assert client.send("GET", blob).status == 403


@NO_AZURITE
def test_obstore_finds_azurite_by_the_environment(az_url):
    container, _, path = az_url.removeprefix("az://").partition("/")
    store = AzureStore(container)
    obstore.put(store, path, b"x")
    assert bytes(obstore.get(store, path).bytes()) == b"x"


def test_a_server_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("localstack.azurite.BESIDE", tmp_path / "none")
    monkeypatch.delenv("CKPTSTORE_AZURITE", raising=False)
    for kind, how in (("moto", "pip install"), ("azure", "npm install")):
        with pytest.raises(ServerFailedError, match=how), SERVERS[kind]():
            pass
