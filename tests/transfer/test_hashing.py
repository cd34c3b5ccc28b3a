"""Threads hash the same leaves to the same table, whatever the pieces are that come."""

import threading

import numpy as np
import pytest

from ckptstore.format.checksum import LeafHasher
from ckptstore.format.shard import leaf_bytes_of
from ckptstore.transfer.hashing import LeafTable
from ckptstore.units import KIB, MIB

SIZES = [0, 1, 64 * KIB, 64 * KIB + 1, 700 * KIB, 5 * MIB + 3, 0, 17, 9 * MIB, *[100] * 500, 3 * MIB, 40 * MIB + 1]
BYTES = memoryview(np.random.default_rng(7).bytes(max(SIZES)))


def plain_table():
    hasher = LeafHasher()
    for size in SIZES:
        hasher.begin(leaf_bytes_of(size))
        hasher.update(BYTES[:size])
        hasher.finish()
    return bytes(hasher.table)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [5 * MIB + 1, 16 * MIB])
def test_the_table_is_that_of_one_thread(threads, part_bytes):
    draw, filled = np.random.default_rng(threads), 0
    with LeafTable(threads=threads) as leaves:
        for size in SIZES:
            leaves.begin(leaf_bytes_of(size))
            start = 0
            while start < size:
                end = min(size, start + draw.choice([1, 1000, 64 * KIB, MIB, 4 * MIB]), start + part_bytes - filled)
                leaves.update(BYTES[start:end])
                filled += end - start
                start = end
                if filled == part_bytes:
                    leaves.flush()
                    filled = 0
            leaves.finish()
        assert leaves.table() == plain_table()


def test_what_was_hashed_is_let_go():
    data = bytearray(6 * MIB)
    with LeafTable(threads=1) as leaves:
        leaves.begin(MIB)
        view = memoryview(data)
        leaves.update(view[: 5 * MIB + 1])
        leaves.flush()
        assert leaves._last is not None
        leaves._last.result(10)
        view.release()
        data.append(0)  # refused while anything views it


def test_no_thread_is_left_after_an_error():
    before = threading.active_count()

    def fails():
        with LeafTable(threads=3) as leaves:
            leaves.begin(4 * MIB)
            leaves.update(BYTES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert threading.active_count() == before
