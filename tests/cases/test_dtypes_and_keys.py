"""What does not fit is refused by name, on every rank, before a target is touched; ways round are explicit and told."""

import pytest
import torch
import torch.distributed as dist
from case_samples import writer
from states import bits, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import storage_writers as sw
from ckptstore import CheckpointStore, IncompatibleStateError

SAVED = {
    "exact": torch.tensor([0.1, 0.2]),
    "weights": torch.tensor([1.001, 2.003, 3.0]),
    "count": torch.tensor([2**40, 1]),
    "ratio": torch.tensor([0.5, 1.5]),
    "spectrum": torch.tensor([1 + 2j, 3 - 1j]),
    "quantised": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
    "scale": torch.tensor(3.0),
}
WANTED = {
    "exact": torch.float32,
    "weights": torch.bfloat16,
    "count": torch.int32,
    "ratio": torch.int64,
    "spectrum": torch.float32,
    "quantised": torch.bfloat16,
    "mask": torch.float32,
    "scale": torch.float64,
}


def saved(root, state):
    sw.save(state, checkpoint_id="step-1", storage_writer=writer(root))


def test_every_dtype_that_differs_is_listed_with_both_and_nothing_is_rounded(root):
    saved(root, SAVED)
    target = {name: torch.zeros(SAVED[name].shape, dtype=dtype) for name, dtype in WANTED.items()}
    before = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(IncompatibleStateError, match=r"weights was saved as torch\.float32, the target has") as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(root))
    unlike = sorted([name, str(SAVED[name].dtype), str(dtype)] for name, dtype in WANTED.items() if name != "exact")
    assert sorted(caught.value.facts["casts"]) == unlike
    assert same(target, before)

    reader = sw.CkptStoreReader(root, allow_cast=True)
    sw.load(target, storage_reader=reader)
    for name, dtype in WANTED.items():
        source = SAVED[name].real if SAVED[name].is_complex() else SAVED[name]
        assert bits(target[name]) == bits(source.to(dtype)), name
    assert sorted([cast.key, cast.saved, cast.target] for cast in reader.report.cast) == unlike


def test_a_scalar_and_a_tensor_of_one_element_are_not_the_same(root):
    saved(root, {"a": torch.tensor(1.0), "b": torch.ones(1), "c": torch.ones(2, 3)})
    target = {"a": torch.zeros(1), "b": torch.tensor(0.0), "c": torch.zeros(3, 2)}
    with pytest.raises(IncompatibleStateError) as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(root, allow_cast=True))
    for name, was, wanted in (("a", [], [1]), ("b", [1], []), ("c", [2, 3], [3, 2])):
        assert f"{name} was saved as a tensor {was}, the target is a tensor {wanted}" in str(caught.value)
    assert same(target, {"a": torch.zeros(1), "b": torch.tensor(0.0), "c": torch.zeros(3, 2)})


