"""Very many small tensors, and one that is larger than what may be held in memory."""

import resource
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from counted import calls_of
from states import blank, same

import storage_writers as sw

MIB = 1 << 20


def many(count):
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, 256, generator=generator)  # 1 KiB each
    return {f"layers.{index}.w": values[index].clone() for index in range(count)}


def test_fifty_thousand_small_tensors_are_saved_and_loaded_with_no_more_bytes_than_they_have(tmp_path):
    count = 50_000
    state = many(count)
    sw.save(state, checkpoint_id="many", storage_writer=sw.CkptStoreWriter(tmp_path))
    target = blank(state)
    reader = sw.CkptStoreReader(tmp_path)
    sw.load(target, storage_reader=reader)
    assert same(target, state)
    assert reader.report.bytes_fetched < count * (1024 + 32) * 1.01


def work_of_ours(state, root):
    save = calls_of(lambda: sw.save(state, checkpoint_id="many", storage_writer=sw.CkptStoreWriter(root)))
    target = blank(state)
    load = calls_of(lambda: sw.load(target, storage_reader=sw.CkptStoreReader(root)))
    assert same(target, state)
    return save, load


def work_of_dcp(state, root):
    save = calls_of(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(root)))
    target = blank(state)
    load = calls_of(lambda: dcp.load(target, storage_reader=dcp.FileSystemReader(root)))
    assert same(target, state)
    return save, load


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_small_tensors_take_less_than_half_of_the_work_that_dcp_s_files_take(tmp_path):
    """This thread's: each side has others, which do the reading and the hashing."""
    state = many(1000)
    work_of_ours(many(10), tmp_path / "first")
    ours, theirs = work_of_ours(state, tmp_path / "ours"), work_of_dcp(state, tmp_path / "theirs")
    for mine, their in zip(ours, theirs, strict=True):
        assert mine < 0.45 * their


def peak_rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def save_and_load_large(url, mib):
    """Save a tensor and load it back into its own memory; return whether it is whole, and what both took beyond it."""
    rows = mib * MIB // 4 // 1024
    tensor = torch.empty(rows, 1024)
    for start in range(0, rows, 1 << 16):
        tensor[start : start + (1 << 16)] = torch.arange(start, min(start + (1 << 16), rows)).unsqueeze(1)
    before = peak_rss()
    sw.save({"w": tensor}, checkpoint_id="large", storage_writer=sw.CkptStoreWriter(url))
    after_save = peak_rss()
    tensor.fill_(-1)
    sw.load({"w": tensor}, storage_reader=sw.CkptStoreReader(url))
    after_load = peak_rss()
    whole = all(bool((tensor[row] == row).all()) for row in [*range(0, rows, 9973), rows - 1])
    return whole, after_save - before, after_load - after_save


@pytest.mark.parametrize("mib", [512, pytest.param(6144, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_tensor_is_streamed_in_bounded_memory(gang, tmp_path, mib):
    """Real ranks, because only a process of its own tells its peak memory."""
    ((whole, saving, loading),) = gang.values(1, save_and_load_large, str(tmp_path), mib, seconds=800)
    shutil.rmtree(tmp_path)  # pytest would keep it
    assert whole
    assert saving < 192 * MIB
    assert loading < 192 * MIB
