"""The servers as pytest fixtures. A test that asks for one should be marked `servers`."""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
from collections.abc import Iterator
from typing import Protocol

import pytest

from localstack.azurite import COMMAND, INSTALL, Azurite, find_azurite
from localstack.fake_gcs import FakeGcs
from localstack.juicefs import JuiceFS
from localstack.moto import Moto
from localstack.proxy import Proxy
from localstack.rclone import Rclone
from localstack.seaweedfs import SeaweedFS
from localstack.server import Server

# What clients of object stores find in the environment, by how the names begin.
CLIENTS_READ = ("AWS_", "GOOGLE_", "GCSFS_", "FSSPEC_", "AZURE_", "AZURITE_", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK")


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedFS]:
    """One server for all tests of this process. So are the others below."""
    with SeaweedFS() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Moto]:
    """See `Moto`."""
    with Moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[Rclone]:
    """See `Rclone`."""
    with Rclone() as server:
        yield server


@pytest.fixture(scope="session")
def juicefs() -> Iterator[JuiceFS]:
    """See `JuiceFS`."""
    with JuiceFS() as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[FakeGcs]:
    """See `FakeGcs`."""
    with FakeGcs() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """See `Azurite`. It comes by npm, so a test that asks for it is skipped where it is not installed."""
    if find_azurite() is None:
        pytest.skip(f"There is no `{COMMAND}` command here. Run: {INSTALL}")
    with Azurite() as server:
        yield server


@pytest.fixture
def s3_url(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nobody else uses, with the environment set so that it is found, here and in child processes."""
    return fresh_url(seaweedfs, monkeypatch)


@pytest.fixture
def gs_url(fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same as `s3_url`, for Google's storage."""
    return fresh_url(fake_gcs, monkeypatch)


class OpenProxies(Protocol):
    """What the fixture `proxied` is."""

    def __call__(self, server: Server, *, tls: ssl.SSLContext | None = None, seed: int = 0) -> Proxy:
        """Return a proxy that runs, in front of `server`."""


@pytest.fixture
def proxied() -> Iterator[OpenProxies]:
    """Return a function that puts a proxy in front of a server for the length of the test. See `Proxy`."""
    with contextlib.ExitStack() as proxies:

        def proxied(server: Server, *, tls: ssl.SSLContext | None = None, seed: int = 0) -> Proxy:
            return proxies.enter_context(Proxy(server.endpoint, tls=tls, seed=seed))

        yield proxied


@pytest.fixture
def az_url(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same as `s3_url`, for Azure."""
    return fresh_url(azurite, monkeypatch)


def fresh_url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a prefix that nobody else uses, and set the environment so that `server`, and no other, is found."""
    for name in [name for name in os.environ if name.startswith(CLIENTS_READ)]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.url(f"tests/{secrets.token_hex(8)}/run")
