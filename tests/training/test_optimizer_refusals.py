"""Frozen parameters, and saved state that has nowhere to go: kept or refused, never dropped."""

import pytest
import torch
from states import bits, same
from stepping import Net, everything, load, save, seeded, train
from torch import nn

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import models, optimizers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


@pytest.fixture
def url(tmp_path):
    return str(tmp_path)


def adamw(model, parameters=None):
    return torch.optim.AdamW(model.parameters() if parameters is None else parameters, lr=0.02)


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def trained(steps=3, seed=1, *, frozen=()):
    model = seeded(Net, seed)
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def differences(error):
    return {what: (saved, now) for what, saved, now in error.facts["differences"]}


def test_a_parameter_trained_and_then_frozen_keeps_its_state(url):
    model, optimizer = trained()
    structure = save(url, model, optimizer)
    fresh = seeded(Net, 2)
    fresh.first.requires_grad_(requires_grad=False)
    loaded = adamw(fresh)
    load(url, fresh, loaded, structure)
    assert same(loaded.state[fresh.first.weight], optimizer.state[model.first.weight])
    again = save(f"{url}/again", fresh, loaded)
    assert again["parameters"]["first.weight"]["trainable"] is False
    fresh.first.requires_grad_(requires_grad=True)
    other = seeded(Net, 3)
    unfrozen = adamw(other)
    load(f"{url}/again", other, unfrozen, again)
    train(model, optimizer, [3])
    train(other, unfrozen, [3])
    assert same(everything(other, unfrozen), everything(model, optimizer))


def test_a_frozen_parameter_that_is_trainable_at_load_starts_without_state(url):
    model, optimizer = trained(frozen=["first"])
    structure = save(url, model, optimizer)
    fresh = seeded(Net, 2)
    loaded = adamw(fresh)
    load(url, fresh, loaded, structure)
    assert fresh.first.weight not in loaded.state
    assert float(loaded.state[fresh.last.weight]["step"]) == 3
    train(fresh, loaded, [3])
    assert float(loaded.state[fresh.first.weight]["step"]) == 1
    assert float(loaded.state[fresh.last.weight]["step"]) == 4


def test_one_that_was_left_out_of_the_optimizer_because_it_was_frozen_does_too(url):
    model = seeded(Net, 1)
    model.first.requires_grad_(requires_grad=False)
    optimizer = adamw(model, trainable(model))
    train(model, optimizer, range(3))
    structure = save(url, model, optimizer)
    assert structure["parameters"]["first.weight"] == {
        "group": None,
        "trainable": False,
        "shape": [8, 6],
        "state": {},
    }
    fresh = seeded(Net, 2)
    loaded = adamw(fresh)
    load(url, fresh, loaded, structure)
    assert fresh.first.weight not in loaded.state
    assert same(loaded.state[fresh.last.weight], optimizer.state[model.last.weight])


@pytest.mark.parametrize("left_out", [False, True])
def test_a_model_whose_every_parameter_is_frozen_saves_and_loads(url, left_out):
    extra = nn.Parameter(torch.ones(1))

    def frozen(seed):
        model = seeded(Net, seed).requires_grad_(requires_grad=False)
        model.extra = extra
        return model, adamw(model, [extra] if left_out else None)

    model, optimizer = frozen(1)
    extra.requires_grad_(requires_grad=False)
    structure = save(url, model, optimizer)
    assert not any(saved["trainable"] or saved["state"] for saved in structure["parameters"].values())
    fresh, loaded = frozen(2)
    load(url, fresh, loaded, structure)
    assert len(loaded.state) == 0
    assert bits(fresh.first.weight) == bits(model.first.weight)


def test_a_parameter_that_never_had_a_gradient_needs_no_state(url):
    model, optimizer = seeded(Net, 1), None
    model.unused = nn.Linear(2, 2)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    structure = save(url, model, optimizer)
    fresh = seeded(Net, 2)
    fresh.unused = nn.Linear(2, 2)
    loaded = adamw(fresh)
    load(url, fresh, loaded, structure)
    assert fresh.unused.weight not in loaded.state
    assert same(everything(fresh, loaded), everything(model, optimizer))


