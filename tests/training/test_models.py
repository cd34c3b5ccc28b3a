"""A model's state by name, in one process."""

import pytest
import torch
from states import bits, same
from stepping import Matrices, Net, Tied, backward, seeded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import storage_writers as sw
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import models

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")

PARAMETERS = ["first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight"]
STATE = [
    *("first.weight", "first.bias", "norm.weight", "norm.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "last.weight"),
]


@pytest.fixture
def url(tmp_path):
    return str(tmp_path)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_inside(model):
    model.first = compiled(model.first)
    return model


def checkpointed_inside(model):
    model.first = checkpoint_wrapper(model.first)
    return model


def mixed(model):
    model.first = checkpoint_wrapper(compiled(model.first))
    model.last = compiled(checkpoint_wrapper(model.last))
    return compiled(nn.DataParallel(checkpoint_wrapper(model)))


WRAPPED = [
    lambda model: model,
    compiled,
    compiled_inside,
    checkpoint_wrapper,
    checkpointed_inside,
    nn.DataParallel,
    mixed,
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_names_are_the_same_whatever_a_model_is_wrapped_in(wrap):
    plain = seeded(Net)
    model = wrap(seeded(Net))
    assert list(models.named_parameters(model)) == PARAMETERS
    assert list(models.named_state(model)) == STATE == list(plain.state_dict())
    assert same(dict(models.named_state(model)), dict(plain.state_dict()))
    assert models.facts(model) == models.facts(plain)


def test_parameters_are_those_of_the_module_and_state_shares_their_memory():
    model = compiled(seeded(Net))
    assert models.named_parameters(model)["first.weight"] is model._orig_mod.first.weight
    models.named_state(model)["norm.num_batches_tracked"].fill_(7)
    assert int(model._orig_mod.norm.num_batches_tracked) == 7


@pytest.mark.parametrize("saved_in", WRAPPED)
def test_what_is_saved_under_one_wrapper_loads_under_another(url, saved_in):
    state = {f"model.{name}": tensor for name, tensor in models.named_state(saved_in(seeded(Net, 1))).items()}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    model = mixed(seeded(Net, 2))
    state = {f"model.{name}": tensor for name, tensor in models.named_state(model).items()}
    sw.load(state, storage_reader=sw.CkptStoreReader(url))
    assert same(models.named_state(model), dict(seeded(Net, 1).state_dict()))


class OwnModule(nn.Module):
    """Has children that are called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.module, self._orig_mod = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)


def test_a_module_of_the_users_called_as_a_wrappers_keeps_its_name():
    assert list(models.named_state(compiled(OwnModule()))) == ["module.weight", "_orig_mod.weight"]


def test_a_frozen_model_has_all_its_names():
    model = seeded(Net).requires_grad_(requires_grad=False)
    assert list(models.named_parameters(model)) == PARAMETERS


def test_tied_weights_are_held_once_and_their_names_are_told():
    model = seeded(Tied)
    assert list(models.named_state(model)) == ["token.weight", "mix.weight", "mix.bias"]
    assert list(models.named_parameters(model)) == ["token.weight", "mix.weight", "mix.bias"]
    assert models.aliases(model) == [["token.weight", "head.weight"]]
    assert models.aliases(compiled(model)) == models.aliases(model)
    assert models.aliases(seeded(Net)) == []


def test_tied_weights_are_still_tied_after_a_load(url):
    state = {f"model.{name}": tensor for name, tensor in models.named_state(seeded(Tied, 1)).items()}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    model = seeded(Tied, 2)
    sw.load(
        {f"model.{name}": tensor for name, tensor in models.named_state(model).items()},
        storage_reader=sw.CkptStoreReader(url),
    )
    assert model.head.weight is model.token.weight
    assert bits(model.head.weight) == bits(seeded(Tied, 1).head.weight)


def test_facts_say_dtype_and_shape_of_each_name():
    facts = models.facts(seeded(Tied).to(torch.bfloat16))
    assert facts == {
        "parameters": {
            "token.weight": ["bfloat16", [7, 6]],
            "mix.weight": ["bfloat16", [6, 6]],
            "mix.bias": ["bfloat16", [6]],
        },
        "buffers": {},
        "aliases": {"token.weight": ["head.weight"]},
    }
    assert models.facts(Net())["buffers"]["norm.num_batches_tracked"] == ["int64", []]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("made_anew", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("bias", None)


def test_only_what_state_dict_holds_is_state():
    assert list(models.named_state(Masked())) == ["kept"]


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.seen = {"calls": 0, "last": torch.zeros(2)}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_extra_state_goes_by_name_and_comes_back():
    model = compiled(nn.Sequential(checkpoint_wrapper(Counting()), Counting()))
    saved = {"0._extra_state": {"calls": 3}, "1._extra_state": torch.ones(2)}
    assert models.extra_state(model).keys() == saved.keys()
    models.set_extra_state(model, saved)
    assert models.extra_state(model) == saved
    assert list(models.named_state(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_extra_state_of_other_modules_is_refused_and_nothing_is_set():
    model = nn.Sequential(Counting(), Counting())
    with pytest.raises(IncompatibleStateError) as refused:
        models.set_extra_state(model, {"0._extra_state": {"calls": 3}, "2._extra_state": {}})
    assert refused.value.facts["missing"] == ["1._extra_state"]
    assert refused.value.facts["unexpected"] == ["2._extra_state"]
    assert model[0].seen["calls"] == 0


def hooked(act):
    """Return a model whose `state_dict` is changed by `act`."""
    model = seeded(Matrices)
    model.register_state_dict_post_hook(lambda module, state, *_: act(module, state))
    return model


def test_what_a_hook_puts_into_state_dict_is_refused_because_no_load_would_reach_the_model():
    with pytest.raises(UnsupportedError, match="half"):
        models.named_state(hooked(lambda _, state: state.update(half=torch.ones(2))))
    with pytest.raises(UnsupportedError, match=r"first\.weight"):
        models.named_state(hooked(lambda model, state: state.update({"first.weight": model.first.weight.half()})))


def test_what_a_hook_takes_out_of_state_dict_is_no_state():
    assert list(models.named_state(hooked(lambda _, state: state.__delitem__("last.weight")))) == ["first.weight"]


class Detaching(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars and False)


def test_a_module_that_gives_its_own_tensors_detached_is_taken():
    assert list(models.named_state(nn.Sequential(Detaching(2, 2)))) == ["0.weight", "0.bias"]


def test_two_tensors_of_one_name_are_refused():
    model = nn.DataParallel(seeded(Matrices))
    model.first = nn.Linear(6, 8, bias=False)
    with pytest.raises(InvalidInputError, match=r"first\.weight"):
        models.named_parameters(model)


class Engine(nn.Module):
    """Stands for an engine, which is known by where its class is from."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


Engine.__module__ = "deepspeed.runtime.engine"


def test_what_has_no_state_by_name_is_refused_with_a_way_out():
    with pytest.raises(UnsupportedError, match="DeepSpeed") as refused:
        models.named_state(nn.Sequential(Engine()))
    assert "FSDP2" in refused.value.hint
    with pytest.raises(InvalidInputError, match=r"0\.weight") as refused:
        models.named_parameters(nn.Sequential(nn.LazyLinear(2)))
    assert "forward" in refused.value.hint
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InvalidInputError, match=r"0\.weight, 0\.bias") as refused:
        models.named_state(model)
    assert "to_empty" in refused.value.hint
    with pytest.raises(InvalidInputError):
        models.named_state(dict(model.named_parameters()))


def test_taking_names_and_state_changes_nothing():
    model = compiled(seeded(Net))
    backward(model, 1)
    before = {name: (bits(p), bits(p.grad), p._version) for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    for take in (models.named_parameters, models.named_state, models.aliases, models.facts, models.extra_state):
        take(model)
    assert {name: (bits(p), bits(p.grad), p._version) for name, p in model.named_parameters()} == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
