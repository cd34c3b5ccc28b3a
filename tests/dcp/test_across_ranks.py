"""Saved on some ranks, loaded on others: bit by bit the same, whatever the sharding."""

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from states import bits, blank, same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.observed import Counts, ObservedStore

WHOLE = {
    "even": (8, 6),
    **{f"rows{rows}": (rows, 5) for rows in (1, 2, 5, 7)},
    "scalar": (),
    "long": (1001,),
    "none": (0, 4),
    "cube": (5, 6, 7),
}


def whole():
    """Return the same tensors in every process."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in WHOLE.items()}


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])


def state_on(mesh, placements):
    """Return `whole()` on a mesh, each tensor sharded as far as it has the dimensions."""
    state = {}
    for name, tensor in whole().items():
        fitting = [p if not isinstance(p, Shard) or p.dim < tensor.dim() else Replicate() for p in placements]
        state[name] = distribute_tensor(tensor, mesh, fitting)
    return {"model": state, "step": 5, "plain": torch.arange(10)}


def save_on(url, shape, placements):
    sw.save(state_on(mesh_of(shape), placements), checkpoint_id="step-5", storage_writer=sw.CkptStoreWriter(url))


def load_on(url, shape, placements):
    wanted = state_on(mesh_of(shape), placements)
    target = blank(wanted)
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    return same(target, wanted)


@pytest.mark.parametrize("saved", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_sharded_on_four_ranks_loads_on_one_two_three_and_five(gang, tmp_path, saved):
    gang.values(4, save_on, str(tmp_path), (4,), saved)
    for ranks in (1, 2, 3, 5):
        for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
            assert all(gang.values(ranks, load_on, str(tmp_path), (ranks,), placements)), (ranks, placements)


def test_a_mesh_of_two_by_two_loads_on_four_and_on_one(gang, tmp_path):
    gang.values(4, save_on, str(tmp_path), (2, 2), [Shard(0), Shard(1)])
    assert all(gang.values(4, load_on, str(tmp_path), (4,), [Shard(0)]))
    assert all(gang.values(4, load_on, str(tmp_path), (2, 2), [Replicate(), Shard(0)]))
    assert all(gang.values(1, load_on, str(tmp_path), (1,), [Replicate()]))


def test_a_dimension_that_is_sharded_twice_loads_on_any_number(gang, tmp_path):
    gang.values(4, save_on, str(tmp_path), (2, 2), [Shard(0), Shard(0)])
    assert all(gang.values(3, load_on, str(tmp_path), (3,), [Shard(0)]))
    assert all(gang.values(4, load_on, str(tmp_path), (2, 2), [Shard(0), Shard(0)]))


def test_hybrid_sharding_is_saved_once(gang, tmp_path):
    gang.values(4, save_on, str(tmp_path), (2, 2), [Replicate(), Shard(0)])
    assert all(gang.values(3, load_on, str(tmp_path), (3,), [Shard(0)]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu() * self.scale
        return x


def trained(steps):
    """Return a sharded model and its optimizer after some steps, the same on every number of ranks up to rounding."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(torch.full((2, 13), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(state):
    """Return a state with every DTensor gathered, so that different numbers of ranks can be compared."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return [full(value) for value in state] if isinstance(state, list) else state


def save_fsdp(url):
    model, optimizer = trained(3)
    weights, moments = get_state_dict(model, optimizer)
    sw.save({"model": weights, "optim": moments}, checkpoint_id="step-3", storage_writer=sw.CkptStoreWriter(url))
    return full({"model": weights, "optim": moments})


def load_fsdp(url):
    model, optimizer = trained(1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    sw.load(state, storage_reader=sw.CkptStoreReader(url))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    weights, moments = get_state_dict(model, optimizer)
    return full({"model": weights, "optim": moments})


def test_a_model_and_its_optimizer_under_fsdp_load_on_any_number_of_ranks(gang, tmp_path):
    expected = gang.values(4, save_fsdp, str(tmp_path))[0]
    for ranks in (1, 2, 3, 5):
        for found in gang.values(ranks, load_fsdp, str(tmp_path)):
            assert same(found, expected), ranks


def save_on_some(url):
    some = [1, 3]
    group = dist.new_group(some)
    if dist.get_rank() in some:
        state = {"of_the_group": torch.arange(6.0), "rank": torch.tensor(dist.get_rank(group))}
        writer = sw.CkptStoreWriter(url, process_group=group)
        sw.save(state, checkpoint_id="part", storage_writer=writer, process_group=group)
        target = {"of_the_group": torch.zeros(6), "rank": torch.tensor(9)}
        sw.load(target, storage_reader=sw.CkptStoreReader(url), process_group=group)
        return bits(target["of_the_group"]) == bits(torch.arange(6.0)), writer.committed is not None
    return None


def test_a_sub_group_saves_and_loads_while_the_others_do_something_else(gang, tmp_path):
    assert gang.values(4, save_on_some, str(tmp_path)) == [None, (True, True), None, (True, False)]


def save_in_a_group_of_one(url):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    try:
        writer = sw.CkptStoreWriter(url, process_group=mine)
        sw.save({"x": torch.ones(1)}, checkpoint_id="a", storage_writer=writer, process_group=mine)
    except InvalidInputError as error:
        return error


def test_a_group_of_one_among_many_is_refused_unless_it_is_meant(gang, tmp_path):
    """Every rank would commit a checkpoint of one rank."""
    assert all(isinstance(error, InvalidInputError) for error in gang.values(2, save_in_a_group_of_one, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def save_with_one_group_for_dcp_only(url):
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        writer = sw.CkptStoreWriter(url, agree_timeout_seconds=1)
        sw.save({"x": torch.ones(1)}, checkpoint_id="a", storage_writer=writer, process_group=group)


def test_a_group_that_only_dcp_was_given_is_noticed(gang, tmp_path):
    outcomes = gang.run(3, save_with_one_group_for_dcp_only, str(tmp_path))
    assert [type(outcome.error).__name__ for outcome in outcomes] == [
        "DisagreementError",
        "DisagreementError",
        "NoneType",
    ]
    assert outcomes[0].error.facts["missing"] == [2]


def save_only_on_rank_zero(url):
    state = {"x": torch.ones(4)} if dist.get_rank() == 0 else {}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    target = {"x": torch.zeros(4)} if dist.get_rank() == 1 else {}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    return target.get("x")


def test_keys_are_compared_over_the_union_of_all_ranks(gang, tmp_path):
    """A rank without anything to write writes no object, and one without anything to read still takes part."""
    values = gang.values(3, save_only_on_rank_zero, str(tmp_path))
    assert values[0] is None
    assert bits(values[1]) == bits(torch.ones(4))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_each_shard_opens_as_safetensors_and_the_desk_reads_any_box_without_the_ranks(gang, tmp_path):
    gang.values(4, save_on, str(tmp_path), (4,), [Shard(0)])
    expected, seen = whole(), dict.fromkeys(WHOLE, 0)
    for path in tmp_path.rglob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (it is no dict)
                key, _, at = name.removeprefix("model.").partition("@")
                if key in WHOLE:
                    found = shard.get_tensor(name)
                    first = int(at.split(",")[0]) if at else 0
                    rows = expected[key][first : first + len(found)] if expected[key].dim() else expected[key]
                    assert bits(found) == bits(rows), name
                    seen[key] += found.numel()
    assert seen == {key: tensor.numel() for key, tensor in expected.items()}
    checkpoint = CheckpointStore.open(str(tmp_path)).latest()
    assert checkpoint.read("model.rows7").tobytes() == bits(expected["rows7"])
    assert checkpoint.read("model.cube", (slice(1, 4), slice(0, 2))).tobytes() == bits(expected["cube"][1:4, 0:2])


def fetched(url, shape):
    mesh = mesh_of(shape)
    torch.manual_seed(1)
    tensors = {f"w{i}": torch.randn(4096 + i, 1024) for i in range(3)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    if shape == (4,):
        sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    target, counts = blank(state), Counts()
    sw.load(target, storage_reader=sw.CkptStoreReader(ObservedStore(open_store(url), counts)))
    assert same(target, state)
    return counts.bytes["get_range"], sum(t.to_local().nbytes for t in state.values())


def test_resharding_on_the_same_dimension_fetches_hardly_more_than_it_needs(gang, tmp_path):
    """Counted at the port over all ranks, headers and leaf tables included."""
    for ranks in (4, 1, 2, 3, 5):
        counted = gang.values(ranks, fetched, str(tmp_path), (ranks,))
        assert sum(got for got, _ in counted) <= 1.1 * sum(needed for _, needed in counted), (ranks, counted)


def fetched_by_column(url, shape):
    torch.manual_seed(1)
    whole = torch.randn(4096, 1024)
    mesh = mesh_of(shape)
    sw.save(
        {"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url)
    )
    target, counts = {"w": blank(distribute_tensor(whole, mesh, [Shard(1)]))}, Counts()
    sw.load(target, storage_reader=sw.CkptStoreReader(ObservedStore(open_store(url), counts)))
    assert same(target, {"w": distribute_tensor(whole, mesh, [Shard(1)])})
    return counts.bytes["get_range"], whole.nbytes


def test_resharding_on_another_dimension_fetches_each_item_at_most_once_per_rank(gang, tmp_path):
    for got, stored in gang.values(2, fetched_by_column, str(tmp_path), (2,)):
        assert got <= 1.01 * stored
