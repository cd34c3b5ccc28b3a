"""The local server comes up, says how to reach it, and never outlives whoever started it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.objectstore.urls import open_store

pytestmark = pytest.mark.servers


@pytest.fixture
def started(tmp_path):
    """`python -m localstack up s3`, ready; its environment; and the pid of what it started."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "localstack", "up", "s3"], stdout=subprocess.PIPE, text=True, env=environment
    )
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("# ready"):
                break
        assert said[-1].startswith("# ready"), said
        yield process, "".join(said), tmp_path
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def processes_that_use(folder):
    """The pids of processes with the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it ended while we looked
            continue
    return found


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_it_prints_is_what_a_store_needs_and_it_stops_clean(started, monkeypatch, number):
    process, said, folder = started
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", said, re.MULTILINE))
    assert set(exported) >= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"}
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    store = open_store(re.search(r"# ready: (s3://[^/]+)/", said)[1] + "/run")
    store.put("a", b"x")
    assert store.get("a", max_bytes=1) == b"x"

    assert len(processes_that_use(folder)) == 2  # the guard and the server
    sockets = set(Path("/tmp").glob("seaweedfs-*.sock"))  # noqa: S108  (where the server puts them)
    process.send_signal(number)
    assert process.wait(20) == 0
    assert processes_that_use(folder) == []
    assert list(folder.iterdir()) == []
    port = exported["AWS_ENDPOINT_URL"].rpartition(":")[2]
    assert any(port in path.name for path in sockets)
    assert not list(Path("/tmp").glob(f"seaweedfs-*{port}.sock"))  # noqa: S108  (as above)


def test_it_dies_with_its_parent_even_if_that_is_killed(started):
    process, _, folder = started
    process.kill()
    wait_until(lambda: not processes_that_use(folder))
    wait_until(lambda: not list(folder.iterdir()))


def test_the_server_dies_with_its_guard(started):
    process, _, folder = started
    guard = min(processes_that_use(folder))
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not processes_that_use(folder))
    process.terminate()
    assert process.wait(20) == 0
    assert list(folder.iterdir()) == []
