"""Small runs in memory, for the tests beside this file."""

from __future__ import annotations

import itertools
import json
import pickle

from blake3 import blake3

from ckptstore.events import silent
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.testing.simulated import CountedIds, ManualClock

_digits = itertools.cycle("123456789abcdef")


class Job:
    """One start of a training job on a store."""

    def __init__(self, store, *, job="job", observer=silent, options=None):
        ids = CountedIds(next(_digits))
        self.store, self.clock = store, ManualClock()
        self.log = RunLog.create(store, clock=self.clock, ids=ids, options=options or LogOptions(), observer=observer)
        self.incarnation = Incarnation(ids.nonce(), job=job, host="host")
        self.catalog = Catalog(self.log)

    def save(self, name, *, step=0, seed=0, world_size=1):
        return simulated.save(self.log, self.incarnation, name, step=step, seed=seed, world_size=world_size)


def carried(value):
    """Return what another process unpickles."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301  (our own bytes)


def a_run(saves=3):
    """Return a store with a run of so many saves, and its job."""
    job = Job(MemoryStore(clock=ManualClock()))
    for number in range(1, saves + 1):
        job.save(f"step-{number}", step=number, seed=number)
    return job.store, job


def opened(store, **given):
    """Return a catalog as a reader opens it."""
    return Catalog(RunLog.open(store, clock=ManualClock(), **given))


def body_of(store, key):
    return store.get(key, max_bytes=2**30)


def sealed(value):
    """Return a record's bytes with the right seal, whatever it says."""
    value = {key: inner for key, inner in value.items() if key != "self"}
    head = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    return head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'


def next_record(store, **fields):
    """Return the next slot's key and the bytes of a record that links to the last one."""
    slots = sorted(info.key for info in store.list("log/"))
    last = body_of(store, slots[-1])
    value = {
        "format": 1,
        "run": json.loads(last)["run"],
        "seq": len(slots),
        "writer": "e" * 32,
        "written_at": "2026-01-02T00:00:00.000Z",
        "prev": blake3(last).hexdigest(),
        **fields,
    }
    return slot_key(len(slots)), sealed(value)


def append_raw(store, **fields):
    """Append a record that nobody has checked, as a faulty tool or a later release would."""
    key, body = next_record(store, **fields)
    store.put(key, body)
    return int(key[4:16])
