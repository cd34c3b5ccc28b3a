"""Names, moments and gradients under DDP and FSDP2, alone and mixed with other wrappers."""

import pytest
import torch
import torch.distributed as dist
from states import bits, same
from stepping import Matrices, Net, Tied, backward, everything, load, save, seeded, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import storage_writers as sw
from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.training import gradients, models, optimizers


def plain(model):
    return model


def ddp(model):
    return DistributedDataParallel(model)


def sharded(model):
    fully_shard(model.first)
    return fully_shard(model)


def compiled_ddp(model):
    model.first = checkpoint_wrapper(model.first)
    return torch.compile(DistributedDataParallel(model), backend="eager")


def ddp_of_compiled(model):
    return DistributedDataParallel(torch.compile(model, backend="eager"))


def sharded_mixture(model):
    model.first = checkpoint_wrapper(model.first)
    model.last = torch.compile(model.last, backend="eager")
    fully_shard(model.first)
    return torch.compile(fully_shard(model), backend="eager")


WRAPPERS = {f.__name__: f for f in (plain, ddp, sharded, compiled_ddp, ddp_of_compiled, sharded_mixture)}


def made(wrapper, seed, kind=Net):
    model = WRAPPERS[wrapper](seeded(kind, seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def described():
    found = {}
    for name in WRAPPERS:
        model, optimizer = made(name, 1)
        structure = optimizers.capture(optimizer, models.named_parameters(model)).structure
        found[name] = (
            list(models.named_parameters(model)),
            list(models.named_state(model)),
            models.facts(model),
            structure,
        )
    return found


def test_names_and_facts_are_the_same_under_ddp_fsdp2_and_mixtures(gang):
    for found in gang.values(2, described):
        parameters, state, _, structure = found["plain"]
        assert parameters == ["first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight"]
        assert state == list(Net().state_dict())
        assert list(structure["parameters"]) == parameters
        for name in WRAPPERS:
            assert found[name] == found["plain"], name


def saved_under(url, wrapper):
    model, optimizer = made(wrapper, 1)
    train(model, optimizer, range(3))
    structure = save(url, model, optimizer)
    at_three = everything(model, optimizer)
    train(model, optimizer, [3])
    return structure, at_three, everything(model, optimizer)


def loaded_under(url, structure, wrapper):
    model, optimizer = made(wrapper, 2)
    load(url, model, optimizer, structure)
    at_three = everything(model, optimizer)
    train(model, optimizer, [3])
    return at_three, everything(model, optimizer)


def close(one, other):
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], atol=1e-6) for key in one)


@pytest.mark.parametrize("wrapper", ["ddp", "sharded", "sharded_mixture"])
def test_what_is_saved_under_one_wrapper_loads_under_the_others_and_trains_on(gang, tmp_path, wrapper):
    """Bit by bit at the load; the step after it too under the same wrapper, and up to rounding under another."""
    structure, at_three, at_four = gang.values(2, saved_under, str(tmp_path), wrapper)[0]
    for ranks, other in ((2, "plain"), (2, "sharded"), (2, "compiled_ddp"), (1, "sharded_mixture"), (2, wrapper)):
        for found, next_step in gang.values(ranks, loaded_under, str(tmp_path), structure, other):
            assert same(found, at_three), other
            assert close(next_step["tensors"], at_four["tensors"]), other
            assert other != wrapper or same(next_step, at_four)


def loaded_layout(url, structure):
    model, optimizer = made("sharded", 2)
    load(url, model, optimizer, structure)
    state = optimizer.state[models.named_parameters(model)["first.weight"]]
    return {name: (type(value).__name__, list(value.shape)) for name, value in state.items()}


def test_moments_are_laid_out_as_their_parameters_and_steps_are_plain(gang, tmp_path):
    structure = gang.values(1, saved_under, str(tmp_path), "plain")[0][0]
    for found in gang.values(2, loaded_layout, str(tmp_path), structure):
        assert found == {
            "step": ("Tensor", []),
            "exp_avg": ("DTensor", [8, 6]),
            "exp_avg_sq": ("DTensor", [8, 6]),
        }


def after_an_evaluation():
    model, optimizer = made("sharded", 1)
    train(model, optimizer, [0])
    with torch.no_grad():
        model(torch.ones(4, 6))
    unsharded = type(model.last.weight).__name__
    names = models.named_parameters(model)
    captured = optimizers.capture(optimizer, names)
    state = models.named_state(model)
    return (
        unsharded,
        {isinstance(tensor, DTensor) for tensor in (*names.values(), state["last.weight"])},
        len(captured.tensors),
    )


def test_what_an_evaluation_left_unsharded_is_still_the_optimizers(gang):
    assert gang.values(2, after_an_evaluation) == [("Parameter", {True}, 15)] * 2