def refused(optimizer, model, structure):
    names = models.named_parameters(model)
    with pytest.raises(IncompatibleStateError) as one:
        optimizers.targets(optimizer, names, structure)
    before = optimizer.state_dict()
    with pytest.raises(IncompatibleStateError) as other:
        optimizers.apply(optimizer, names, structure, {})
    assert same(optimizer.state_dict(), before)
    assert one.value.facts == other.value.facts
    assert "frozen" in one.value.hint
    return differences(one.value)


def taken(model, optimizer):
    return optimizers.capture(optimizer, models.named_parameters(model)).structure


def test_saved_state_of_a_parameter_that_is_left_out_now_is_refused():
    structure = taken(*trained())
    model = seeded(Net, 2)
    model.first.requires_grad_(requires_grad=False)
    assert refused(adamw(model, trainable(model)), model, structure) == {
        "first.weight": ("in group 0 with state", "in no group"),
        "first.bias": ("in group 0 with state", "in no group"),
    }


def test_saved_state_of_a_parameter_that_is_gone_is_refused_and_so_is_a_new_parameter():
    structure = taken(*trained())
    model = seeded(Net, 2)
    model.tail, model.last = model.last, nn.Identity()
    assert refused(adamw(model), model, structure) == {
        "last.weight": ("in group 0 with state", "no parameter of the model"),
        "tail.weight": ("unknown", "in group 0"),
    }


def test_all_differences_are_listed_at_once():
    structure = taken(*trained())
    model = seeded(Net, 2)
    model.last = nn.Linear(9, 3, bias=False)
    vectors, matrices = [model.first.bias, model.norm.weight], [model.first.weight, model.last.weight]
    assert refused(torch.optim.SGD([{"params": matrices}, {"params": vectors}], lr=1), model, structure) == {
        "the class": ("torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"),
        "the number of groups": ("1", "2"),
        "the shape of last.weight": ("[3, 8]", "[3, 9]"),
        "norm.bias": ("in group 0 with state", "in no group"),
    }


def test_a_parameter_that_was_trainable_but_not_the_optimizers_is_refused():
    model = seeded(Net)
    structure = taken(model, adamw(model, [model.first.weight, model.first.bias]))
    assert refused(adamw(model), model, structure) == dict.fromkeys(
        ("norm.weight", "norm.bias", "last.weight"), ("trainable, but in no group", "in group 0")
    )


def test_a_parameter_in_another_group_is_refused():
    def grouped(model, *, swapped):
        groups = [model.first.parameters(), [*model.norm.parameters(), *model.last.parameters()]]
        return adamw(model, [{"params": params} for params in (reversed(groups) if swapped else groups)])

    model = seeded(Net)
    structure = taken(model, grouped(model, swapped=False))
    found = refused(grouped(model, swapped=True), model, structure)
    assert found["first.weight"] == ("in group 0 without state", "in group 1")
    assert found["last.weight"] == ("in group 1 without state", "in group 0")
    assert len(found) == 5


def test_a_rate_that_does_not_fit_the_tensor_it_would_fill_is_refused():
    model = seeded(Net)
    structure = taken(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5, dtype=torch.float64)))
    found = refused(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)), model, structure)
    assert found == {"lr of group 0": ("a tensor float64 [] of 0.5", "a tensor float32 [] of 0.25")}


def test_rates_that_differ_are_not_put_into_one_tensor():
    def grouped(*rates):
        return adamw(
            model, [{"params": [p], "lr": rate} for p, rate in zip(model.norm.parameters(), rates, strict=True)]
        )

    model, one = seeded(Net), torch.tensor(0.25)
    structure = taken(model, grouped(0.5, torch.tensor(0.25)))
    assert refused(grouped(one, one), model, structure) == {
        "lr of group 1": ("a tensor float32 [] of 0.25", "one tensor with lr of group 0")
    }
    structure = taken(model, grouped(torch.tensor(0.5), torch.tensor(0.5)))
    optimizers.apply(grouped(one, one), models.named_parameters(model), structure, {})
    assert float(one) == 0.5


