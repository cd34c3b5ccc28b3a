"""How far the weights moved: one number on every world size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ckptstore.errors import InvalidInputError
from ckptstore.training import update_norm
from ckptstore.training.meeting import Meeting
from ckptstore.training.update_norm import UpdateNorm


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.Embedding(11, 2))


def moved(names, *, by=0.01):
    """Add something to every parameter that depends on its place in the whole tensor only."""
    with torch.no_grad():
        for number, parameter in enumerate(names.values()):
            change = by * torch.arange(parameter.numel()).reshape(parameter.shape).add(number)
            if hasattr(parameter, "placements"):
                change = distribute_tensor(change, parameter.device_mesh, parameter.placements)
            parameter.add_(change)


def whole_update(names, *, by=0.01):
    return sum(((by * (torch.arange(each.numel()) + at)) ** 2).sum().item() for at, each in enumerate(names.values()))


def test_the_sum_of_squares_is_that_of_the_change():
    names = dict(model().named_parameters())
    norm = UpdateNorm(names)
    norm.start()
    assert norm.advance() == 0.0
    moved(names)
    assert norm.advance() == pytest.approx(whole_update(names), rel=1e-4)
    moved(names, by=0.1)
    assert norm.advance() == pytest.approx(whole_update(names, by=0.1), rel=1e-4)  # since the last one
    assert norm.advance() == 0.0


def test_measuring_changes_nothing():
    names = dict(model().named_parameters())
    sum(each.sum() for each in names.values()).backward()
    before = {name: (each.clone(), each.grad.clone(), each._version) for name, each in names.items()}
    norm = UpdateNorm(names)
    norm.start()
    norm.advance()
    norm.stop()
    for name, (value, grad, version) in before.items():
        assert torch.equal(value, names[name])
        assert torch.equal(grad, names[name].grad)
        assert names[name]._version == version


def test_weights_that_are_not_a_number_any_more_are_told():
    names = dict(model().named_parameters())
    norm = UpdateNorm(names)
    norm.start()
    with torch.no_grad():
        names["0.bias"][0] = math.nan
    assert math.isnan(norm.advance())


def test_the_choice_is_one_of_names_and_fits():
    names = {f"layer.{at}": nn.Parameter(torch.zeros(10)) for at in range(100)}
    chosen = UpdateNorm(names, max_elements=55).chosen
    assert len(chosen) == 5
    assert UpdateNorm(dict(reversed(names.items())), max_elements=55).chosen == chosen
    assert chosen != tuple(names)[:5]  # drawn from all depths
    assert UpdateNorm(names, max_elements=56).of == UpdateNorm(names, max_elements=55).of
    assert UpdateNorm(names, max_elements=65).of != UpdateNorm(names, max_elements=55).of


def test_what_does_not_move_or_fit_is_left_out():
    names = dict(model().named_parameters())
    names["0.weight"].requires_grad_(requires_grad=False)
    assert set(UpdateNorm(names).chosen) == {"0.bias", "1.weight", "2.weight"}
    assert UpdateNorm(names, max_elements=5).chosen == ("0.bias",)
    nothing = UpdateNorm(names, max_elements=4)
    assert (nothing.chosen, nothing.of) == ((), "")
    nothing.start()
    assert nothing.advance() == 0.0


def test_low_precision_and_complex_weights_are_measured():
    names = {
        "low": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        "complex": nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
    }
    norm = UpdateNorm(names)
    norm.start()
    with torch.no_grad():
        names["low"] += 0.5
        names["complex"] += 3 + 4j
    assert norm.advance() == 4 * 0.25 + 2 * 25


def test_before_it_was_started_there_is_nothing_to_compare_with():
    norm = UpdateNorm(dict(model().named_parameters()))
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="not known"):
            norm.advance()
        norm.start()
        norm.stop()


def test_weights_without_values_are_refused():
    with torch.device("meta"), pytest.raises(InvalidInputError, match=r"0\.weight"):
        UpdateNorm(dict(nn.Sequential(nn.Linear(2, 2)).named_parameters()))


def measured(names):
    """Return what this rank measured of one known change, and the choice."""
    norm = UpdateNorm(names, meeting=Meeting())
    norm.start()
    moved(names)
    return norm.advance(), norm.of


def measure_everywhere():
    plain = measured(dict(model().named_parameters()))
    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    hybrid = dict(model().named_parameters())
    if dist.get_world_size() == 4:  # replicated over one dimension, sharded over the other
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        wrapped = model()
        fully_shard(wrapped, mesh=mesh)
        hybrid = dict(wrapped.named_parameters())
    inner = dict(model().named_parameters())
    if dist.get_world_size() == 4:  # tensor parallel inside, and copies outside that its mesh does not know
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        inner = {name: nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)])) for name, each in inner.items()}
    stages = {
        name: each
        for at, (name, each) in enumerate(model().named_parameters())
        if at % dist.get_world_size() == dist.get_rank()
    }
    norm = UpdateNorm(stages, meeting=Meeting())
    norm.start()
    with torch.no_grad():
        for each in stages.values():
            each.add_(0.5)
    return [
        plain,
        measured(dict(sharded.named_parameters())),
        measured(hybrid),
        measured(inner),
        (norm.advance(), norm.of),
    ]


@pytest.mark.parametrize("ranks", [3, 4])
def test_however_the_weights_are_laid_out_every_element_is_counted_once(gang, ranks):
    names = dict(model().named_parameters())
    alone = UpdateNorm(names)
    alone.start()
    moved(names)
    right = alone.advance()
    by_rank = gang.values(ranks, measure_everywhere)
    *layouts, stages = [[rank[at] for rank in by_rank] for at in range(5)]
    for layout in layouts:
        assert sum(squares for squares, _ in layout) == pytest.approx(right, rel=1e-6)
        assert {of for _, of in layout} == {alone.of}
    assert [squares > 0 for squares, _ in layouts[0]] == [True, *[False] * (ranks - 1)]
    assert sum(squares for squares, _ in stages) == pytest.approx(0.25 * 77)
    assert {of for _, of in stages} == {alone.of}


def ask_and_measure(what):
    """Return what ranks were asked while they agreed on what is measured, and what that is."""
    meeting, asked = Meeting(), []
    decide = meeting.decide

    def noted(question, *args, **options):
        asked.append(question)
        return decide(question, *args, **options)

    meeting.decide = noted
    made = model()
    if what == "sharded":
        fully_shard(made)
    names = dict(made.named_parameters())
    if what != "sharded" and dist.get_rank() == 1:
        names.pop("0.bias")
    if what == "too many":
        update_norm.MAX_GATHERED = 6
    try:
        norm = UpdateNorm(names, meeting=meeting)
    finally:
        update_norm.MAX_GATHERED = 200_000
    norm.start()
    return asked, norm.chosen, bool(norm.of), norm.advance()


def test_what_each_rank_holds_travels_only_where_ranks_hold_different_things(gang):
    alone = UpdateNorm(dict(model().named_parameters()))
    assert gang.values(2, ask_and_measure, "sharded") == [(["layouts"], alone.chosen, True, 0.0)] * 2
    assert gang.values(2, ask_and_measure, "apart") == [(["layouts", "pieces"], alone.chosen, True, 0.0)] * 2
    assert gang.values(2, ask_and_measure, "too many") == [(["layouts"], (), False, 0.0)] * 2