def tied(url):
    model = fully_shard(seeded(Tied, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(2))
    structure = save(url, model, optimizer)
    fresh = fully_shard(seeded(Tied, 2))
    loaded = torch.optim.AdamW(fresh.parameters(), lr=0.02)
    load(url, fresh, loaded, structure)
    train(model, optimizer, [2])
    train(fresh, loaded, [2])
    return models.aliases(fresh), same(everything(fresh, loaded), everything(model, optimizer))


def test_tied_weights_stay_tied_under_fsdp2(gang, tmp_path):
    assert gang.values(2, tied, str(tmp_path)) == [([["token.weight", "head.weight"]], True)] * 2


def unfit():
    found = {}
    for name, act in {
        "fsdp1": lambda: models.named_state(FullyShardedDataParallel(seeded(Matrices), device_id=torch.device("cpu"))),
        "adafactor": lambda: with_rows(fully_shard(seeded(Matrices))),
        "too_early": lambda: made_before(seeded(Matrices)),
    }.items():
        try:
            act()
            found[name] = None
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            found[name] = error
    return found


def with_rows(model):
    """Take the state of an Adafactor with factors of another shape than the parameter's."""
    optimizer = torch.optim.Adafactor(model.parameters())
    optimizer.state[model.first.weight]["row_var"] = torch.zeros(8, 1)
    optimizers.capture(optimizer, models.named_parameters(model))


def made_before(model):
    optimizer = torch.optim.AdamW(model.parameters())
    optimizers.capture(optimizer, models.named_parameters(fully_shard(model)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_cannot_be_laid_out_anew_is_refused_by_name(gang):
    for found in gang.values(2, unfit):
        assert isinstance(found["fsdp1"], UnsupportedError)
        assert "fully_shard" in found["fsdp1"].hint
        assert isinstance(found["adafactor"], UnsupportedError)
        assert "Adafactor" in str(found["adafactor"])
        assert isinstance(found["too_early"], InvalidInputError)
        assert "after it was sharded" in found["too_early"].hint


def accumulated(url, wrapper):
    model, _ = made(wrapper, 1, Matrices)
    backward(model, dist.get_rank())
    names = models.named_parameters(model)
    found = gradients.capture(names, models=[model])
    facts: list = [None] * dist.get_world_size()
    dist.all_gather_object(facts, gradients.facts(found))
    state = {f"gradients.{name}": tensor for name, tensor in found.shared.items()}
    state |= {f"ranks/{dist.get_rank():05d}/gradients.{name}": tensor for name, tensor in found.local.items()}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    whole = {name: bits(whole_of(names[name].grad)) for name in names}
    return facts, whole


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def resumed(url, wrapper, facts):
    model, _ = made(wrapper, 2, Matrices)
    names = models.named_parameters(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    room = gradients.targets(names, facts, rank=rank, world_size=world_size, reduction="mean")
    state = {f"gradients.{name}": tensor for name, tensor in room.shared.items()}
    for old, tensors in room.local.items():
        state |= {f"ranks/{old:05d}/gradients.{name}": tensor for name, tensor in tensors.items()}
    sw.load(state, storage_reader=sw.CkptStoreReader(url))
    gradients.apply(names, room, facts, world_size=world_size, reduction="mean")
    return {name: bits(whole_of(parameter.grad)) for name, parameter in names.items()}


def test_gradients_of_fsdp2_are_laid_out_on_any_number_of_ranks(gang, tmp_path):
    facts, whole = gang.values(2, accumulated, str(tmp_path), "sharded")[0]
    assert facts[0]["shared"]["first.weight"] == ["float32", [8, 6]]
    assert facts[0]["local"] == {}
    for ranks in (1, 2, 3):
        assert gang.values(ranks, resumed, str(tmp_path), "sharded", facts) == [whole] * ranks
    assert gang.values(1, resumed, str(tmp_path), "plain", facts) == [whole]


def test_gradients_that_differ_by_rank_come_back_to_their_rank(gang, tmp_path):
    """As between two micro-steps under DDP's `no_sync`."""
    saved = gang.values(2, accumulated, str(tmp_path), "plain")
    facts, (one, other) = saved[0][0], [whole for _, whole in saved]
    assert one != other
    assert gang.values(2, resumed, str(tmp_path), "plain", facts) == [one, other]
    (mean,) = gang.values(1, resumed, str(tmp_path), "plain", facts)
    first = [torch.frombuffer(bytearray(part["first.weight"]), dtype=torch.float32) for part in (one, other)]
    assert torch.equal(torch.frombuffer(bytearray(mean["first.weight"]), dtype=torch.float32), sum(first) / 2)


def unreduced():
    model, _ = made("sharded", 1, Matrices)
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    try:
        gradients.capture(models.named_parameters(model), models=[nn.ModuleList([model])])
    except UnsupportedError as error:
        return error
    return None


def test_gradients_that_fsdp2_has_not_reduced_are_refused(gang):
    for error in gang.values(2, unreduced):
        assert "set_requires_gradient_sync" in error.hint
