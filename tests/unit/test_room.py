"""The ranges of a staging pool: none is handed out twice, and none is lost."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage_writers.pool import ALIGN_BYTES, Arena, Room, aligned, free_bytes

NBYTES = 100 * ALIGN_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, NBYTES // 4), st.integers(0, 99)), max_size=60))
def test_no_range_is_handed_out_twice_and_all_room_comes_back_in_one(steps):
    room, taken = Room(NBYTES), []
    for wants, nbytes, which in steps:
        if wants:
            if (start := room.take(nbytes)) is not None:
                assert start % ALIGN_BYTES == 0
                assert start + aligned(nbytes) <= NBYTES
                assert all(start + nbytes <= other or other + length <= start for other, length in taken)
                taken.append((start, nbytes))
        elif taken:
            room.give(*taken.pop(which % len(taken)))
    for start, nbytes in taken:
        room.give(start, nbytes)
    assert room.take(NBYTES) == 0
    assert room.take(1) is None


def test_an_aligned_part_of_a_range_can_be_given_back():
    room = Room(NBYTES)
    assert room.take(NBYTES) == 0
    room.give(ALIGN_BYTES, 2 * ALIGN_BYTES)
    assert room.take(3 * ALIGN_BYTES) is None
    room.give(0, ALIGN_BYTES)
    assert room.take(3 * ALIGN_BYTES) == 0


def test_a_view_of_an_arena_is_where_it_says_and_nothing_else_is_in_it():
    arena = Arena(10 * ALIGN_BYTES)
    like = torch.empty(3, 5, dtype=torch.float64).T
    view = arena.view(2 * ALIGN_BYTES, like)
    assert (view.shape, view.dtype, view.is_contiguous()) == (like.shape, like.dtype, True)
    assert arena.offset_of(view) == 2 * ALIGN_BYTES
    assert arena.offset_of(view[1]) == 2 * ALIGN_BYTES + 24
    assert arena.offset_of(like) is None
    assert arena.offset_of(torch.empty(0)) is None


def test_what_is_free_is_less_than_the_host_has():
    host = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    assert 0 < free_bytes() < host * 1024


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


VERSIONS = {
    "v2": ("0::/job/task", "", "memory__max", "memory__current", "inactive_file"),
    "v1": (
        "5:cpu:/\n4:memory:/job/task\n0::/",
        "memory",
        "memory__limit_in_bytes",
        "memory__usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_free_is_what_the_tightest_control_group_leaves(tmp_path, version):
    said, root, limit, usage, cache = VERSIONS[version]
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    put(proc, meminfo="MemTotal: 99 kB\nMemAvailable: 50 kB\n")
    put(proc / "self", cgroup=said)
    assert free_bytes(proc=proc, groups=groups) == 50 * 1024
    job, task = groups / root / "job", groups / root / "job" / "task"
    put(task, **{limit: "40000", usage: "30000", "memory__stat": f"anon 5\n{cache} 700\n"})
    assert free_bytes(proc=proc, groups=groups) == 10_700
    put(job, **{limit: "35000", usage: "34000"})
    assert free_bytes(proc=proc, groups=groups) == 1000
    put(job, **{limit: "max", usage: "34000"})
    assert free_bytes(proc=proc, groups=groups) == 10_700
    put(task, **{limit: "20000"})
    assert free_bytes(proc=proc, groups=groups) == 0
