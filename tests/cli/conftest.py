"""A run to look at, and the commands in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from blake3 import blake3
from typer.testing import CliRunner

from ckptstore.cli.app import app
from ckptstore.format.records import MAX_RECORD_BYTES
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated


@dataclass
class Run:
    """A run under construction; whoever reigns is `job`."""

    url: str
    job: Incarnation = field(default_factory=lambda: Incarnation.new(job="gpt", host="node-1"))

    def __post_init__(self):
        self.log = RunLog.create(open_store(self.url))
        self.store = self.log.store

    @property
    def catalog(self):
        return Catalog(self.log)

    def save(self, name, **more):
        return simulated.save(self.log, self.job, name, **more)

    def save_described(self, name, **description):
        attempt = begin(self.log, self.job, checkpoint_id=name, world_size=1, description=Description(**description))
        return commit(self.log, self.job, attempt, [simulated.upload(self.store, attempt, 0)])

    def abandon(self, name, *, ranks=2):
        """Upload some shards of three, and no more."""
        attempt = begin(self.log, self.job, checkpoint_id=name, world_size=3)
        for rank in range(ranks):
            simulated.upload(self.store, attempt, rank)

    def flip(self, key, position):
        """Flip one bit of an object."""
        body = bytearray(self.store.get(key, max_bytes=1 << 24))
        body[position] ^= 1
        self.store.put(key, bytes(body))

    def append_foreign(self, **fields):
        """Put a well-formed record that this release cannot write into the next slot, and return the slot."""
        fold = self.log.refresh()
        value = {
            "format": 1,
            "prev": fold.last,
            "run": fold.run,
            "seq": fold.end,
            "writer": "someone",
            "written_at": "2027-01-01T00:00:00.000Z",
            **fields,
        }
        head = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
        body = head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'
        assert len(body) < MAX_RECORD_BYTES
        self.store.put(f"log/{fold.end:012d}.json", body)
        return fold.end


@pytest.fixture
def make_run():
    return Run


@pytest.fixture
def run(make_run, tmp_path):
    return make_run(str(tmp_path / "run"))


@dataclass
class Ended:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return self.out.splitlines()


@pytest.fixture
def ckptstore():
    """Run a command in this process."""

    def invoke(*arguments):
        ended = CliRunner().invoke(app, [str(each) for each in arguments])
        assert ended.exception is None or isinstance(ended.exception, SystemExit)
        assert "Traceback" not in ended.output
        return Ended(ended.exit_code, ended.stdout, ended.stderr)

    return invoke
