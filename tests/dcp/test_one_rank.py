import collections
import datetime as dt
import pathlib
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import bits, blank, same

import storage_writers as sw
from ckptstore.errors import UnsupportedError
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import LogOptions

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
STORABLE = {
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}


def save_and_load(url, state, **options):
    sw.save(state, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url, **options))
    target = blank(state)
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    return target


def test_torch_has_the_dtypes_that_this_suite_knows():
    assert len(DTYPES) == 46
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES} >= STORABLE


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit_or_is_refused_with_key_and_dtype(url, dtype):
    if dtype in (torch.qint8, torch.quint8, torch.qint32):
        tensor = torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 0, dtype)
    else:
        tensor = torch.empty(4, 6, dtype=dtype)
    if str(dtype).removeprefix("torch.") not in STORABLE:
        with pytest.raises(UnsupportedError, match=r"layer\.w") as caught:
            sw.save({"layer": {"w": tensor}}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
        assert caught.value.facts["dtype"] == str(dtype).removeprefix("torch.")
        assert list(sw.CkptStoreWriter(url)._store.list("data/")) == []
        return
    memory = torch.randint(256, (4 * 6 * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        memory &= 1
    state = {"w": memory.view(dtype).view(4, 6), "scalar": memory.view(dtype)[3]}
    assert same(save_and_load(url, state), state)


class Scratch(sw.SavePlanner):
    """Computes what is saved, always in the same memory."""

    scratch = torch.empty(4 << 20)

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return torch.mul(found, 2, out=self.scratch) if isinstance(found, torch.Tensor) else found


def test_a_planner_may_use_its_memory_again_for_the_next_tensor(url):
    state = {f"w{index}": torch.full((4 << 20,), float(index)) for index in range(6)}
    sw.save(state, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url), planner=Scratch())
    target = blank(state)
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert all(bool((target[f"w{index}"] == 2.0 * index).all()) for index in range(6))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(120.0).view(4, 5, 6).permute(2, 0, 1),
        torch.arange(24.0).view(4, 6)[::2, 1::3],
        torch.arange(24.0)[5:6],
        torch.tensor(2.0).expand(3, 4),
        torch.randn(5, 3, dtype=torch.complex64).conj(),
        torch.randn(5, 3, dtype=torch.complex64).conj().imag,
        torch.randn(3000, 700).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.randn(3, 3)),
    ],
    ids=lambda t: f"{list(t.shape)}-{list(t.stride())}",
)
def test_every_view_is_saved_as_what_it_shows(url, tensor):
    target = {"x": torch.full(tensor.shape, 7, dtype=tensor.dtype)}
    sw.save({"x": tensor}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert bits(target["x"]) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t.view(4, 3, 2).permute(2, 0, 1),
        lambda t: t[1:2, 3:4].squeeze(),
        torch._neg_view,
    ],
)
def test_every_view_can_be_a_target_and_its_neighbours_stay(url, view):
    memory = torch.zeros(4, 6)
    target = view(memory)
    saved = torch.randn(target.shape)
    expected = torch.zeros(4, 6)
    view(expected).copy_(saved)
    sw.save({"x": saved}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    sw.load({"x": target}, storage_reader=sw.CkptStoreReader(url))
    assert bits(target) == bits(saved)
    assert bits(memory) == bits(expected)


VALUES = [
    *(None, True, 7, -(2**5000), 1.5, float("inf"), "text ñ", b"\x00\xff", (1, (2, "x")), [1, [2]], {1, 2}),
    *(frozenset([1]), complex(1, 2), bytearray(b"x"), range(3), slice(1, 2)),
    *(collections.OrderedDict(a=1), collections.defaultdict(list, {1: [2]}), collections.Counter("aab")),
    *(collections.deque([1, 2], maxlen=2), dt.datetime.now(dt.UTC), dt.timedelta(1), pathlib.PurePosixPath("a/b")),
    *(np.float32(2.5), np.dtype("f4"), torch.float32, torch.Size([1, 2]), torch.device("cpu")),
    *(random.getstate(), np.random.default_rng(3).bit_generator.state),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_harmless_values_come_back_as_they_were(url, value, planner):
    state = {"job": {"value": (value,)}}  # in a tuple, which DCP does not flatten
    sw.save(state, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    target = {"job": {"value": "blank"}}
    (sw.load if planner == "ours" else dcp.load)(target, storage_reader=sw.CkptStoreReader(url))
    (found,) = target["job"]["value"]
    assert type(found) is type(value)
    assert found == value


def test_arrays_and_tensors_inside_of_values_come_back(url):
    value = (np.arange(6.0).reshape(2, 3), torch.arange(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.uint32))
    target = {"value": "blank"}
    sw.save({"value": value}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert (target["value"][0] == value[0]).all()
    assert same([*target["value"][1:]], [*value[1:]])


def test_generators_go_on_where_they_were(url):
    generator = np.random.default_rng(5)
    generator.random(10)
    sw.save({"rng": (generator,)}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    target = {"rng": "blank"}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert target["rng"][0].random() == generator.random()


def test_values_under_keys_of_any_type_come_back_under_these_keys(url):
    state = {"groups": {0: "a", (1, 2): "b", True: {"x": torch.ones(2)}, None: [{"y": 3}]}}
    assert same(save_and_load(url, state), state)


def test_tied_tensors_are_each_restored(url):
    weight = torch.randn(4, 4)
    state = {"embedding": weight, "head": weight}
    assert same(save_and_load(url, state), state)


def test_a_stateful_object_is_saved_and_loaded_through_its_own_state(url):
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sw.save({"model": model}, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    sw.load({"model": other}, storage_reader=sw.CkptStoreReader(url))
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_the_whole_state_can_be_loaded_without_a_target(url):
    state = {"model": {"w": torch.randn(3), "layers": [torch.ones(1), torch.zeros(1)]}, "epoch": 3}
    sw.save(state, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    loaded = dcp.state_dict_loader._load_state_dict_from_keys(storage_reader=sw.CkptStoreReader(url))
    assert same(loaded, state)


def test_a_save_records_what_was_described_for_it_and_the_next_does_not(url):
    writer = sw.CkptStoreWriter(url)
    writer.describe(global_step=12, metrics={"loss": float("nan")}, parallelism={"dp": 1}, tags=["x"])
    sw.save({"w": torch.ones(1)}, storage_writer=writer)
    first = writer.committed.commit
    sw.save({"w": torch.ones(1)}, checkpoint_id="best", storage_writer=writer)
    second = writer.committed.commit
    assert (first.checkpoint_id, first.global_step, first.tags, first.parallelism) == ("step-12", 12, ("x",), {"dp": 1})
    assert first.metrics["loss"] != first.metrics["loss"]
    assert (second.checkpoint_id, second.global_step, second.tags) == ("best", None, ())
    assert second.parent == 1


@pytest.mark.parametrize(("name", "step"), [("step-7", 7), ("step_0012", 12), ("stepwise", None), ("my-step-7", None)])
def test_the_step_is_read_from_a_name_that_says_it(url, name, step):
    writer = sw.CkptStoreWriter(url)
    sw.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=writer)
    assert writer.committed.commit.global_step == step


def test_a_checkpoint_is_found_by_name_step_seq_and_as_the_newest(url):
    writer = sw.CkptStoreWriter(url)
    for step in (1, 2, 3):
        sw.save({"w": torch.tensor(step)}, checkpoint_id=f"step-{step}", storage_writer=writer)

    def loaded(checkpoint_id=None, **which):
        target = {"w": torch.tensor(0)}
        sw.load(target, checkpoint_id=checkpoint_id, storage_reader=sw.CkptStoreReader(url, **which))
        return int(target["w"])

    assert [loaded(), loaded(checkpoint_id="step-1"), loaded(step=2), loaded(seq=1)] == [3, 1, 2, 1]
    assert loaded("step-2", seq=1) == 2  # DCP's own argument goes before


class WithoutConditions(ForwardingStore):
    """A store that takes a create for a plain put."""

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        del mode
        return super().put(key, body)


@pytest.mark.parametrize(
    ("keyword", "options", "works"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_the_promise_of_a_single_writer_is_the_keywords_or_else_that_of_the_options(url, keyword, options, works):
    def save():
        log = LogOptions(assume_single_writer=options)
        writer = sw.CkptStoreWriter(WithoutConditions(open_store(url)), assume_single_writer=keyword, log=log)
        sw.save({"x": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)

    if works:
        save()
    else:
        with pytest.raises(UnsupportedError, match="single"):
            save()
