"""Documents of typed JSON in a state: stored as they are by every way of saving, read back without torch."""

import collections
import datetime as dt
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import MAX_VALUE_BYTES, encode_value
from ckptstore.objectstore.urls import open_store

VALUE = {
    "step": 2**60,
    "order": (1, "two", None),
    "seen": {3, 1},
    1: collections.deque([0.5, float("inf")], maxlen=4),
    "at": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}


def typed(value):
    return sw.TypedValue(encode_value(value, types=standard_types()))


def state():
    return {
        "w": torch.arange(1000.0),
        "values/job": typed(VALUE),
        "job": {"empty": typed(None), "number": 5},
        "model": [torch.ones(3), typed([1])],  # a list with tensors is taken apart
    }


def check(url, name="a"):
    checkpoint = CheckpointStore.open(url).get(name)
    found = checkpoint.value("values/job")
    assert list(found) == list(VALUE)
    array = found.pop("array")
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    assert found == {key: value for key, value in VALUE.items() if key != "array"}
    assert found[1].maxlen == 4
    assert checkpoint.value("job.empty") is None
    assert checkpoint.value("model.1") == [1]
    assert checkpoint.read("values/job").tobytes() == encode_value(VALUE, types=standard_types())
    assert checkpoint.read("w").tolist() == list(range(1000))
    return checkpoint


def save_by_dcp(state, writer):
    dcp.save(state, checkpoint_id="a", storage_writer=writer)


def save_in_the_background_by_dcp(state, writer):
    dcp.async_save(state, checkpoint_id="a", storage_writer=writer).result(30)


WAYS = {
    "sw.save": lambda state, writer: sw.save(state, checkpoint_id="a", storage_writer=writer),
    "dcp.save": save_by_dcp,
    "dcp.save by the stock planner": lambda state, writer: dcp.save(
        state, checkpoint_id="a", storage_writer=writer, planner=DefaultSavePlanner()
    ),
    "sw.async_save": lambda state, writer: sw.async_save(state, checkpoint_id="a", storage_writer=writer).result(30),
    "dcp.async_save": save_in_the_background_by_dcp,
}


@pytest.mark.parametrize("staging_bytes", [None, 0], ids=["staged", "streamed"])
@pytest.mark.parametrize("way", WAYS)
def test_a_typed_value_comes_back_with_its_types_whatever_saved_it(url, way, staging_bytes):
    writer = sw.CkptStoreWriter(url, staging_bytes=staging_bytes)
    WAYS[way](state(), writer)
    writer.close()
    check(url)


def test_its_codec_stands_with_its_key(url):
    WAYS["sw.save"](state(), sw.CkptStoreWriter(url))
    keys = check(url).keys
    assert {key: each.codec for key, each in keys.items()} == {
        "job.empty": "ckptstore.json/1",
        "job.number": "torch.save",
        "model.0": None,
        "model.1": "ckptstore.json/1",
        "values/job": "ckptstore.json/1",
        "w": None,
    }
    size = len(encode_value(VALUE, types=standard_types()))
    assert (keys["values/job"].dtype, keys["values/job"].shape, keys["values/job"].nbytes) == ("bytes", (size,), size)


def save_on_ranks(url, how):
    rank = dist.get_rank()
    mine = {f"ranks/{rank:05d}/rng": typed((rank, "mine")), f"w{rank}": torch.full((10,), float(rank))}
    if rank == 0:
        mine["values/job"] = typed({"of": "rank 0"})
    mine["values/shared"] = typed([1, 2])
    writer = sw.CkptStoreWriter(url)
    if how == "sw.save":
        sw.save(mine, checkpoint_id="a", storage_writer=writer)
    elif how == "sw.async_save":
        sw.async_save(mine, checkpoint_id="a", storage_writer=writer).result(30)
    else:
        dcp.async_save(
            mine,
            checkpoint_id="a",
            storage_writer=writer,
            process_group=writer.process_group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            planner=DefaultSavePlanner(),
        ).result(30)


@pytest.mark.parametrize("how", ["sw.save", "sw.async_save", "dcp.async_save"])
def test_each_rank_has_its_own_and_what_several_hold_is_stored_once(gang, tmp_path, how):
    gang.values(3, save_on_ranks, str(tmp_path), how)
    checkpoint = CheckpointStore.open(tmp_path).get("a")
    assert [checkpoint.value(f"ranks/{rank:05d}/rng") for rank in range(3)] == [(rank, "mine") for rank in range(3)]
    assert (checkpoint.value("values/job"), checkpoint.value("values/shared")) == ({"of": "rank 0"}, [1, 2])
    assert CheckpointStore.open(tmp_path).verify(checkpoint, level="full").ok


