"""What the tests of staging save, and how: a rank's part of a save, from the staged state to its shard."""

from __future__ import annotations

import time

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload
from ckptstore.options import TransferOptions
from ckptstore.transfer.upload import upload_shard
from storage_writers.planning import Contents


def contents_of(staged, *, planner=None, leave_out=(), only_local=False):
    """Return what is uploaded of a staged state, as this rank's final plan has it."""
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(staged.state, is_coordinator=True)
    plan = planner.create_local_plan()
    if not only_local:  # else the plans of other ranks would be missing
        plan = planner.create_global_plan([plan])[0][0]
    plan = planner.finish_plan(plan)
    plan.items[:] = [item for item in plan.items if item.index.fqn not in leave_out]
    return Contents(plan, planner, allow_pickle=True, staged=staged)


def upload(contents, store=None, *, rank=0):
    """Send a shard; return the bytes of each item by name."""
    store = store or MemoryStore()
    layout = contents.layout
    key = f"shards/{rank}-{len(list(store.list('')))}"
    bodies = (contents.pieces(index) for index in layout.order)
    upload_shard(store, key, layout, bodies, rank=rank, options=TransferOptions())
    whole = store.get_range(key, start=0, length=layout.size)
    return {item.chunk.tensor.name: whole[item.position : item.position + item.chunk.nbytes] for item in layout.items}


def saved(staged, store=None, **how):
    """Return the bytes of each item of a staged state, as they are uploaded."""
    return upload(contents_of(staged, **how), store)


def bytes_of(tensor):
    """Return a tensor's bytes, row-major."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.unsqueeze(-1).view(torch.uint8).numpy().tobytes()


class Slow(ForwardingStore):
    """A store in memory that takes its time for each write of an upload."""

    def __init__(self, *, seconds=0.01):
        super().__init__(MemoryStore())
        self._seconds = seconds

    def open_upload(self, key, *, size):
        return _SlowUpload(super().open_upload(key, size=size), self._seconds)


class _SlowUpload(ForwardingUpload):
    def __init__(self, inner, seconds):
        super().__init__(inner)
        self._seconds = seconds

    def write(self, data):
        time.sleep(self._seconds)
        super().write(data)
