"""Shards that are uneven or empty come back exactly, on any number of ranks, and write no empty object."""

import pytest
import torch
from case_samples import shards_under, writer
from states import blank, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.objectstore.urls import open_store

ROWS = (1, 2, 5, 7)
GRID = [Shard(0), Shard(1)]


def whole(rows):
    generator = torch.Generator().manual_seed(11)
    return {f"rows{count}": torch.randn(count, 6, generator=generator) for count in rows}


def laid_out(rows, shape, placements):
    mesh = init_device_mesh("cpu", shape)
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in whole(rows).items()}


def save_rows(root, rows, shape, placements):
    sw.save(laid_out(rows, shape, placements), checkpoint_id="a", storage_writer=writer(root))


def load_rows(root, rows, shape, placements):
    """Return whether this rank's pieces and the tensors as a whole are what was saved."""
    wanted = laid_out(rows, shape, placements)
    target = blank(wanted)
    sw.load(target, storage_reader=sw.CkptStoreReader(root))
    gathered = {name: tensor.full_tensor() for name, tensor in target.items()}
    return same(target, wanted) and same(gathered, whole(rows))


@pytest.mark.servers
def test_few_rows_on_four_ranks_load_on_three_two_and_one_in_every_layout(gang, s3_url):
    """`tests/dcp` shows the same on files."""
    gang.values(4, save_rows, s3_url, ROWS, (4,), [Shard(0)])
    for ranks in (3, 2, 1):
        for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
            assert all(gang.values(ranks, load_rows, s3_url, ROWS, (ranks,), placements)), (ranks, placements)


@pytest.mark.servers
def test_a_grid_of_two_by_two_loads_on_four_in_a_row_and_on_one(gang, s3_url):
    gang.values(4, save_rows, s3_url, ROWS, (2, 2), GRID)
    assert all(gang.values(4, load_rows, s3_url, ROWS, (4,), [Shard(0)]))
    assert all(gang.values(4, load_rows, s3_url, ROWS, (4,), [Shard(1)]))
    assert all(gang.values(1, load_rows, s3_url, ROWS, (1,), [Replicate()]))


@pytest.mark.parametrize("rows", ROWS)
def test_ranks_with_nothing_of_a_tensor_write_nothing_empty_and_nobody_waits(gang, root, rows):
    gang.values(4, save_rows, root, [rows], (4,), [Shard(0)])
    assert all(open_store(root).head(key).size > 0 for key in shards_under(root))
    store = CheckpointStore.open(root)
    assert store.latest().saved_world_size == 4
    assert store.verify(store.latest(), level="full").ok
    assert store.latest().read(f"rows{rows}").tobytes() == whole([rows])[f"rows{rows}"].numpy().tobytes()
    for ranks, placements in ((4, [Shard(1)]), (3, [Shard(0)]), (1, [Shard(0)])):
        assert all(gang.values(ranks, load_rows, root, [rows], (ranks,), placements))


@pytest.mark.parametrize(
    "saved",
    [((4,), [Shard(1)]), ((2, 2), [Shard(1), Shard(0)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(1), Shard(1)]),
     ((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Replicate()])],
    ids=str,
)  # fmt: skip
def test_every_layout_of_four_ranks_loads_in_every_other(gang, tmp_path, saved):
    root = str(tmp_path / "run")
    gang.values(4, save_rows, root, ROWS, *saved)
    for loaded in (((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(1), Replicate()])):
        assert all(gang.values(4, load_rows, root, ROWS, *loaded)), loaded
    for ranks in (1, 3):
        assert all(gang.values(ranks, load_rows, root, ROWS, (ranks,), [Shard(0)])), ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)


def block_on(shape):
    """Return a block whose tensors are cut by two kinds of parallelism at once, both along the rows of `up`."""
    torch.manual_seed(3)
    model = Block()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if shape[1] > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model.state_dict()


def save_block(root, shape):
    sw.save({"model": block_on(shape)}, checkpoint_id="a", storage_writer=writer(root))


def load_block(root, shape):
    state = {"model": block_on(shape)}
    target = blank(state)
    sw.load(target, storage_reader=sw.CkptStoreReader(root))
    return same(target, state), full(target["model"])


def full(state):
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def test_rows_cut_by_two_kinds_of_parallelism_load_on_another_grid(gang, tmp_path):
    root = str(tmp_path / "run")
    torch.manual_seed(3)
    expected = dict(Block().state_dict())
    for saved in ((2, 2), (4, 1), (1, 4)):
        gang.values(4, save_block, root, saved)
        store = CheckpointStore.open(root)
        for name, tensor in expected.items():
            assert store.latest().read(f"model.{name}").tobytes() == tensor.numpy().tobytes(), (saved, name)
        for ranks, loaded in ((4, (2, 2)), (4, (1, 4)), (2, (2, 1)), (1, (1, 1))):
            for exact, found in gang.values(ranks, load_block, root, loaded):
                assert exact, (saved, loaded)
                assert same(found, expected), (saved, loaded)


@pytest.mark.slow
def test_few_rows_on_four_ranks_load_on_eight_and_back(gang, root):
    gang.values(4, save_rows, root, ROWS, (4,), [Shard(0)])
    assert all(gang.values(8, load_rows, root, ROWS, (8,), [Shard(0)], seconds=120))
    gang.values(8, save_rows, root, ROWS, (4, 2), GRID, seconds=120)
    assert all(gang.values(3, load_rows, root, ROWS, (3,), [Shard(0)]))
