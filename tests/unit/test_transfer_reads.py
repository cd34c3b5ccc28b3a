"""Verified ranged reads."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import IntegrityError
from ckptstore.format.dtypes import dtype_named
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import BoxRead, check_shard, read_boxes, verify_shard
from ckptstore.transfer.upload import upload_shard
from ckptstore.units import KIB

SMALL_FETCHES = TransferOptions(fetch_bytes=150 * KIB, fetches_in_flight=3)


def whole(name, dtype, shape):
    return Chunk(
        TensorMeta(name, dtype, shape), (0,) * len(shape), shape, math.prod(shape) * dtype_named(dtype).itemsize
    )


def random_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def upload(store, chunks, bodies, key="shard"):
    layout = lay_out(chunks)
    ordered = [[bodies[index]] for index in layout.order]
    shard = upload_shard(store, key, layout, ordered, rank=0, options=TransferOptions())
    return StoredShard(shard, layout.items)


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 90), min_size=0, max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    dtype = draw(st.sampled_from(["int8", "float16", "float32", "float64", "complex128"]))
    axes = draw(st.permutations(range(len(shape) + 1)))
    return shape, offsets, lengths, dtype, tuple(axes)


@settings(max_examples=150, deadline=None)
@given(boxes())
def test_any_box_of_any_chunk_arrives_in_an_array_of_any_strides(drawn):
    shape, offsets, lengths, dtype, axes = drawn
    chunk, store = whole("w", dtype, shape), MemoryStore()
    body = random_bytes(chunk.nbytes)
    stored = upload(store, [chunk], [body])
    full = (*lengths, dtype_named(dtype).itemsize)
    out = np.zeros([full[axis] for axis in axes], np.uint8).transpose(np.argsort(axes))
    assert out.shape == full
    read_boxes(store, [BoxRead(stored.shard, stored.items[0], offsets, lengths, out)], options=SMALL_FETCHES)
    box = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
    np.testing.assert_array_equal(out, body.reshape(*shape, full[-1])[box])


def test_a_flip_in_any_leaf_stops_the_read_before_it_reaches_the_array():
    chunk, store = whole("w", "uint8", (300_000,)), MemoryStore()
    stored = upload(store, [chunk], [random_bytes(300_000)])
    check_shard(store, stored.shard)
    verify_shard(store, stored, options=SMALL_FETCHES)
    body = bytearray(store.get("shard", max_bytes=10**7))
    body[stored.items[0].position + 200_000] ^= 4
    store.put("shard", bytes(body))
    out = np.zeros((300_000, 1), np.uint8)
    with pytest.raises(IntegrityError, match="Leaf 3 of 'w'"):
        read_boxes(store, [BoxRead(stored.shard, stored.items[0], (0,), (300_000,), out)], options=SMALL_FETCHES)
    assert not out[196_608:262_144].any()
