"""Where a test's run may be: every engine, on every server that it is tested against."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

import pytest

from ckptstore.objectstore.urls import open_store
from localstack.server import Server

SERVERS = {
    "seaweedfs": "seaweedfs",
    "moto": "moto_server",
    "rclone": "rclone",
    "juicefs": "juicefs",
    "fakegcs": "fake_gcs",
    "book": "by_the_book",
    "azurite": "azurite",
}
"""The fixture of each server."""


@dataclass(frozen=True)
class Place:
    """The root of a run that does not exist yet, and how it is reached; also by child processes, when pickled.

    Args:
        url: The root.
        engine: What moves the bytes.
        options: The `storage_options`.
        server: Behind it, if there is one.
    """

    url: str
    engine: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    server: Server | None = None

    @property
    def access(self):
        """What a store, a writer and a reader take."""
        return {"engine": self.engine, "storage_options": self.options}

    def store(self, **more):
        return open_store(self.url, **self.access, **more)

    def through(self, endpoint):
        """Return the same place, reached through a proxy."""
        return replace(self, options=self.server.options(endpoint))

    def __reduce__(self):
        return Place, (self.url, self.engine, self.options)


def place_at(name: str, request: pytest.FixtureRequest) -> Place:
    """Return a fresh place: `memory`, `files`, `fsspec-memory`, `fsspec-files`, or engine and server: `s3fs-moto`."""
    fresh = secrets.token_hex(8)
    if name in ("memory", "fsspec-memory"):
        return Place(f"memory://{fresh}", *(["fsspec"] if name != "memory" else []))
    if name in ("files", "fsspec-files"):
        root = request.getfixturevalue("tmp_path") / "run"
        return Place(str(root), *(["fsspec"] if name != "files" else []))
    engine, _, server_name = name.partition("-")
    server = request.getfixturevalue(SERVERS[server_name])
    return Place(server.url(f"tests/{fresh}/run"), engine, server.options(), server)


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these places: it asks for the fixture `place`."""
    local = ("memory", "files", "fsspec-memory", "fsspec-files")
    params = [pytest.param(name, marks=[] if name in local else pytest.mark.servers) for name in names]
    return pytest.mark.parametrize("place", params, indirect=True)
