"""A tree is cut into tensors and a value, goes through the store, and is whole again."""

import collections
import copy

import pytest
import torch
import torch.distributed as dist
from states import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.values import encode_value
from ckptstore.training.trees import TensorRef, join, split, targets
from ckptstore.training.values import value_types

LARGE = 2000


def large(value=1.0):
    return torch.full((LARGE,), value)


def tree():
    counts = collections.defaultdict(list, {"seen": [1, large(5.0)]})
    return {
        "shadow": {"layer.weight": large(1.0), "layer.bias": torch.ones(3)},
        "history": [large(2.0), (large(3.0), None, "text")],
        "queue": collections.deque([large(4.0), 7], maxlen=3),
        "ordered": collections.OrderedDict([("b", 1), ("a", large(6.0))]),
        "counts": counts,
        1: large(8.0),
        "decay": 0.999,
    }


def equal(one, other):
    """Say whether two trees are the same, with the types of their containers and the bits of their tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(equal, one, other))
    return same(one, other)


def test_large_tensors_are_cut_out_under_their_paths_and_small_ones_stay():
    tensors, value = split(tree(), prefix="ema")
    assert sorted(tensors) == [
        "ema.1",
        "ema.counts.seen.1",
        "ema.history.0",
        "ema.history.1.0",
        "ema.ordered.a",
        "ema.queue.0",
        "ema.shadow.layer.weight",
    ]
    assert value["shadow"]["layer.weight"] == TensorRef("ema.shadow.layer.weight", torch.float32, torch.Size([LARGE]))
    assert value["shadow"]["layer.bias"].tolist() == [1, 1, 1]
    assert (value["queue"].maxlen, value["counts"].default_factory, value["decay"]) == (3, list, 0.999)


def test_what_is_joined_is_what_was_split():
    whole = tree()
    tensors, value = split(whole, prefix="ema")
    assert equal(join(value, tensors), whole)
    assert equal(whole, tree())


def test_the_callers_containers_are_never_changed_nor_handed_out():
    whole = tree()
    _, value = split(whole, prefix="p")
    value["history"].append(1)
    value["counts"]["new"]
    value["queue"].clear()
    assert equal(whole, tree())


@pytest.mark.parametrize("root", [large(), 5, None, [large()], {}], ids=["tensor", "number", "none", "list", "empty"])
def test_any_value_may_be_a_tree(root):
    tensors, value = split(root, prefix="p")
    assert equal(join(value, tensors), root)


def test_the_size_that_stays_is_the_callers_to_say():
    whole = {"a": torch.ones(10), "b": torch.ones(11)}
    assert list(split(whole, prefix="p", inline_bytes=40)[0]) == ["p.b"]
    assert list(split(whole, prefix="p", inline_bytes=0)[0]) == ["p.a", "p.b"]
    for wrong in (-1, 2**20 + 1, None, True):
        with pytest.raises(InvalidInputError, match="inline_bytes"):
            split(whole, prefix="p", inline_bytes=wrong)


def test_a_parameter_is_stored_as_its_elements():
    tensors, value = split({"w": torch.nn.Parameter(large()), "b": torch.nn.Parameter(torch.ones(2))}, prefix="p")
    assert (type(tensors["p.w"]), tensors["p.w"].requires_grad) == (torch.Tensor, False)
    assert (type(value["b"]), value["b"].tolist()) == (torch.Tensor, [1, 1])


def test_the_same_memory_is_cut_out_once_and_is_one_tensor_again():
    tied = large()
    whole = {"a": tied, "b": [tied, torch.nn.Parameter(tied)], "turned": tied.view(2, -1), "part": tied[:1500]}
    tensors, value = split(whole, prefix="p")
    assert sorted(tensors) == ["p.a", "p.part", "p.turned"]
    found = join(value, tensors)
    assert found["a"] is found["b"][0]
    assert found["a"] is found["b"][1]


def test_names_that_say_nothing_or_are_taken_become_numbers():
    whole = {"a": {"b": large(1.0)}, "a.b": large(2.0), (1, 2): large(3.0), "": large(4.0), "\ud800": large(5.0)}
    whole |= {"new\nline": large(6.0), "x" * 500: large(7.0), "tensor-9": large(8.0), 2.5: large(9.0)}
    tensors, value = split(whole, prefix="p")
    assert len(tensors) == 9
    assert {"p.a.b", "p.tensor-1", "p.tensor-9"} <= tensors.keys()
    assert tensors["p.a.b"][0] == 1
    assert equal(join(value, tensors), whole)
    assert all(len(key) < 450 for key in tensors)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: {torch.ones(2)}, "set"),
        (lambda: {torch.ones(2): 1}, "key"),
    ],
    ids=["sparse", "meta", "set", "key"],
)
def test_what_cannot_be_stored_is_refused_with_its_place(make, why):
    with pytest.raises(UnsupportedError, match=rf"value\['a'\]\[0\].*{why}"):
        split({"a": [make()]}, prefix="p")


def test_a_tree_that_holds_itself_or_was_split_before_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(UnsupportedError, match="holds itself"):
        split(endless, prefix="p")
    with pytest.raises(InvalidInputError, match="split before"):
        split(split([large()], prefix="p")[1], prefix="q")


def test_a_missing_tensor_or_one_of_another_kind_is_never_put_back():
    tensors, value = split({"a": large(), "b": large(2.0)}, prefix="p")
    with pytest.raises(IncompatibleStateError, match=r"p\.b") as caught:
        join(value, {"p.a": tensors["p.a"]})
    assert caught.value.facts["key"] == "p.b"
    with pytest.raises(IncompatibleStateError, match=r"float32.*float64"):
        join(value, tensors | {"p.a": large().double()})
    with pytest.raises(IncompatibleStateError, match=r"\[2000\].*\[1999\]"):
        join(value, tensors | {"p.a": large()[1:]})


def test_targets_are_memory_of_their_own_with_what_was_saved():
    _, value = split({"a": large(), "list": [large().double()]}, prefix="p")
    now = {"a": large(7.0), "list": [large(7.0)]}
    before = copy.deepcopy(now)
    found = targets(value, now)
    assert {key: (each.dtype, each.shape) for key, each in found.items()} == {
        "p.a": (torch.float32, (LARGE,)),
        "p.list.0": (torch.float64, (LARGE,)),
    }
    for each in found.values():
        each.fill_(0)
    assert equal(now, before)


def test_a_target_lies_where_the_present_tensor_does_if_that_has_its_shape():
    _, value = split({"a": large(), "b": large(2.0), "c": large(3.0)}, prefix="p")
    now = {"a": torch.empty(LARGE, device="meta"), "b": torch.nn.Parameter(large()), "c": torch.zeros(3)}
    found = targets(value, now)
    assert found["p.b"].requires_grad is False
    assert {key: (each.device.type, each.numel()) for key, each in found.items()} == {
        "p.a": ("cpu", LARGE),
        "p.b": ("cpu", LARGE),
        "p.c": ("cpu", LARGE),
    }


def test_looking_for_the_present_tensors_changes_nothing():
    _, value = split({"counts": {"new": large()}, "list": [1, large()], "deep": {"er": [large()]}}, prefix="p")
    now = {"counts": collections.defaultdict(list), "list": [large()], "deep": "text"}
    assert sorted(targets(value, now)) == ["p.counts.new", "p.deep.er.0", "p.list.1"]
    assert not now["counts"]


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        _, value = split({"a": torch.ones(LARGE, device="cpu")}, prefix="p")
        assert targets(value)["p.a"].device.type == "cpu"


def test_a_tree_goes_through_the_store(tmp_path):
    whole, types = tree(), value_types()
    tensors, value = split(whole, prefix="ema")
    state = {**tensors, "values/ema": sw.TypedValue(encode_value(value, types=types))}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(str(tmp_path)))
    found = CheckpointStore.open(tmp_path).get("a").value("values/ema", types=types)
    memory = targets(found, tree())
    sw.load(memory, storage_reader=sw.CkptStoreReader(str(tmp_path), only=("ema",)))
    assert equal(join(found, memory), whole)


def reshard(url):
    """Save a sharded tensor on all ranks; load it into one that is sharded in another way, and whole."""
    rank, types = dist.get_rank(), value_types()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(70.0).reshape(10, 7)
    twice = distribute_tensor(full, mesh, [Shard(0)])
    tensors, value = split({"shadow": [twice, twice], "n": 1}, prefix="ema")
    state = dict(tensors)
    if rank == 0:
        state["values/ema"] = sw.TypedValue(encode_value(value, types=types))
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    found = CheckpointStore.open(url).get("a").value("values/ema", types=types)
    results = []
    for like in ({"shadow": [None, distribute_tensor(torch.zeros(10, 7), mesh, [Shard(1)])]}, None):
        memory = targets(found, like)
        sw.load(memory, storage_reader=sw.CkptStoreReader(url, only=("ema",)))
        (tensor, again) = join(found, memory)["shadow"]
        assert tensor is again
        sharded = isinstance(tensor, DTensor)
        results.append((sharded, torch.equal(tensor.full_tensor() if sharded else tensor, full)))
    return list(tensors), results


def test_a_sharded_tensor_is_loaded_as_the_target_shards_it(gang, tmp_path):
    keys, results = ["ema.shadow.0"], [(True, True), (False, True)]
    assert gang.values(2, reshard, str(tmp_path)) == [(keys, results)] * 2
