"""Sharded tensors are staged by their local part, and are planned as they were."""

import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from staged import Slow, bytes_of, contents_of, upload
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from storage_writers.staging import StagingPool

SOON = 20.0


def sharded_state():
    """Return a state of the two ranks, and the local part of each tensor by its name."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    whole = torch.randn(101, 30)
    own = torch.full((4, 5), float(rank))
    shards = [
        sharded_tensor.Shard.from_tensor_and_offsets(own, shard_offsets=[4 * rank, 0], rank=rank),
    ]
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "parameter": torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])),
        "none_here": distribute_tensor(torch.ones(1), mesh, [Shard(0)]),
        "old": sharded_tensor.init_from_local_shards(shards, 8, 5),
        "plain": torch.full((7,), float(rank)),
    }
    local = {name: value.to_local().clone() for name, value in state.items() if isinstance(value, DTensor)}
    return state, local | {"old": own.clone(), "plain": state["plain"].clone()}


def planned(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return [
        (item.index.fqn, item.type, item.tensor_data.chunk, item.tensor_data.size, item.tensor_data.properties.dtype)
        for item in planner.create_local_plan().items
    ]


def stage_and_save(staging_bytes):
    state, local = sharded_state()
    pool = StagingPool(staging_bytes=staging_bytes)
    staged = pool.stage(state)
    assert staged.is_whole == (staging_bytes is None)
    assert planned(staged.state) == planned(state)
    contents, got = contents_of(staged, only_local=True), {}
    uploading = threading.Thread(target=lambda: got.update(upload(contents, Slow())))
    uploading.start()
    staged.fence(seconds=SOON)
    for value in state.values():
        target = value.local_shards()[0].tensor if isinstance(value, sharded_tensor.ShardedTensor) else value
        with torch.no_grad():
            (target.to_local() if isinstance(target, DTensor) else target).fill_(9)
    uploading.join(SOON)
    staged.end()
    return {name: got.get(name) == bytes_of(value) for name, value in local.items()}


@pytest.mark.parametrize("staging_bytes", [None, 10_000, 0])
def test_each_rank_saves_its_local_parts_as_they_were(gang, staging_bytes):
    for rank, same in enumerate(gang.values(2, stage_and_save, staging_bytes)):
        assert same == dict.fromkeys(same, True), rank
        assert len(same) == 6


def send_staged():
    """Return whether what is staged of each DTensor comes out of what is sent to another process."""
    state, local = sharded_state()
    pool = StagingPool(shared=True)
    staged = pool.stage({name: value for name, value in state.items() if isinstance(value, DTensor)})
    staged.wait_copied(seconds=SOON)
    sent = ForkingPickler.loads(ForkingPickler.dumps(staged.state))
    same = {name: torch.equal(value.to_local(), local[name]) for name, value in sent.items()}
    staged.end()
    return same


def test_sharded_tensors_that_are_staged_can_be_sent_to_another_process(gang):
    for same in gang.values(2, send_staged):
        assert same == dict.fromkeys(["rows", "columns", "parameter", "none_here"], True)
