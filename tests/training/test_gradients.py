"""Gradients that a save between two micro-steps finds pending."""

import pytest
import torch
from states import bits, same
from stepping import Net, backward, seeded
from torch import nn

import storage_writers as sw
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import encode_value
from ckptstore.training import gradients, models

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def pending(model):
    return {name: None if p.grad is None else bits(p.grad) for name, p in model.named_parameters()}


def captured(model):
    return gradients.capture(models.named_parameters(model), models=[model])


def test_accumulated_gradients_go_on_in_a_fresh_process(tmp_path):
    model = seeded(Net)
    model.unused = nn.Linear(2, 2)
    backward(model, 1)
    before = pending(model)
    found = captured(model)
    assert pending(model) == before
    facts = [gradients.facts(found)]
    assert facts[0]["local"]["first.weight"] == ["float32", [8, 6]]
    assert encode_value(facts, types=standard_types())
    sw.save(
        {f"ranks/00000/gradients.{name}": tensor for name, tensor in found.local.items()},
        checkpoint_id="a",
        storage_writer=sw.CkptStoreWriter(str(tmp_path)),
    )
    fresh = seeded(Net)
    fresh.unused = nn.Linear(2, 2)
    fresh.unused.weight.grad = torch.ones(2, 2)  # it had none when it was saved
    names = models.named_parameters(fresh)
    room = gradients.targets(names, facts, rank=0, world_size=1)
    sw.load(
        {f"ranks/00000/gradients.{name}": tensor for name, tensor in room.local[0].items()},
        storage_reader=sw.CkptStoreReader(str(tmp_path)),
    )
    gradients.apply(names, room, facts, world_size=1)
    assert pending(fresh) == before
    assert fresh.unused.weight.grad is None
    backward(model, 2)
    fresh.norm.load_state_dict(model.norm.state_dict())
    backward(fresh, 2)
    assert pending(fresh) == pending(model)


def saved_by(ranks, dtype=torch.float32):
    """Return a parameter's name, and gradients that each rank had; the last rank had none of `b`."""
    parts = [
        gradients.Gradients({}, {"a": torch.full((3,), 2.0**rank, dtype=dtype), "b": torch.full((2,), 1.0 + rank)})
        for rank in range(ranks)
    ]
    del parts[-1].local["b"]
    return parts


def dealt_out(parts, world_size, reduction, dtype=torch.float32):
    """Return what each new rank has pending."""
    found = []
    facts = [gradients.facts(part) for part in parts]
    for rank in range(world_size):
        names = {
            "a": nn.Parameter(torch.zeros(3, dtype=dtype)),
            "b": nn.Parameter(torch.zeros(2)),
            "c": nn.Parameter(torch.zeros(1)),
        }
        room = gradients.targets(names, facts, rank=rank, world_size=world_size, reduction=reduction)
        for old, tensors in room.local.items():
            for name, tensor in tensors.items():
                tensor.copy_(parts[old].local[name])
        gradients.apply(names, room, facts, world_size=world_size, reduction=reduction)
        found.append({name: parameter.grad for name, parameter in names.items()})
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_on_another_number_of_ranks_the_reduction_to_come_gives_the_same(world_size, reduction):
    parts = saved_by(4)
    found = dealt_out(parts, world_size, reduction)
    total = {"a": 1.0 + 2.0 + 4.0 + 8.0, "b": 1.0 + 2.0 + 3.0}
    for name, value in total.items():
        new = torch.stack([grads[name] for grads in found]).sum(0)
        expected = value if reduction == "sum" else value / 4 * world_size
        assert torch.allclose(new, torch.full_like(new, expected))
    assert all(grads["c"] is None for grads in found)


def test_a_rank_that_loads_nothing_has_zeros_to_reduce():
    found = dealt_out(saved_by(1), 2, "mean")
    assert same(found[1]["a"], torch.zeros(3))
    assert found[1]["b"] is None


def test_half_precision_is_summed_in_a_wider_one_and_kept():
    parts = saved_by(3, torch.bfloat16)
    for part, value in zip(parts, (256.0, 1.0, 1.0), strict=True):
        part.local["a"].fill_(value)
    (found,) = dealt_out(parts, 1, "sum", torch.bfloat16)
    assert same(found["a"], torch.full((3,), 258.0, dtype=torch.bfloat16))


def test_gradients_of_several_ranks_are_gathered_on_the_cpu():
    facts = [gradients.facts(part) for part in saved_by(4)]
    names = {name: nn.Parameter(torch.zeros(size, device="meta")) for name, size in (("a", 3), ("b", 2))}
    room = gradients.targets(names, facts, rank=1, world_size=3, reduction="mean")
    assert {old: [t.device.type for t in part.values()] for old, part in room.local.items()} == {1: ["meta"] * 2}
    room = gradients.targets(names, facts, rank=0, world_size=3, reduction="mean")
    assert {old: [t.device.type for t in part.values()] for old, part in room.local.items()} == {
        0: ["cpu", "cpu"],
        3: ["cpu"],
    }


def test_another_number_of_ranks_is_refused_unless_the_reduction_is_told():
    facts = [gradients.facts(part) for part in saved_by(4)]
    names = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2))}
    with pytest.raises(IncompatibleStateError) as refused:
        gradients.targets(names, facts, rank=0, world_size=3)
    assert (refused.value.facts["saved_world_size"], refused.value.facts["world_size"]) == (4, 3)
    assert "reduction='mean'" in refused.value.hint
    with pytest.raises(InvalidInputError, match="max"):
        gradients.targets(names, facts, rank=0, world_size=3, reduction="max")


def test_gradients_that_fit_no_parameter_are_all_named():
    facts = [{"shared": {"s": ["float32", [4]]}, "local": {"a": ["float32", [3]], "b": ["float16", [2]]}}]
    names = {"a": nn.Parameter(torch.zeros(4)), "b": nn.Parameter(torch.zeros(2))}
    with pytest.raises(IncompatibleStateError) as refused:
        gradients.targets(names, facts, rank=0, world_size=1)
    assert refused.value.facts["differences"] == [
        ["a", "a gradient [3]", "a parameter [4]"],
        ["b", "a gradient float16", "a parameter with gradients of float32"],
        ["s", "a gradient [4]", "no parameter of this rank"],
    ]


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="weight"):
        captured(model)