def load_with_another_dtype_on_rank_one(root):
    """Return what was heard, and whether the target is what it was."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = torch.bfloat16 if dist.get_rank() == 1 else torch.float32
    state = {
        "plain": torch.zeros(3),
        "w": distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0)]),
        "m": torch.zeros(4, dtype=dtype),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    try:
        sw.load(state, storage_reader=sw.CkptStoreReader(root))
    except IncompatibleStateError as error:
        return error.facts["rank"], error.facts["casts"], same(state, before)
    return None


def test_a_dtype_that_differs_on_one_rank_stops_all_before_any_is_touched(gang, root):
    saved(root, {"plain": torch.ones(3), "w": torch.ones(8, 2), "m": torch.ones(4)})
    heard = gang.values(3, load_with_another_dtype_on_rank_one, root)
    assert heard == [(1, [["m", "torch.float32", "torch.bfloat16"]], True)] * 3


# Keys


def layers(count):
    torch.manual_seed(count)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def keys_of(*numbers):
    return sorted(f"model.{number}.{kind}" for number in numbers for kind in ("weight", "bias"))


def state_of(model):
    return {"model": model.state_dict()}


def load_into(root, model, **options):
    """Load, and return what was refused or reported, and whether the model is what it was."""
    target = state_of(model)
    before = {"model": {key: value.clone() for key, value in target["model"].items()}}
    reader = sw.CkptStoreReader(root, **options)
    try:
        sw.load(target, storage_reader=reader)
    except IncompatibleStateError as error:
        assert same(target, before)
        return error
    return reader.report


@pytest.fixture
def three(root):
    """A model of three layers, saved."""
    model = layers(3)
    saved(root, state_of(model))
    return model


def test_three_layers_do_not_load_into_two_and_the_keys_left_over_are_named(root, three):
    error = load_into(root, layers(2))
    assert (error.facts["unexpected"], error.facts.get("missing", [])) == (keys_of(2), [])
    assert all(key in str(error) for key in keys_of(2))
    model = layers(2)
    report = load_into(root, model, allow_unexpected=True)
    assert (sorted(report.skipped), report.missing) == (keys_of(2), ())
    assert same(dict(model.state_dict()), {key: value for key, value in three.state_dict().items() if key[0] != "2"})


def test_three_layers_do_not_load_into_four_and_the_keys_not_there_are_named(root, three):
    error = load_into(root, layers(4))
    assert sorted(error.facts["missing"]) == keys_of(3)
    assert all(key in str(error) for key in keys_of(3))
    model = layers(4)
    before = model[3].weight.clone()
    report = load_into(root, model, allow_missing=True)
    assert (sorted(report.missing), report.skipped) == (keys_of(3), ())
    assert same(dict(model[:3].state_dict()), dict(three.state_dict()))
    assert same(model[3].weight, before)


class Renamed(nn.Module):
    """Two of the three layers, and one under another name."""

    def __init__(self):
        super().__init__()
        for name in ("0", "1", "head"):
            self.add_module(name, nn.Linear(4, 4))


def test_a_renamed_layer_is_named_as_missing_and_as_unexpected_in_one_message(root, three):
    error = load_into(root, Renamed())
    assert sorted(error.facts["missing"]) == keys_of("head")
    assert sorted(error.facts["unexpected"]) == keys_of(2)
    assert all(key in str(error) for key in keys_of("head", 2))
    for one_way in ({"allow_missing": True}, {"allow_unexpected": True}):
        assert isinstance(load_into(root, Renamed(), **one_way), IncompatibleStateError)
    report = load_into(root, Renamed(), allow_missing=True, allow_unexpected=True)
    assert (sorted(report.missing), sorted(report.skipped)) == (keys_of("head"), keys_of(2))


class Wrapped(nn.Module):
    """As wrappers for data parallelism and compilers do."""

    def __init__(self, prefix, model):
        super().__init__()
        self.add_module(prefix, model)


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_a_wrapper_around_the_model_is_refused_with_both_lists_or_told_to_fit_nowhere(root, three, prefix):
    error = load_into(root, Wrapped(prefix, layers(3)))
    assert sorted(error.facts["missing"]) == sorted(
        f"model.{prefix}.{key.removeprefix('model.')}" for key in keys_of(0, 1, 2)
    )
    assert sorted(error.facts["unexpected"]) == keys_of(0, 1, 2)
    report = load_into(root, Wrapped(prefix, layers(3)), allow_missing=True, allow_unexpected=True)
    assert (len(report.missing), len(report.skipped)) == (6, 6)  # told, though nothing fits


def load_two_layers(root, ranks_that_have_the_third):
    """The target of one rank alone may hold a key."""
    numbers = (0, 1, 2) if dist.get_rank() in ranks_that_have_the_third else (0, 1)
    target = {"model": {f"{n}.{kind}": torch.zeros(4, 4) if kind == "weight" else torch.zeros(4)
                        for n in numbers for kind in ("weight", "bias")}}  # fmt: skip
    try:
        sw.load(target, storage_reader=sw.CkptStoreReader(root))
    except IncompatibleStateError as error:
        return error.facts["unexpected"]
    return sorted(f"model.{key}" for key in target["model"])


def test_a_key_that_no_rank_has_is_refused_on_all_and_one_rank_that_has_it_is_enough(gang, root, three):
    assert gang.values(2, load_two_layers, root, []) == [keys_of(2)] * 2
    assert gang.values(2, load_two_layers, root, [1]) == [keys_of(0, 1), keys_of(0, 1, 2)]


def test_a_part_that_is_asked_for_is_loaded_alone(root, three):
    model = layers(3)
    target = {"model": {key: value for key, value in model.state_dict().items() if key.startswith("1.")}}
    wanted = {key: value for key, value in three.state_dict().items() if key.startswith("1.")}
    sw.load(target, storage_reader=sw.CkptStoreReader(root, only=("model.1",)))
    assert same(target["model"], wanted)
    assert sorted(CheckpointStore.open(root).latest().keys) == keys_of(0, 1, 2)
