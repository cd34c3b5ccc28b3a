"""Shards to move about, and a store that counts what is asked of it."""

import math
import threading

import numpy as np

from ckptstore.format.dtypes import dtype_named
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import BoxRead
from ckptstore.transfer.upload import upload_shard
from ckptstore.units import KIB

SMALL_FETCHES = TransferOptions(fetch_bytes=150 * KIB, fetches_in_flight=3)


class CountingStore(MemoryStore):
    """A memory store that remembers every ranged read."""

    def __init__(self):
        super().__init__()
        self.ranges = []
        self.threads = set()

    def get_range(self, key, *, start, length):
        self.ranges.append((key, start, length))
        self.threads.add(threading.current_thread())
        return super().get_range(key, start=start, length=length)

    def change(self, key, change):
        body = bytearray(self.get(key, max_bytes=10**9))
        self.put(key, bytes(change(body) or body))

    def flip(self, key, position, bit=0):
        def change(body):
            body[position] ^= 1 << bit

        self.change(key, change)


def whole(name, dtype, shape):
    nbytes = math.prod(shape) * dtype_named(dtype).itemsize
    return Chunk(TensorMeta(name, dtype, shape), (0,) * len(shape), shape, nbytes)


def value(name, nbytes):
    return Chunk(TensorMeta(name, "bytes", (nbytes,)), (0,), (nbytes,), nbytes, "torch.save")


def random_bytes(chunk, seed=0):
    """Return bytes for a chunk, with the shape of its elements."""
    itemsize = dtype_named(chunk.tensor.dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, (*chunk.lengths, itemsize), np.uint8)


def upload(store, chunks, bodies, key="shard", rank=0):
    layout = lay_out(chunks)
    ordered = [[memoryview(bodies[index])] for index in layout.order]
    shard = upload_shard(store, key, layout, ordered, rank=rank, options=TransferOptions())
    return StoredShard(shard, layout.items)


def read_of(stored, name, offsets=None, lengths=None, out=None):
    """Return a read of (a box of) an item."""
    item = next(item for item in stored.items if item.chunk.tensor.name == name)
    lengths = item.chunk.lengths if lengths is None else lengths
    offsets = (0,) * len(lengths) if offsets is None else offsets
    if out is None:
        out = np.zeros((*lengths, dtype_named(item.chunk.tensor.dtype).itemsize), np.uint8)
    return BoxRead(stored.shard, item, offsets, lengths, out)
