"""An optimizer saved after some steps and loaded into one that never stepped."""

import copy
import random

import pytest
import torch
from states import bits, same
from stepping import Matrices, Net, Tied, backward, everything, load, save, seeded, train
from torch import nn

from ckptstore.errors import DisagreementError
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import decode_value, encode_value
from ckptstore.training import models, optimizers
from ckptstore.training.parts import OptimizerPart
from ckptstore.training.shares import share

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


@pytest.fixture
def url(tmp_path):
    return str(tmp_path)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(5, 4, sparse=True)

    def forward(self, x):
        return self.token(x.argmax(1).clamp(max=4))


OPTIONS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "ASGD": {"t0": 2},
    "LBFGS": {"max_iter": 3, "history_size": 2},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
MODELS = {"Muon": Matrices, "SparseAdam": Sparse}


def pair(name, seed):
    model = seeded(MODELS.get(name, Net), seed)
    return model, getattr(torch.optim, name)(model.parameters(), lr=0.02, **OPTIONS[name])


def test_every_optimizer_of_torch_is_tested():
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)}
    assert {name for name in classes if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)} == {
        "Optimizer",
        *OPTIONS,
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_goes_on_bit_by_bit_in_a_fresh_one(url, name):
    model, optimizer = pair(name, 1)
    train(model, optimizer, range(3))
    structure = save(url, model, optimizer)
    stored = decode_value(encode_value(structure, types=standard_types()), types=standard_types())

    fresh, loaded = pair(name, 2)
    load(url, fresh, loaded, stored)
    assert same(everything(fresh, loaded), everything(model, optimizer))
    assert len(loaded.state) == len(optimizer.state) > 0
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert same(loaded.state.get(theirs, {}), optimizer.state.get(ours, {}))
    train(model, optimizer, [3])
    train(fresh, loaded, [3])
    assert same(everything(fresh, loaded), everything(model, optimizer))


def step_four(url, structure, *, pending):
    """Load in a fresh process and take the fourth step."""
    model = seeded(Net, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    if pending:
        backward(model, 9)
    gradients = {name: None if p.grad is None else bits(p.grad) for name, p in model.named_parameters()}
    load(url, model, optimizer, structure)
    kept = {name: None if p.grad is None else bits(p.grad) for name, p in model.named_parameters()} == gradients
    at_three = everything(model, optimizer)
    optimizer.zero_grad()
    train(model, optimizer, [3])
    return at_three, everything(model, optimizer), kept


def load_without_pending(url, structure):
    return step_four(url, structure, pending=False)


def load_with_pending(url, structure):
    return step_four(url, structure, pending=True)


@pytest.mark.parametrize("at_save", [False, True], ids=["clean", "pending"])
@pytest.mark.parametrize("job", [load_without_pending, load_with_pending])
def test_a_new_process_with_an_adamw_that_never_stepped_has_all_moments(gang, url, job, at_save):
    """With gradients pending when it was saved or loaded, too: they stay what they are."""
    model = seeded(Net, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(3))
    if at_save:
        backward(model, 3)
    before = everything(model, optimizer)
    structure = save(url, model, optimizer)
    ((at_three, at_four, kept),) = gang.values(1, job, url, structure)
    assert kept
    moments = [name for name in at_three["tensors"] if name.startswith("first.weight.")]
    assert moments == ["first.weight.step", "first.weight.exp_avg", "first.weight.exp_avg_sq"]
    assert float(at_three["tensors"]["first.weight.step"]) == 3
    if not at_save:
        assert same(at_three, before)
    optimizer.zero_grad()
    if not at_save:  # else the batch statistics have moved on
        train(model, optimizer, [3])
        assert same(at_four, everything(model, optimizer))


def test_taking_the_state_changes_nothing():
    model = seeded(Net, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    names = models.named_parameters(model)
    assert optimizers.capture(optimizer, names).tensors == {}
    assert len(optimizer.state) == 0
    train(model, optimizer, range(2))
    backward(model, 2)
    before = copy.deepcopy(optimizer.state_dict())
    gradients = {name: bits(parameter.grad) for name, parameter in names.items()}
    weights = {name: (bits(parameter), parameter._version) for name, parameter in names.items()}
    states = (torch.get_rng_state(), random.getstate())
    captured = optimizers.capture(optimizer, names)
    optimizers.facts(optimizer, names)
    optimizers.digest(optimizer, names, max_bytes=1 << 20)
    optimizers.targets(optimizer, names, captured.structure)
    assert same(optimizer.state_dict(), before)
    assert {name: bits(parameter.grad) for name, parameter in names.items()} == gradients
    assert {name: (bits(parameter), parameter._version) for name, parameter in names.items()} == weights
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (
        captured.tensors["first.weight.exp_avg"].data_ptr()
        == optimizer.state[names["first.weight"]]["exp_avg"].data_ptr()
    )


def grouped(seed, kind=torch.optim.AdamW, **options):
    model = seeded(Net, seed)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, kind(groups, **options)


def test_groups_keep_their_hyper_parameters_and_fields_of_their_own(url):
    model, optimizer = grouped(1, lr=0.02, betas=(0.8, 0.9))
    optimizer.param_groups[0] |= {"name": "decayed", "layer_scale": [0.5, (1, None)], "lr": 0.01}
    train(model, optimizer, range(2))
    structure = save(url, model, optimizer)
    fresh, loaded = grouped(2, lr=7.0)
    loaded.param_groups[1]["only_here"] = "stays"
    load(url, fresh, loaded, structure)
    first, second = loaded.param_groups
    assert (first["lr"], first["betas"], first["weight_decay"], first["name"]) == (0.01, (0.8, 0.9), 0.1, "decayed")
    assert first["layer_scale"] == [0.5, (1, None)]
    assert first["layer_scale"] is not optimizer.param_groups[0]["layer_scale"]
    assert (second["lr"], second["weight_decay"], second["only_here"]) == (0.02, 0.0, "stays")
    train(model, optimizer, [2])
    train(fresh, loaded, [2])
    del second["only_here"]
    assert same(everything(fresh, loaded), everything(model, optimizer))


def with_tensors(seed, *rates, beta):
    betas = torch.tensor(beta), torch.tensor(0.9)
    model, optimizer = grouped(seed, lr=0.5, betas=betas, foreach=False)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.tensor(rate)
    return model, optimizer


def test_a_learning_rate_that_is_a_tensor_stays_the_same_object(url):
    model, optimizer = with_tensors(1, 0.01, 0.02, beta=0.8)
    train(model, optimizer, range(2))
    structure = save(url, model, optimizer)
    fresh, loaded = with_tensors(2, 7.0, 7.0, beta=0.5)
    fields = [(group["lr"], group["betas"][0]) for group in loaded.param_groups]
    load(url, fresh, loaded, structure)
    for group, (lr, beta) in zip(loaded.param_groups, fields, strict=True):
        assert group["lr"] is lr
        assert group["betas"][0] is beta
        assert bits(group["betas"][0]) == bits(torch.tensor(0.8))
    assert [bits(lr) for lr, _ in fields] == [bits(torch.tensor(0.01)), bits(torch.tensor(0.02))]
    train(model, optimizer, [2])
    train(fresh, loaded, [2])
    assert same(everything(fresh, loaded), everything(model, optimizer))


def test_what_was_captured_does_not_follow_the_optimizer():
    model, optimizer = grouped(1, lr=torch.tensor(0.02))
    seen = optimizer.state[model.first.weight]["seen"] = {1, 2}
    structure = optimizers.capture(optimizer, models.named_parameters(model)).structure
    optimizer.param_groups[0]["lr"].fill_(9.0)
    seen.add(3)
    assert structure["parameters"]["first.weight"]["state"] == {"seen": ["value", {1, 2}]}
    optimizer.param_groups[1]["weight_decay"] = 9.0
    assert float(structure["groups"][0]["lr"]) == float(torch.tensor(0.02))
    assert structure["groups"][1]["weight_decay"] == 0.0


def test_a_number_and_a_tensor_of_one_value_take_each_others_place(url):
    model, optimizer = grouped(1, lr=torch.tensor(0.5))
    structure = save(url, model, optimizer)
    fresh, loaded = grouped(2, lr=0.1)
    load(url, fresh, loaded, structure)
    assert loaded.param_groups[0]["lr"] == 0.5
    assert type(loaded.param_groups[0]["lr"]) is float
    structure = optimizers.capture(loaded, models.named_parameters(fresh)).structure
    lr = optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizers.apply(optimizer, models.named_parameters(model), structure, {})
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5


def test_how_a_step_is_computed_is_the_targets_own(url):
    model, optimizer = grouped(1, lr=0.02, foreach=True)
    structure = save(url, model, optimizer)
    assert structure["groups"][0]["foreach"] is True
    fresh, loaded = grouped(2, lr=0.1, fused=True)
    load(url, fresh, loaded, structure)
    assert [loaded.param_groups[0][field] for field in ("foreach", "fused")] == [None, True]


def test_a_fused_optimizer_goes_on_where_a_plain_one_was(url):
    model, optimizer = grouped(1, lr=0.02)
    train(model, optimizer, range(3))
    structure = save(url, model, optimizer)
    fresh, loaded = grouped(2, lr=0.1, fused=True)
    load(url, fresh, loaded, structure)
    train(fresh, loaded, [3])
    assert float(loaded.state[fresh.first.weight]["step"]) == 4


@pytest.mark.parametrize(
    ("kind", "options", "beside"),
    [
        (torch.optim.AdamW, {}, False),
        (torch.optim.AdamW, {"capturable": True}, True),
        (torch.optim.NAdam, {}, False),
        (torch.optim.ASGD, {}, True),
    ],
)
def test_room_for_moments_is_made_beside_the_weights_and_for_counters_where_torch_has_them(kind, options, beside):
    """The meta device stands for any that is not the CPU."""
    model = seeded(Net, 1)
    optimizer = kind(model.parameters(), lr=0.02)
    train(model, optimizer, [0])
    structure = optimizers.capture(optimizer, models.named_parameters(model)).structure
    away = seeded(Net, 2).to("meta")
    room = optimizers.targets(kind(away.parameters(), lr=0.02, **options), dict(away.named_parameters()), structure)
    assert len(room) == len(optimizer.state) * len(optimizer.state[model.first.weight])
    for tensor in room.values():
        assert tensor.device.type == ("meta" if tensor.dim() or beside else "cpu")


def test_two_optimizers_of_one_model_each_have_their_own_part(url):
    def halves(seed):
        model = seeded(Net, seed)
        rest = [*model.norm.parameters(), *model.last.parameters()]
        return model, torch.optim.AdamW(model.first.parameters(), lr=0.02), torch.optim.SGD(rest, lr=0.1, momentum=0.9)

    model, one, other = halves(1)
    for step in range(2):
        backward(model, step)
        one.step()
        other.step()
        model.zero_grad()
    names = models.named_parameters(model)
    fresh, *loaded = halves(2)
    for optimizer, target in zip((one, other), loaded, strict=True):
        structure = save(f"{url}/{type(optimizer).__name__}", model, optimizer)
        assert list(structure["parameters"]) == list(names)
        load(f"{url}/{type(optimizer).__name__}", fresh, target, structure)
        assert same(everything(fresh, target), everything(model, optimizer))


def test_a_schedulers_rates_survive_and_go_on(url):
    def scheduled(seed):
        model, optimizer = grouped(seed, lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    model, optimizer, scheduler = scheduled(1)
    train(model, optimizer, [0])
    scheduler.step()
    structure = save(url, model, optimizer)
    fresh, loaded, _ = scheduled(2)
    load(url, fresh, loaded, structure)
    assert [(group["lr"], group["initial_lr"]) for group in loaded.param_groups] == [(0.05, 0.1)] * 2


def test_state_in_another_dtype_than_the_weights_keeps_it(url):
    model = seeded(Net, 1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape, dtype=torch.float64)
    structure = save(url, model, optimizer)
    fresh = seeded(Net, 2).to(torch.bfloat16)
    loaded = torch.optim.SGD(fresh.parameters(), lr=0.02, momentum=0.9)
    load(url, fresh, loaded, structure)
    assert loaded.state[fresh.first.weight]["momentum_buffer"].dtype is torch.float64
    assert same(everything(fresh, loaded), everything(model, optimizer))


def test_state_that_the_target_had_is_replaced_whole(url):
    model, optimizer = grouped(1, lr=0.02)
    structure = save(url, model, optimizer)  # which has never stepped
    other, stepped = grouped(2, lr=0.02)
    train(other, stepped, range(3))
    load(url, other, stepped, structure)
    assert len(stepped.state) == 0
    train(model, optimizer, [0])
    train(other, stepped, [0])
    assert same(everything(other, stepped), everything(model, optimizer))


def test_tied_weights_have_one_state_under_their_first_name(url):
    def tied(seed):
        model = seeded(Tied, seed)
        return model, torch.optim.AdamW(model.parameters(), lr=0.02)

    model, optimizer = tied(1)
    train(model, optimizer, range(3))
    structure = save(url, model, optimizer)
    assert list(structure["parameters"]) == ["token.weight", "mix.weight", "mix.bias"]
    fresh, loaded = tied(2)
    load(url, fresh, loaded, structure)
    train(model, optimizer, [3])
    train(fresh, loaded, [3])
    assert same(everything(fresh, loaded), everything(model, optimizer))
    assert fresh.head.weight is fresh.token.weight


class Prepared(torch.optim.Optimizer):
    """Holds the optimizer that counts, as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def test_an_optimizer_in_a_wrapper_is_the_one_inside(url):
    model, optimizer = grouped(1, lr=0.02)
    train(model, optimizer, range(2))
    structure = save(url, model, Prepared(optimizer))
    assert structure["class"] == "torch.optim.adamw.AdamW"
    fresh, loaded = grouped(2, lr=0.02)
    load(url, fresh, Prepared(Prepared(loaded)), structure)
    assert same(everything(fresh, loaded), everything(model, optimizer))


def test_structures_of_ranks_with_different_parameters_are_merged():
    model, optimizer = grouped(1, lr=torch.tensor(0.02))
    whole = optimizers.capture(optimizer, models.named_parameters(model)).structure
    parts = [{**whole, "parameters": {}}, {**whole, "parameters": {}}]
    for index, (name, saved) in enumerate(whole["parameters"].items()):
        parts[index % 2]["parameters"][name] = saved
    assert same(optimizers.merged(parts)["groups"], whole["groups"])
    assert optimizers.merged(parts)["parameters"] == whole["parameters"]
    assert optimizers.merged([whole, copy.deepcopy(whole)])["parameters"] == whole["parameters"]


def test_ranks_that_contradict_each_other_are_named():
    model, optimizer = grouped(1, lr=0.02)
    one = optimizers.capture(optimizer, models.named_parameters(model)).structure
    other = copy.deepcopy(one)
    other["parameters"]["norm.bias"]["group"] = 0
    with pytest.raises(DisagreementError, match=r"norm\.bias") as refused:
        optimizers.merged([one, one, other])
    assert refused.value.facts["ranks"] == [0, 2]
    other = copy.deepcopy(one)
    other["groups"][0]["lr"] = 0.03
    with pytest.raises(DisagreementError, match="groups"):
        optimizers.merged([one, other])


def test_a_rank_takes_its_part_of_what_all_ranks_saved(url):
    model, optimizer = grouped(1, lr=0.02)
    train(model, optimizer, range(2))
    structure = save(url, model, optimizer)
    names = {"first.weight": model.first.weight}
    part = torch.optim.AdamW([{"params": [model.first.weight]}, {"params": []}])
    elsewhere = set(structure["parameters"]) - set(names)
    structure = share(OptimizerPart("optimizer", part, names), structure, elsewhere)
    room = optimizers.targets(part, names, structure)
    assert list(room) == ["first.weight.step", "first.weight.exp_avg", "first.weight.exp_avg_sq"]
    captured = optimizers.capture(optimizer, models.named_parameters(model)).tensors
    optimizers.apply(part, names, structure, captured)
    assert bits(part.state[model.first.weight]["exp_avg"]) == bits(captured["first.weight.exp_avg"])


def test_facts_are_those_the_optimizer_was_made_with():
    model, optimizer = grouped(1, lr=0.02, betas=(0.8, 0.9))
    names = models.named_parameters(model)
    facts = optimizers.facts(optimizer, names)
    assert facts["class"] == "torch.optim.adamw.AdamW"
    assert facts["groups"] == 2
    assert facts["defaults"]["betas"] == [0.8, 0.9]
    assert "lr" not in facts["defaults"]
    train(model, optimizer, [0])
    optimizer.param_groups[0]["lr"] = 3.0
    later = optimizers.facts(optimizer, names)
    assert later == facts
    assert encode_value(later, types=standard_types())


def test_a_digest_tells_a_dropped_moment():
    model, optimizer = grouped(1, lr=0.02)
    names = models.named_parameters(model)
    train(model, optimizer, range(2))
    digest = optimizers.digest(optimizer, names, max_bytes=1 << 20)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert (digest["tensors"], digest["elements"]) == (15, 2 * elements + 5)
    assert digest["bytes"] == 4 * (2 * elements + 5)
    assert optimizers.digest(optimizer, names, max_bytes=1 << 20) == digest
    assert optimizers.digest(optimizer, names, max_bytes=100)["bytes"] == 100
    optimizer.state[model.first.weight]["exp_avg"].zero_()
    dropped = optimizers.digest(optimizer, names, max_bytes=1 << 20)
    assert dropped["blake3"] != digest["blake3"]
    assert dropped["nonzero"] < digest["nonzero"]
