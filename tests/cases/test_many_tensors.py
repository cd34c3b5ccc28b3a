"""Tens of thousands of tiny tensors cost requests by the file, and time and manifest bytes by the tensor."""

import time

import numpy as np
import torch
from case_samples import writer
from states import blank, same

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.observed import ObservedStore

FEW, MANY = 2_000, 20_000  # on a server a quarter of it: what costs time is the same
GENEROUS_SECONDS = 60.0


def tiny(count):
    values = torch.arange(4.0 * count).view(count, 4)
    return {f"layers.{index}.scale": values[index].clone() for index in range(count)}


class Requests(list):
    """The calls of a store that ask it for something about data."""

    def __call__(self, call):
        if call.key.startswith("data/") and call.operation not in ("write", "abort"):  # of an upload under way
            self.append(call)


def measured(root, act):
    """Return the requests and the seconds of processor time of `act`, which gets the store that counts."""
    requests, began = Requests(), time.process_time()
    act(ObservedStore(open_store(root), requests))
    return len(requests), time.process_time() - began


def save_and_load(root, count):
    """Save and load so many tensors; return requests and seconds of both, and the checkpoint."""
    state = tiny(count)
    target, name = blank(state), f"n-{count}"
    saving = measured(root, lambda store: sw.save(state, checkpoint_id=name, storage_writer=writer(store)))
    loading = measured(
        root, lambda store: sw.load(target, checkpoint_id=name, storage_reader=sw.CkptStoreReader(store))
    )
    assert same(target, state)
    return saving, loading, CheckpointStore.open(root).get(name)


def test_requests_grow_with_files_and_time_and_bytes_with_tensors(root):
    count = MANY if root.startswith("/") else MANY // 4
    save_and_load(root, 10)  # modules are imported
    *few, _ = save_and_load(root, FEW)
    *many, checkpoint = save_and_load(root, count)
    manifest_bytes = sum(part.size for part in checkpoint.commit.parts) / count
    stored_bytes = checkpoint.commit.shards.bytes / count
    figures = {"few": few, "many": many, "manifest_bytes": manifest_bytes, "stored_bytes": stored_bytes}
    assert [requests for requests, _ in many] == [requests for requests, _ in few], figures
    assert sum(requests for requests, _ in many) <= 24, figures
    for (_, seconds), (_, few_seconds) in zip(many, few, strict=True):
        assert seconds < GENEROUS_SECONDS, figures
        assert seconds < 3 * (count / FEW) * max(few_seconds, 0.2), figures
    assert manifest_bytes < 40, figures
    assert stored_bytes < 200  # 16 of the tensor, 32 of its hash, the rest its entry in the header


def test_one_of_many_tensors_is_read_with_a_handful_of_requests(root):
    state = tiny(FEW)
    sw.save(state, checkpoint_id="a", storage_writer=writer(root))
    checkpoint = CheckpointStore.open(root).latest()
    requests = Requests()
    checkpoint._store = ObservedStore(checkpoint._store, requests)
    found = checkpoint.read(f"layers.{FEW - 1}.scale")
    assert found.tolist() == np.arange(4.0 * FEW)[-4:].tolist()
    assert len(requests) <= 4
