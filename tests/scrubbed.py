"""A run to be damaged, scrubbed and repaired: two tensors on each of three ranks, and documents."""

from __future__ import annotations

import contextlib
import json

import numpy as np

from ckptstore.format.documents import encode_documents
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.maintenance.repair import Repair
from ckptstore.maintenance.scrub import Scrub
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_parts
from ckptstore.testing.simulated import CountedIds, ManualClock
from ckptstore.transfer.upload import upload_shard

RANKS = 3
SMALL = TransferOptions(fetches_in_flight=1)
MANY = TransferOptions(fetches_in_flight=4)


def rows(name, rank, seed):
    """Return what `rank` holds of a tensor."""
    generator = np.random.default_rng([seed, rank, len(name)])
    return generator.standard_normal(40, dtype=np.float32)


class Run:
    """A run, and one job that saves."""

    def __init__(self, store, *, digit="a", job="job", clock=None):
        self.store = store
        self.clock, self.ids = clock or ManualClock(), CountedIds(digit)
        self.log = RunLog.create(store, clock=self.clock, ids=self.ids, options=LogOptions(deadline_seconds=5))
        self.job = Incarnation(self.ids.nonce(), job=job, host="host")

    @property
    def catalog(self):
        return Catalog(self.log)

    def save(self, step):
        """Save what `values(step)` returns; the clock goes on by 100 s before."""
        self.clock.sleep(100)
        attempt = begin(
            self.log,
            self.job,
            checkpoint_id=f"step-{step}",
            world_size=RANKS,
            description=Description(step, documents=encode_documents({"step": step})),
        )
        shards = [self._upload(attempt, rank, step) for rank in range(RANKS)]
        return commit(self.log, self.job, attempt, shards, options=SMALL)

    def _upload(self, attempt, rank, seed):
        bodies = [rows(name, rank, seed) for name in ("w", "bias")]
        chunks = [Chunk(TensorMeta(name, "float32", (40 * RANKS,)), (40 * rank,), (40,), 160) for name in ("w", "bias")]
        layout = lay_out(chunks)
        ordered = [[bodies[number].tobytes()] for number in layout.order]
        key = attempt.stem.shard_key(rank)
        return StoredShard(upload_shard(self.store, key, layout, ordered, rank=rank, options=SMALL), layout.items)

    def scrub(self, *, again=None, options=SMALL, **more):
        return Scrub(self.log, options=options, again=lambda: again or self.store, **more)

    def repair(self, *, store=None):
        """Return the repair of whoever opens the run now; its calls go to `store`."""
        log = RunLog.open(
            store or self.store, clock=ManualClock(), ids=CountedIds("b"), options=LogOptions(deadline_seconds=5)
        )
        return Repair(log, options=SMALL, again=lambda: store or self.store)


def opened(store):
    return Catalog(RunLog.open(store, clock=ManualClock()))


def body_of(store, key):
    return store.get(key, max_bytes=1 << 26)


def contents(store, prefix=""):
    """Return every object with its bytes."""
    return {info.key: body_of(store, info.key) for info in store.list(prefix)}


def copy_of(store, other):
    """Copy every object."""
    for key, body in contents(store).items():
        other.put(key, body)
    return other


def flip(store, key, position):
    """Flip one bit of an object."""
    body = bytearray(body_of(store, key))
    body[position] ^= 1
    store.put(key, bytes(body))


def stored_in(store, committed):
    """Return the shards as the parts tell of them."""
    return [stored for part in load_parts(store, committed) for stored in part.shards]


def is_whole(store, committed, step):
    """Say whether every tensor of a checkpoint is what was saved."""
    for stored in stored_in(store, committed):
        for item in stored.items:
            found = bytes(store.get_range(stored.shard.path, start=item.position, length=item.chunk.nbytes))
            if found != rows(item.chunk.tensor.name, stored.shard.rank, step).tobytes():
                return False
    return opened(store).verify(committed, level="full").ok


class FlippingStore(ForwardingStore):
    """Flips a bit of every ranged read of one object on its way, and leaves what is stored as it is."""

    def __init__(self, inner, key, *, times=1 << 30):
        super().__init__(inner)
        self.key, self.times = key, times

    def get_range(self, key, *, start, length):
        body = bytearray(super().get_range(key, start=start, length=length))
        if key == self.key and self.times > 0:
            self.times -= 1
            body[len(body) // 2] ^= 1
        return bytes(body)


def forget_log(store):
    """Lose every record, as a lifecycle rule would."""
    for info in list(store.list("log/")):
        store.delete(info.key)


def note_of(log, seq):
    """Return what the newest record that set a checkpoint aside says."""
    found = [json.loads(entry.body) for entry in log.records()]
    with contextlib.suppress(IndexError):
        return [each["note"] for each in found if each["kind"] == "SET_ASIDE" and seq in each["seqs"]][-1]
    return None
