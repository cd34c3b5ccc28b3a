"""Verified ranged reads fetch what they need, once, and put it where it belongs."""

import itertools
import math
import threading
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_samples import SMALL_FETCHES, CountingStore, random_bytes, read_of, upload, value, whole

from ckptstore.errors import IntegrityError, InvalidInputError, UnavailableError
from ckptstore.format.dtypes import dtype_named
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.boxes import next_in_box, touched_leaves
from ckptstore.transfer.budget import budget
from ckptstore.transfer.download import BoxRead, ReadStats, read_boxes, verify_shard
from ckptstore.transfer.spans import MAX_GAP_BYTES
from ckptstore.units import KIB, MIB

DTYPES = st.sampled_from(["int8", "float16", "float32", "float64", "complex128"])


@st.composite
def boxes(draw, elements=200_000):
    shape, room = [], elements
    for _ in range(draw(st.integers(0, 4))):
        shape.append(draw(st.integers(1, min(room, 700))))
        room //= shape[-1]
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return tuple(shape), offsets, lengths


def cut(body, offsets, lengths):
    return body[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))]


@settings(max_examples=200, deadline=None)
@given(boxes(), DTYPES, st.data())
def test_any_box_of_any_chunk_arrives_in_an_array_of_any_strides(box, dtype, data):
    shape, offsets, lengths = box
    chunk, store = whole("w", dtype, shape), MemoryStore()
    body = random_bytes(chunk)
    full = (*lengths, dtype_named(dtype).itemsize)
    axes = data.draw(st.permutations(range(len(full))))
    out = np.zeros([full[axis] for axis in axes], np.uint8).transpose(np.argsort(axes))
    stored = upload(store, [chunk], [body])
    read_boxes(store, [read_of(stored, "w", offsets, lengths, out)], options=SMALL_FETCHES)
    np.testing.assert_array_equal(out, cut(body, offsets, lengths))


