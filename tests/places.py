"""Where a test's run may be: every engine, on every server that it is tested against."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from ckptstore import CheckpointStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions
from ckptstore.protocol.capable import PROBED, place_of
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

LOCAL = ("memory", "files", "fsspec-memory", "fsspec-files")
ON_SERVERS = (
    "obstore-seaweedfs",
    "obstore-moto",
    "s3fs-seaweedfs",
    "s3fs-moto",
    "gcsfs-fakegcs",
    "obstore-azurite",
)
EVERY = ("memory", "files", "fsspec-memory", *ON_SERVERS)
"""Wherever a run may be written to."""


@dataclass(frozen=True)
class Place:
    """The root of a run that does not exist yet, and how it is reached; also by child processes, when pickled.

    Args:
        url: The root.
        engine: What moves the bytes.
        options: The `storage_options`.
        server: Behind it, if there is one.
        promised: Whether a single writer is promised to whoever writes.
    """

    url: str
    engine: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    server: Server | None = None
    promised: bool = False

    @property
    def access(self):
        """What a store, a writer and a reader take."""
        return {"engine": self.engine, "storage_options": self.options}

    @property
    def promise(self):
        """What a writer takes besides."""
        return {"assume_single_writer": self.promised}

    @property
    def arguments(self):
        """What a command takes besides the root."""
        engine = [f"--engine={self.engine}"] if self.engine else []
        return [*engine, *(f"--option={name}={value}" for name, value in self.options.items())]

    def store(self, **more):
        return open_store(self.url, **self.access, **more)

    def contents(self):
        """Return every object with its bytes."""
        store = self.store()
        return {info.key: store.get(info.key, max_bytes=1 << 28) for info in store.list("")}

    def probed(self):
        """Let this process take the store for fit, which has tests of its own: racing creates take a server seconds."""
        store = self.store()
        PROBED.add(place_of(store))
        return self

    def opened(self):
        return CheckpointStore.open(self.url, **self.access, log=LogOptions(assume_single_writer=self.promised))

    def writer(self, **more):
        import storage_writers as sw  # noqa: PLC0415  (torch is for those who ask for it)

        return sw.CkptStoreWriter(self.url, **self.access, **self.promise, **more)

    def reader(self, **more):
        import storage_writers as sw  # noqa: PLC0415  (the same)

        return sw.CkptStoreReader(self.url, **self.access, **more)

    def below(self, name):
        """Return a place under this one."""
        return replace(self, url=f"{self.url}/{name}")

    def through(self, endpoint):
        """Return the same place, reached through a proxy."""
        return replace(self, options=self.server.options(endpoint))

    def promising(self):
        """Return the same place, with the promise of a single writer."""
        return replace(self, promised=True)

    def __reduce__(self):
        return Place, (self.url, self.engine, self.options, None, self.promised)


def place_at(name: str, request: pytest.FixtureRequest) -> Place:
    """Return a fresh place: `memory`, `files`, `fsspec-memory`, `fsspec-files`, or engine and server: `s3fs-moto`."""
    fresh = secrets.token_hex(8)
    if name in ("memory", "fsspec-memory"):
        return Place(f"memory://{fresh}", *(["fsspec"] if name != "memory" else []))
    if name in LOCAL:
        root = request.getfixturevalue("tmp_path") / "run"
        return Place(str(root), *(["fsspec"] if name != "files" else []))
    engine, _, server_name = name.partition("-")
    server = request.getfixturevalue(SERVERS[server_name])
    return Place(server.url(f"tests/{fresh}/run"), engine, server.options(), server)


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these places: it asks for the fixture `place`."""
    return pytest.mark.parametrize("place", [at(name) for name in names], indirect=True)


def at(name: str, *values: object, marks: Sequence[pytest.MarkDecorator] = ()) -> pytest.ParameterSet:
    """Return the parameters of one test of several: the place, and what else there is."""
    called = ", ".join(map(str, (name, *values)))
    return pytest.param(name, *values, id=called, marks=[*marks, *([] if name in LOCAL else [pytest.mark.servers])])
