"""How a run is spread over its ranks: read from its modules, said, and never contradicted."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckptstore import InvalidInputError, UnsupportedError
from ckptstore.training.topology import check_kinds, normal, topology

PLAIN = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "fsdp": 1}


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def test_one_process_is_one_of_everything():
    assert topology(model()) == topology([model(), model()]) == PLAIN


def test_ranks_of_which_nothing_speaks_are_data_parallel():
    assert topology(model(), world_size=6) == {**PLAIN, "dp": 6}


def test_what_is_said_is_checked_against_the_number_of_ranks():
    said = {"tp": 2, "pp": 2, "cp": 3, "zero": 1}
    assert topology(model(), said, world_size=24) == {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "fsdp": 1, "cp": 3}
    for wrong in ({"dp": 3}, {"tp": 5}, {"dp": 4, "fsdp": 3}, {"zero": 4}, {"dp": 4, "tp": 2}):
        with pytest.raises(InvalidInputError, match=r"ranks train|cannot be"):
            topology(model(), wrong, world_size=4)


@pytest.mark.parametrize("wrong", [{"dp": 0}, {"dp": "4"}, {"tp": True}, {"zero": -1}, {3: 1}, {"tp": 1.0}])
def test_what_is_no_degree_is_refused(wrong):
    with pytest.raises(InvalidInputError, match="cannot be"):
        topology(model(), wrong)


def test_degrees_are_compared_with_everything_named():
    assert normal({"dp": 2, "cp": 1, "ep": 4}) == {**PLAIN, "dp": 2, "ep": 4}


def sharded(name):
    """Return what a model that is wrapped in one of the usual ways says, on every rank."""
    ranks = dist.get_world_size()
    made = model()
    if name == "ddp":
        return topology(DistributedDataParallel(made))
    if name == "hybrid":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        return topology(fully_shard(made, mesh=mesh))
    if name == "with tensor parallelism":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(made, mesh["tp"], {"0": ColwiseParallel()})
        return topology(fully_shard(made, mesh=mesh["dp"]))
    if name == "without names":
        parallelize_module(made, init_device_mesh("cpu", (ranks,)), {"0": ColwiseParallel()})
        try:
            topology(made)
        except InvalidInputError as error:
            return str(error), topology(made, {"tp": ranks})
    if name == "kept after the forward pass":
        fully_shard(made[0], reshard_after_forward=False)
        return topology(fully_shard(made, reshard_after_forward=False))
    fully_shard(made[0])
    fully_shard(made)
    before = topology(made)
    made(torch.ones(2, 4)).sum().backward()
    assert topology(made) == before  # though FSDP2 decides at the first pass that the root keeps its parameters
    return before


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("fsdp2", {"dp": 4, "fsdp": 4, "zero": 3}),
        ("kept after the forward pass", {"dp": 4, "fsdp": 4, "zero": 2}),
        ("hybrid", {"dp": 4, "fsdp": 2, "zero": 3}),
        ("with tensor parallelism", {"dp": 2, "fsdp": 2, "tp": 2, "zero": 3}),
        ("ddp", {"dp": 4}),
    ],
)
def test_it_is_read_from_how_a_model_is_wrapped(gang, name, right):
    assert gang.values(4, sharded, name) == [{**PLAIN, **right}] * 4


def test_a_mesh_that_does_not_say_what_it_is_for_is_not_guessed(gang):
    for said, given in gang.values(2, sharded, "without names"):
        assert "have no names" in said
        assert "parallelism=dict(" in said
        assert given == {**PLAIN, "tp": 2}


def contradicted():
    made = fully_shard(model())
    try:
        return topology(made, {"dp": 2, "fsdp": 1})
    except InvalidInputError as error:
        return str(error)


def test_what_is_said_must_not_contradict_the_modules(gang):
    assert all("parallelism says fsdp=1, the modules say fsdp=2" in said for said in gang.values(2, contradicted))


def test_what_keeps_its_state_to_itself_is_refused_by_name(monkeypatch):
    engines = types.ModuleType("deepspeed.runtime.engine")
    kind = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", engines)
    with pytest.raises(UnsupportedError, match="DeepSpeedEngine") as caught:
        topology(kind())
    assert "fully_shard" in caught.value.hint


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  (in the process of a rank)

    optimizer = ZeroRedundancyOptimizer(model().parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    try:
        check_kinds([optimizer])
    except UnsupportedError as error:
        return str(error)


def test_an_optimizer_that_shards_by_itself_is_refused_by_name(gang):
    assert all("ZeroRedundancyOptimizer" in said and "FSDP2" in said for said in gang.values(2, zero_redundancy))
