"""Very many small tensors, and one that is larger than what may be held in memory."""

import resource
import shutil

import pytest
import torch
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
