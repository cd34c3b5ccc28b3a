"""What is staged: every kind of value as it was when the save was asked for, whatever the planner does with it."""

import collections
import io
import threading

import pytest
import torch
from staged import Slow, bytes_of, contents_of, saved, upload
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from ckptstore.errors import UnsupportedError
from ckptstore.format.dtypes import DTYPES
from ckptstore.units import MIB
from storage_writers.staging import StagingPool

SOON = 20.0
STORABLE = [name for name, dtype in DTYPES.items() if not dtype.refused]


def loaded(data):
    return torch.load(io.BytesIO(data), weights_only=False)


class Schedule:
    def __init__(self, tensor):
        self.history = [tensor]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("staging_bytes", [0, None])
@pytest.mark.parametrize("name", STORABLE)
def test_every_element_type_is_staged_whole_or_by_every_other_element(name, staging_bytes):
    raw = torch.randint(0, 255, (64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    raw = raw % 2 if name == "bool" else raw
    tensor = raw.view(getattr(torch, name))
    state = {"whole": tensor, "some": tensor[::2, ::2], "turned": tensor.T, "one": tensor[0, 0]}
    staged = StagingPool(staging_bytes=staging_bytes).stage(state)
    got = saved(staged)
    assert got["whole"] == raw.numpy().tobytes()
    assert got["turned"] == bytes_of(tensor.T)
    assert got["some"] == bytes_of(tensor[::2, ::2])
    assert got["one"] == raw.numpy().tobytes()[: tensor.element_size()]
    staged.end()


def test_what_is_no_tensor_is_taken_by_value_before_stage_returns():
    inner = torch.ones(3)
    leaf = nn.Parameter(torch.ones(2))
    state = {
        "step": 1,
        "text": "a",
        "list": [1, [2, 3]],
        "pair": (torch.ones(2), {"deep": inner}, leaf * 3),
        "object": Schedule(inner),
        "set": {1},
    }
    staged = StagingPool().stage(state)
    state["list"][1].append(9)
    state["pair"][0].fill_(9)
    inner.fill_(9)
    state["set"].add(9)
    state["step"] = 9
    got = {name: loaded(data) for name, data in saved(staged).items()}
    assert got["step"] == 1
    assert got["list"] == [1, [2, 3]]
    assert got["pair"][0].tolist() == [1, 1]
    assert got["pair"][1]["deep"].tolist() == [1, 1, 1]
    assert got["pair"][2].tolist() == [3, 3]
    assert got["object"].history[0].tolist() == [1, 1, 1]
    assert got["set"] == {1}
    staged.end()


def test_a_value_that_cannot_be_copied_is_named():
    pool = StagingPool()
    with pytest.raises(UnsupportedError, match=r"nested\.0\.lock") as caught:
        pool.stage({"w": torch.ones(2), "nested": [{"lock": threading.Lock()}]})
    assert caught.value.facts["key"] == "nested.0.lock"
    pool.stage({"w": torch.ones(2)}).end()


@pytest.mark.parametrize("staging_bytes", [0, None])
def test_tied_tensors_are_copied_once_and_saved_under_each_name(staging_bytes):
    tied = torch.randn(100_000)
    pool = StagingPool(staging_bytes=staging_bytes)
    staged = pool.stage({"a": tied, "b": {"c": nn.Parameter(tied)}, "part": tied[:10]})
    assert staged.state["a"] is staged.state["b"]["c"]
    got = saved(staged)
    assert got == {"a": bytes_of(tied), "b.c": bytes_of(tied), "part": bytes_of(tied[:10])}
    assert pool.held_bytes < 500_000
    staged.end()


def test_kinds_of_dicts_keep_their_kind_and_what_is_attached_to_them():
    module = nn.Linear(2, 2)
    state = {"model": module.state_dict(), "counts": collections.defaultdict(int, a=1)}
    staged = StagingPool().stage(state)
    assert type(staged.state["model"]) is collections.OrderedDict
    assert staged.state["model"]._metadata == state["model"]._metadata
    assert type(staged.state["counts"]) is collections.defaultdict
    assert list(staged.state["model"]) == list(state["model"])
    assert state["model"]["weight"].data_ptr() == module.weight.data_ptr()
    staged.end()


class Halving(DefaultSavePlanner):
    """Computes what is saved from the tensors of the state, as a planner may."""

    def transform_object(self, write_item, object):  # noqa: A002  (DCP's name)
        if write_item.type is WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        return object * 0.5


class Whole(DefaultSavePlanner):
    """Saves, under each name, a view of the tensor that only this planner knows of."""

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found.flip(0) if isinstance(found, torch.Tensor) and found.dim() else found


@pytest.mark.parametrize("staging_bytes", [0, 3 * MIB, None])
@pytest.mark.parametrize(("planner", "change"), [(Halving, lambda t: t * 0.5), (Whole, lambda t: t.flip(0))])
def test_a_planner_that_computes_what_is_saved_sees_the_state_as_it_was(planner, change, staging_bytes):
    state = {f"w{index}": torch.randn(MIB // 4) for index in range(5)} | {"step": 1}
    expected = {name: bytes_of(change(value)) for name, value in state.items() if name != "step"}
    staged = StagingPool(staging_bytes=staging_bytes).stage(state)
    got = {}
    uploading = threading.Thread(target=lambda: got.update(saved(staged, Slow(), planner=planner())))
    uploading.start()
    staged.fence(seconds=SOON)
    while uploading.is_alive():
        for value in list(state.values())[:-1]:
            value.fill_(1)
    assert loaded(got.pop("step")) == 1
    assert got == expected
    staged.end()


@pytest.mark.parametrize("staging_bytes", [0, None])
def test_a_planner_that_pickles_whole_dicts_pickles_their_tensors_and_not_the_pool(staging_bytes):
    state = {"model": {"w": torch.arange(10.0), "list": [torch.ones(3)]}, "large": torch.zeros(MIB)}
    staged = StagingPool(staging_bytes=staging_bytes).stage(state)
    contents = contents_of(staged, planner=DefaultSavePlanner(flatten_state_dict=False))
    got = upload(contents)
    assert len(got["model"]) < 10_000
    found = loaded(got["model"])
    assert found["w"].tolist() == list(range(10))
    assert found["list"][0].tolist() == [1, 1, 1]
    staged.fence(seconds=SOON)
    staged.end()


def test_tensors_of_an_unknown_kind_stay_the_callers_and_hold_the_fence_until_they_are_read():
    class Odd(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    odd = torch.arange(10.0).as_subclass(Odd)
    staged = StagingPool().stage({"odd": odd, "w": torch.ones(2)})
    assert not staged.is_whole
    assert staged.state["odd"] is odd
    contents = contents_of(staged)
    assert not staged._all_read
    assert upload(contents)["odd"] == torch.arange(10.0).numpy().tobytes()
    staged.fence(seconds=SOON)
    staged.end()


@pytest.mark.parametrize("staging_bytes", [0, 300 * 1024, None])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_it_does_not_matter_in_which_mode_of_torch_a_state_is_staged(mode, staging_bytes):
    pool = StagingPool(staging_bytes=staging_bytes)
    state = {f"w{index}": torch.randn(50_000) for index in range(3)} | {"flat": torch.randn(50, 40).T}
    expected = {name: bytes_of(value) for name, value in state.items()}
    for _ in range(2):
        with mode():
            staged = pool.stage(state | ({"made": torch.ones(7)} if mode is torch.inference_mode else {}))
        got = saved(staged)
        assert {name: got[name] for name in expected} == expected
        staged.fence(seconds=SOON)
        staged.end()
    pool.close()


class Frozen(dict):
    """A mapping that takes nothing once it is made."""

    def __setitem__(self, key, value):
        raise TypeError("It is frozen.")


def holding_itself():
    value = [torch.ones(1)]
    value.append(value)
    return value


@pytest.mark.parametrize("make", [lambda: Frozen(a=torch.ones(3)), holding_itself], ids=["frozen", "without an end"])
def test_a_container_that_cannot_be_copied_is_refused_with_its_key_and_the_pool_goes_on(make):
    pool = StagingPool()
    with pytest.raises(UnsupportedError, match=r"job\.hook.* cannot be copied") as caught:
        pool.stage({"job": {"hook": make()}})
    assert caught.value.facts["key"].startswith("job.hook")
    assert len(str(caught.value)) < 1000
    staged = pool.stage({"w": torch.ones(3)})
    assert saved(staged) == {"w": bytes_of(torch.ones(3))}
    staged.end()