@pytest.mark.parametrize("load", [sw.load, dcp.load], ids=["sw", "dcp"])
def test_dcp_does_not_load_it_and_says_what_does(url, load):
    WAYS["sw.save"]({"w": torch.ones(2), "v": typed(1)}, sw.CkptStoreWriter(url))
    target = {"w": torch.zeros(2), "v": None}
    with pytest.raises((UnsupportedError, dcp.CheckpointException)) as caught:
        load(target, storage_reader=sw.CkptStoreReader(url))
    error = sw.cause(caught.value) or caught.value
    assert (type(error), error.facts["key"]) == (UnsupportedError, "v")
    assert "Checkpoint.value" in error.hint
    assert "only=" in error.hint
    assert target["w"].tolist() == [0, 0]
    target = {"w": torch.zeros(2)}
    load(target, storage_reader=sw.CkptStoreReader(url, only=("w",)))
    assert target["w"].tolist() == [1, 1]


def test_what_is_no_typed_value_is_refused_by_name(url):
    WAYS["sw.save"]({"w": torch.ones(2, 3), "pickled": {"a": 1}}, sw.CkptStoreWriter(url))
    checkpoint = CheckpointStore.open(url).get("a")
    with pytest.raises(UnsupportedError, match=r"w is no typed value.*float32 tensor \[2, 3\]"):
        checkpoint.value("w")
    with pytest.raises(UnsupportedError, match=r"pickled.a is no typed value.*torch.save") as caught:
        checkpoint.value("pickled.a")
    assert caught.value.facts == {"key": "pickled.a", "codec": "torch.save"}
    with pytest.raises(NotFoundError, match="no key 'absent'"):
        checkpoint.value("absent")


def test_types_of_the_users_come_back_where_they_are_registered_and_are_refused_elsewhere(url):
    import enum  # noqa: PLC0415

    class Phase(enum.Enum):
        WARM = 1

    types = standard_types()
    types.register_enum(Phase, "phase")
    body = encode_value({"phase": Phase.WARM}, types=types)
    WAYS["sw.save"]({"v": sw.TypedValue(body)}, sw.CkptStoreWriter(url))
    checkpoint = CheckpointStore.open(url).get("a")
    assert checkpoint.value("v", types=types) == {"phase": Phase.WARM}
    with pytest.raises(UnsupportedError, match=r"v\['phase'\] was stored as 'enum:phase'"):
        checkpoint.value("v")


def test_a_damaged_value_is_never_returned(tmp_path):
    WAYS["sw.save"]({"v": typed("aaaaaaaaaaaaaaaa")}, sw.CkptStoreWriter(str(tmp_path)))
    store = open_store(str(tmp_path))
    (shard,) = [each.key for each in store.list("data/") if each.key.endswith(".safetensors")]
    body = store.get(shard, max_bytes=1 << 20)
    store.put(shard, body.replace(b"aaaaaaaaaaaaaaaa", b"aaaaaaaaaaaaaaab"))
    with pytest.raises(IntegrityError):
        CheckpointStore.open(tmp_path).get("a").value("v")


@pytest.mark.parametrize(
    "body", ["{}", None, b"", b"\x80\x04", b"{'a': 1}", b"NaN", b'{"a":1,"a":2}', bytearray(b"{}")], ids=repr
)
def test_what_is_no_document_is_refused_where_it_is_made(body):
    with pytest.raises(InvalidInputError, match="typed value"):
        sw.TypedValue(body)


def test_a_document_that_no_reader_takes_is_refused_where_it_is_made():
    with pytest.raises(InvalidInputError, match=str(MAX_VALUE_BYTES)):
        sw.TypedValue(b'"' + b"a" * MAX_VALUE_BYTES + b'"')


def test_it_is_a_value_pickled_compared_and_printed_without_its_bytes():
    value = typed("secret")
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301  (our own)
    assert hash(value) == hash(typed("secret"))
    assert repr(value) == "TypedValue(8 bytes)"
    with pytest.raises(AttributeError):
        value.body = b"{}"


def test_inside_of_a_value_that_is_pickled_it_is_refused_not_stored_where_nobody_reads_it(url):
    with pytest.raises(UnsafePickleError, match="hidden"):
        WAYS["sw.save"]({"hidden": (typed(1),)}, sw.CkptStoreWriter(url))
    assert CheckpointStore.open(url).latest() is None


def test_nothing_of_torch_is_needed_to_read_one(tmp_path):
    WAYS["sw.save"](state(), sw.CkptStoreWriter(str(tmp_path)))
    code = (
        "import sys; from ckptstore import CheckpointStore;"
        f"print(CheckpointStore.open({str(tmp_path)!r}).get('a').value('values/job')['order'], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "(1, 'two', None) False"