def test_a_tensor_that_was_not_loaded_is_missed_before_anything_is_changed():
    model, optimizer = trained()
    captured = optimizers.capture(optimizer, models.named_parameters(model))
    del captured.tensors["norm.bias.exp_avg"]
    fresh = seeded(Net, 2)
    loaded = adamw(fresh)
    with pytest.raises(IncompatibleStateError, match=r"norm\.bias\.exp_avg"):
        optimizers.apply(loaded, models.named_parameters(fresh), captured.structure, captured.tensors)
    assert len(loaded.state) == 0


def test_a_migrated_shape_finds_room_where_the_structure_says_so():
    model, optimizer = trained()
    structure = taken(model, optimizer)
    fresh = seeded(Net, 2)
    fresh.last = nn.Linear(8, 5, bias=False)
    grown = optimizers.reshaped(structure, {"last.weight": [5, 8]})
    room = optimizers.targets(adamw(fresh), models.named_parameters(fresh), grown)
    assert list(room["last.weight.exp_avg"].shape) == [5, 8]
    assert list(room["last.weight.step"].shape) == []
    assert structure["parameters"]["last.weight"]["shape"] == [3, 8]


def test_a_number_that_grows_into_a_vector_keeps_its_one_counter():
    model = nn.ParameterDict({"gain": nn.Parameter(torch.tensor(1.0))})
    optimizer = adamw(model)
    model["gain"].backward()
    optimizer.step()
    grown = optimizers.reshaped(taken(model, optimizer), {"gain": [2]})
    fresh = nn.ParameterDict({"gain": nn.Parameter(torch.ones(2))})
    room = optimizers.targets(adamw(fresh), models.named_parameters(fresh), grown)
    assert {name: list(tensor.shape) for name, tensor in room.items()} == {
        "gain.step": [],
        "gain.exp_avg": [2],
        "gain.exp_avg_sq": [2],
    }


def test_an_optimizer_of_another_model_is_refused_at_the_save():
    model, other = seeded(Net), seeded(Net)
    with pytest.raises(InvalidInputError, match=r"\[8, 6\]") as error:
        taken(model, adamw(other))
    assert "of this model" in error.value.hint


def test_state_of_what_is_in_no_group_is_refused_at_the_save():
    model, optimizer = trained()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(InvalidInputError, match=r"last\.weight"):
        taken(model, optimizer)
    model, optimizer = trained()
    optimizer.state["global"] = {"k": 1}
    with pytest.raises(InvalidInputError, match="global"):
        taken(model, optimizer)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Is known by its name, or by that of a class above it."""


class Engine(torch.optim.SGD):
    pass


Engine.__module__ = "deepspeed.runtime.zero.stage3"


@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, Engine])
def test_optimizers_that_shard_their_state_themselves_are_refused_with_a_way_out(kind):
    model = seeded(Net)
    with pytest.raises(UnsupportedError) as error:
        taken(model, kind(model.parameters(), lr=0.1))
    assert "fully_shard" in error.value.hint


def test_what_is_no_optimizer_is_refused_even_if_it_holds_one():
    model = seeded(Net)
    optimizer = adamw(model)
    for value in (model, None, torch.optim.lr_scheduler.StepLR(optimizer, 1)):
        with pytest.raises(InvalidInputError):
            taken(model, value)


def test_state_that_cannot_be_stored_is_named():
    model, optimizer = trained()
    optimizer.state[model.last.weight]["rows"] = torch.eye(2).to_sparse()
    with pytest.raises(UnsupportedError, match="rows"):
        taken(model, optimizer)