@settings(max_examples=300, deadline=None)
@given(boxes(elements=3000), st.sampled_from([1, 4, 16, 64]))
def test_the_touched_leaves_are_those_that_hold_an_element_of_the_box(box, leaf_elements):
    shape, offsets, lengths = box
    inside = np.zeros(shape, bool)
    inside[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))] = True
    positions = np.flatnonzero(inside)
    assert touched_leaves(leaf_elements, shape, offsets, lengths) == sorted(set((positions // leaf_elements).tolist()))
    if inside.any():
        assert next_in_box(positions[-1] + 1, shape, offsets, lengths) is None


def test_reads_of_many_items_and_shards_arrive_each_in_its_place():
    store = CountingStore()
    chunks = [whole(f"t{n}", "float32", (n, 700)) for n in range(1, 40)] + [value("v", 5), whole("s", "int64", ())]
    bodies = [random_bytes(chunk, seed) for seed, chunk in enumerate(chunks)]
    shards = [upload(store, chunks, bodies, key=f"shard-{n}", rank=n) for n in range(3)]
    reads = [read_of(stored, chunk.tensor.name) for stored in shards for chunk in chunks]
    read_boxes(store, reads, options=SMALL_FETCHES)
    for read, body in zip(reads, bodies * 3, strict=True):
        np.testing.assert_array_equal(read.out, body)


def test_an_array_is_touched_in_its_box_only():
    chunk, store = whole("w", "int16", (300, 300)), MemoryStore()
    stored = upload(store, [chunk], [body := random_bytes(chunk)])
    target = np.full((302, 302, 2), 7, np.uint8)
    read_boxes(store, [read_of(stored, "w", out=target[1:-1, 1:-1])], options=SMALL_FETCHES)
    np.testing.assert_array_equal(target[1:-1, 1:-1], body)
    target[1:-1, 1:-1] = 7
    assert (target == 7).all()


# What it costs


def test_a_read_fetches_the_leaf_table_and_exactly_the_leaves_that_it_touches():
    chunk, store = whole("w", "uint8", (4 * MIB,)), CountingStore()
    stored = upload(store, [chunk], [random_bytes(chunk)])
    leaf, item = stored.items[0].leaf_bytes, stored.items[0]
    stats = read_boxes(store, [read_of(stored, "w", (leaf + 5,), (leaf,))], options=TransferOptions())
    table = (stored.shard.path, stored.shard.leaf_table_offset, 32 * 32)
    assert store.ranges == [table, (stored.shard.path, item.position + leaf, 2 * leaf)]
    assert stats == ReadStats(bytes_fetched=32 * 32 + 2 * leaf, requests=2)


@settings(max_examples=50, deadline=None)
@given(st.lists(boxes(elements=60_000), min_size=1, max_size=5), st.integers(1, 400) | st.just(8192))
def test_no_leaf_is_fetched_twice_and_little_that_is_not_needed(drawn, fetch_kib):
    store = CountingStore()
    chunks = [whole(str(index), "float64", shape) for index, (shape, _, _) in enumerate(drawn)]
    stored = upload(store, chunks, [random_bytes(chunk) for chunk in chunks])
    reads = [read_of(stored, str(index), offsets, lengths) for index, (_, offsets, lengths) in enumerate(drawn)]
    options = TransferOptions(fetch_bytes=fetch_kib * KIB, fetches_in_flight=2)
    stats = read_boxes(store, reads + reads[:2], options=options)
    tables = [r for r in store.ranges if r[1] == stored.shard.leaf_table_offset]
    spans = sorted(r for r in store.ranges if r[1] != stored.shard.leaf_table_offset)
    assert len(tables) == any(read.out.size for read in reads)
    assert all(a + n <= b for (_, a, n), (_, b, _) in itertools.pairwise(spans))
    needed = sum(read.out.size + 2 * read.item.leaf_bytes * math.prod(read.lengths[:-1]) for read in reads)
    assert sum(n for _, _, n in spans) <= needed + MAX_GAP_BYTES * len(reads)
    assert all(n <= max(options.fetch_bytes, *(item.leaf_bytes for item in stored.items)) for _, _, n in spans)
    assert stats == ReadStats(sum(n for _, _, n in store.ranges), len(store.ranges))


def test_several_reads_of_one_item_fetch_each_of_its_leaves_once():
    chunk, store = whole("w", "uint8", (2 * MIB,)), CountingStore()
    stored = upload(store, [chunk], [body := random_bytes(chunk)])
    reads = [read_of(stored, "w", (start,), (100_000,)) for start in (0, 50_000, 130_000, 50_000)]
    read_boxes(store, reads, options=TransferOptions())
    for read in reads:
        np.testing.assert_array_equal(read.out, cut(body, read.offsets, read.lengths))
    assert store.ranges[1:] == [("shard", stored.items[0].position, 4 * 64 * KIB)]


def test_fifty_thousand_tiny_items_are_few_requests_and_little_work():
    chunks = [whole(f"layers.{n}.w", "float32", (16, 16)) for n in range(50_000)]
    body = np.random.default_rng(0).integers(0, 256, (50_000, 16, 16, 4), np.uint8)
    store = CountingStore()
    stored = upload(store, chunks, body)
    out = np.zeros_like(body)
    reads = [BoxRead(stored.shard, item, (0, 0), (16, 16), out[n]) for n, item in enumerate(stored.items)]
    began = time.process_time()
    stats = read_boxes(store, reads, options=TransferOptions())
    assert time.process_time() - began < 6  # about 1 second on one of today's cores
    assert stats.requests == len(store.ranges) == 8
    np.testing.assert_array_equal(out, body)


def test_a_large_item_is_read_with_a_few_fetches_in_memory():
    chunk, store = whole("w", "float32", (4096, 8192)), MemoryStore()
    stored = upload(store, [chunk], [body := random_bytes(chunk)])
    options = TransferOptions(fetch_bytes=4 * MIB, fetches_in_flight=3)
    for read in (read_of(stored, "w"), read_of(stored, "w", (0, 2048), (4096, 2048))):
        tracemalloc.start()
        try:
            read_boxes(store, [read], options=options)
            assert tracemalloc.get_traced_memory()[1] < (3 + 2) * 4 * MIB + MIB  # two are hashed meanwhile
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(read.out, cut(body, read.offsets, read.lengths))


def test_small_items_that_are_not_wanted_are_passed_over_in_one_request():
    chunks = [whole(f"t{n}", "uint8", (1000,)) for n in range(100)]
    store = CountingStore()
    stored = upload(store, chunks, bodies := [random_bytes(chunk, n) for n, chunk in enumerate(chunks)])
    reads = [read_of(stored, f"t{n}") for n in range(0, 100, 2)]
    assert read_boxes(store, reads, options=TransferOptions()).requests == 2
    for read, body in zip(reads, bodies[::2], strict=True):
        np.testing.assert_array_equal(read.out, body)


def test_what_is_large_and_not_wanted_is_not_fetched():
    chunks, store = (
        [whole(name, "uint8", (20 * KIB,)) for name in "abc"] + [whole("d", "uint8", (MIB,))],
        CountingStore(),
    )
    stored = upload(store, chunks, [random_bytes(chunk) for chunk in chunks])
    a, _, c, d = (item.position for item in stored.items)
    reads = [read_of(stored, "a"), read_of(stored, "c"), read_of(stored, "d", (100 * KIB,), (1,))]
    read_boxes(store, reads, options=TransferOptions())
    spans = sorted((start, length) for _, start, length in store.ranges[1:])
    assert spans == [(a, 20 * KIB), (c, 20 * KIB), (d + 64 * KIB, 64 * KIB)]


def test_nothing_is_fetched_for_boxes_that_are_empty():
    chunk, store = whole("w", "uint8", (10, 10)), CountingStore()
    stored = upload(store, [chunk, whole("none", "float32", (0, 4))], [random_bytes(chunk), b""])
    reads = [read_of(stored, "w", (3, 3), (0, 5)), read_of(stored, "none")]
    assert read_boxes(store, reads, options=TransferOptions()) == ReadStats(0, 0)
    assert not store.ranges


def test_progress_adds_up_to_the_leaves():
    chunk, store = whole("w", "uint8", (1_000_000,)), MemoryStore()
    stored, told = upload(store, [chunk], [random_bytes(chunk)]), []
    read_boxes(store, [read_of(stored, "w")], options=SMALL_FETCHES, on_verified=told.append)
    assert sum(told) == 1_000_000
    assert len(told) == 8


# What ends it


def test_several_reads_are_in_flight_and_no_thread_outlives_the_call():
    chunk, store = whole("w", "uint8", (4 * MIB,)), CountingStore()
    stored = upload(store, [chunk], [random_bytes(chunk)])
    before = threading.active_count()
    read_boxes(store, [read_of(stored, "w")], options=SMALL_FETCHES)
    assert threading.active_count() == before
    assert threading.main_thread() not in {thread for thread in store.threads if "fetch" in thread.name}
    assert len(store.threads) > 1


class FailingStore(CountingStore):
    """Fails every ranged read from the fifth on."""

    def get_range(self, key, *, start, length):
        data = super().get_range(key, start=start, length=length)
        if len(self.ranges) >= 5:
            raise UnavailableError("The store is away.")
        return data


def test_the_first_error_stops_the_others_and_says_what_was_written():
    chunks = [whole(f"t{n:03d}", "uint8", (140_000,)) for n in range(100)]
    store = FailingStore()
    stored = upload(store, chunks, [random_bytes(chunk) for chunk in chunks])
    reads, before = [read_of(stored, chunk.tensor.name) for chunk in chunks], threading.active_count()
    with pytest.raises(UnavailableError) as caught:
        read_boxes(store, reads, options=SMALL_FETCHES)
    touched = [read.item.chunk.tensor.name for read in reads if read.out.any()]
    assert set(touched) <= set(caught.value.facts["written"])
    assert caught.value.facts["written_count"] == len(caught.value.facts["written"]) <= 4
    assert len(store.ranges) < 10
    assert threading.active_count() == before


class Killed(BaseException):
    """No handler for errors sees it."""


def test_what_is_no_error_stops_the_read_as_well():
    class DyingStore(CountingStore):
        def get_range(self, key, *, start, length):
            data = super().get_range(key, start=start, length=length)
            if len(self.ranges) == 3:
                raise Killed
            return data

    chunk, store, before = whole("w", "uint8", (8 * MIB,)), DyingStore(), threading.active_count()
    stored = upload(store, [chunk], [random_bytes(chunk)])
    with pytest.raises(Killed):
        read_boxes(store, [read_of(stored, "w")], options=SMALL_FETCHES)
    assert threading.active_count() == before
    assert len(store.ranges) < 8


def test_a_shard_that_is_gone_is_damage_and_no_absent_checkpoint():
    """I4."""
    chunk, store = whole("w", "uint8", (10,)), MemoryStore()
    stored = upload(store, [chunk], [random_bytes(chunk)])
    store.delete("shard")
    with pytest.raises(IntegrityError, match="shard is missing") as caught:
        read_boxes(store, [read_of(stored, "w")], options=TransferOptions())
    assert (caught.value.facts["found"], caught.value.facts["expected"]) == (None, stored.shard.size)


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("offsets", "lengths", "out"),
    [
        ((0, 8), (4, 3), None),
        ((-1, 0), (4, 3), None),
        ((0, 0), (-1, 3), np.zeros((0, 3, 4), np.uint8)),
        ((0,), (4,), None),
        ((0, 0), (4, 4), np.zeros((4, 4), np.uint8)),
        ((0, 0), (4, 4), np.zeros((4, 4, 4), np.int8)),
        ((0, 0), (4, 4), np.zeros((4, 3, 4), np.uint8)),
        ((0, 0), (4, 4), read_only(np.zeros((4, 4, 4), np.uint8))),
    ],
)
def test_a_read_that_does_not_fit_is_refused_before_anything_is_fetched(offsets, lengths, out):
    chunk, store = whole("w", "float32", (10, 10)), CountingStore()
    stored = upload(store, [chunk], [random_bytes(chunk)])
    good = read_of(stored, "w")
    with pytest.raises(InvalidInputError, match="'w'"):
        read_boxes(store, [good, read_of(stored, "w", offsets, lengths, out)], options=TransferOptions())
    assert not store.ranges
    assert not good.out.any()


def test_reads_hold_no_more_than_the_budget_however_many_are_allowed():
    class Watched(CountingStore):
        def get_range(self, key, *, start, length):
            if length > 10_000:  # no leaf table
                held.append(budget().held_bytes)
            return super().get_range(key, start=start, length=length)

    held, store, chunk = [], Watched(), whole("w", "uint8", (40 * MIB,))
    body = random_bytes(chunk)
    stored = upload(store, [chunk], [body])
    options = TransferOptions(transfer_bytes=9 * MIB, part_bytes=5 * MIB, fetch_bytes=32 * MIB, fetches_in_flight=8)
    read = read_of(stored, "w")
    read_boxes(store, [read], options=options)
    assert np.array_equal(read.out, body)
    assert 0 < max(held) <= options.transfer_bytes
    held.clear()
    smaller = replace(options, fetch_bytes=4 * MIB)
    assert verify_shard(store, stored, options=smaller) == stored.shard.size
    assert 4 * MIB <= max(held) <= smaller.transfer_bytes
    assert budget().held_bytes == 0


def test_no_more_are_fetched_at_once_than_is_allowed_while_others_are_hashed():
    class Watched(CountingStore):
        def get_range(self, key, *, start, length):
            with lock:
                now.append(start)
                most.append(len(now))
            time.sleep(0.002)
            try:
                return super().get_range(key, start=start, length=length)
            finally:
                with lock:
                    now.remove(start)

    now, most, lock, store, chunk = [], [], threading.Lock(), Watched(), whole("w", "uint8", (8 * MIB,))
    stored = upload(store, [chunk], [random_bytes(chunk)])
    read_boxes(store, [read_of(stored, "w")], options=TransferOptions(fetch_bytes=256 * KIB, fetches_in_flight=3))
    assert max(most) == 3
    assert len({thread.name for thread in store.threads}) > 1
