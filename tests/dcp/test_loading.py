import dataclasses
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import bits, blank, same

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import ConflictError, IncompatibleStateError, IntegrityError, NotFoundError
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.testing.tapped import TappedStore
from storage_writers import loading


def saved(url, state, name="step-1"):
    sw.save(state, checkpoint_id=name, storage_writer=sw.CkptStoreWriter(url))
    return state


def model():
    return {"model": {"w": torch.randn(8, 4), "b": torch.randn(4)}, "optim": {"m": torch.randn(8, 4), "lr": 0.1}}


def test_missing_keys_are_all_listed_and_the_target_stays_whole(url):
    saved(url, {"model": {"w": torch.ones(2), "old": torch.ones(1)}})
    target = {"model": {"w": torch.zeros(2), "new": torch.zeros(1), "newer": {1, 2}}}
    with pytest.raises(IncompatibleStateError) as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert caught.value.facts["missing"] == ["model.new", "model.newer"]
    assert caught.value.facts["unexpected"] == ["model.old"]
    assert same(target, {"model": {"w": torch.zeros(2), "new": torch.zeros(1), "newer": {1, 2}}})


def test_missing_keys_keep_their_values_if_that_is_allowed_and_are_reported(url):
    saved(url, {"model": {"w": torch.ones(2)}})
    target = {"model": {"w": torch.zeros(2), "new": torch.full((1,), 3.0), "newer": {1, 2}}}
    reader = sw.CkptStoreReader(url, allow_missing=True)
    sw.load(target, storage_reader=reader)
    assert same(target, {"model": {"w": torch.ones(2), "new": torch.full((1,), 3.0), "newer": {1, 2}}})
    assert reader.report.missing == ("model.new", "model.newer")


@pytest.mark.parametrize("moment", ["get", "head", "get_range"])
def test_what_is_retired_and_deleted_while_it_is_loaded_is_not_called_damaged(url, moment):
    for name in ("a", "b", "c"):
        saved(url, model(), name)
    run, store = CheckpointStore.open(url), open_store(url)
    prefix = run.get("a").commit.stem.prefix()
    once = iter([run])

    def tap(call, act):
        if call.operation == moment and call.key.startswith(prefix):
            for first in once:
                first.retire("a", reason="It is old.")
                for info in list(store.list(prefix)):
                    store.delete(info.key)
        return act()

    target = blank(model())
    reader = sw.CkptStoreReader(TappedStore(open_store(url), tap), checkpoint_id="a")
    with pytest.raises(ConflictError, match=r"a@\d was retired while it was loaded") as caught:
        sw.load(target, storage_reader=reader)
    assert prefix in caught.value.message
    assert "ckptstore ls" in caught.value.hint
    assert "--quarantine" not in caught.value.hint
    assert same(target, blank(model()))


@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_keys_of_the_checkpoint_that_no_target_has_are_refused(url, planner):
    state = saved(url, model())
    target = blank({"model": state["model"]})
    before = blank({"model": state["model"]})
    with pytest.raises(IncompatibleStateError) as caught:
        load(planner)(target, storage_reader=sw.CkptStoreReader(url))
    assert caught.value.facts["unexpected"] == ["optim.lr", "optim.m"]
    assert same(target, before)


def load(planner):
    def unwrapped(state, **options):
        try:
            dcp.load(state, **options)
        except dcp.CheckpointException as failed:
            raise (sw.cause(failed) or failed) from None

    return sw.load if planner == "ours" else unwrapped


@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_unexpected_keys_are_skipped_if_that_is_allowed_and_are_reported(url, planner):
    state = saved(url, model())
    target = blank({"model": state["model"]})
    reader = sw.CkptStoreReader(url, allow_unexpected=True)
    load(planner)(target, storage_reader=reader)
    assert same(target, {"model": state["model"]})
    assert reader.report.skipped == ("optim.lr", "optim.m")


def test_a_tensor_without_elements_that_the_target_lacks_is_unexpected_too(url):
    saved(url, {"w": torch.ones(1), "empty": torch.empty(0, 3)})
    with pytest.raises(IncompatibleStateError) as caught:
        sw.load({"w": torch.zeros(1)}, storage_reader=sw.CkptStoreReader(url))
    assert caught.value.facts["unexpected"] == ["empty"]


@pytest.mark.parametrize("planner", ["ours", "stock"])
@pytest.mark.parametrize("only", [("model",), ["model.w"], ("model.w", "model.b")])
def test_only_loads_a_part_and_asks_for_nothing_else(url, planner, only):
    state = saved(url, model() | {"model2": torch.ones(3)})
    wanted = {
        "model": {key: value for key, value in state["model"].items() if only == ("model",) or f"model.{key}" in only}
    }
    target = blank(wanted)
    reader = sw.CkptStoreReader(url, only=only)
    load(planner)(target, storage_reader=reader)
    assert same(target, wanted)
    assert reader.report.skipped == ()


def test_only_that_selects_nothing_says_what_there_is(url):
    saved(url, model())
    with pytest.raises(IncompatibleStateError, match=r"modle.*model, optim"):
        sw.load({"modle": torch.zeros(1)}, storage_reader=sw.CkptStoreReader(url, only=("modle",)))


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.int64, torch.int32),
    (torch.float32, torch.int64),
    (torch.complex64, torch.float32),
    (torch.bool, torch.uint8),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("planner", ["ours", "stock"])
@pytest.mark.parametrize(("stored", "wanted"), CASTS, ids=str)
def test_another_dtype_is_refused_before_a_byte_reaches_the_target(url, planner, stored, wanted):
    saved(url, {"same": torch.ones(3), "x": (torch.arange(12.0) * 1.5).to(stored)})
    target = {"same": torch.zeros(3), "x": torch.zeros(12, dtype=wanted)}
    with pytest.raises(IncompatibleStateError, match="No target was touched") as caught:
        load(planner)(target, storage_reader=sw.CkptStoreReader(url))
    assert caught.value.facts["casts"] == [["x", str(stored), str(wanted)]]
    assert same(target, {"same": torch.zeros(3), "x": torch.zeros(12, dtype=wanted)})


@pytest.mark.parametrize(("stored", "wanted"), CASTS, ids=str)
def test_another_dtype_is_cast_if_that_is_allowed_and_is_reported(url, stored, wanted):
    state = saved(url, {"x": (torch.arange(12.0) * 1.5).to(stored).view(3, 4)})
    target = {"x": torch.zeros(3, 4, dtype=wanted)}
    reader = sw.CkptStoreReader(url, allow_cast=True)
    sw.load(target, storage_reader=reader)
    source = state["x"].real if stored.is_complex else state["x"]
    assert bits(target["x"]) == bits(source.to(wanted))
    assert [dataclasses.astuple(cast) for cast in reader.report.cast] == [("x", str(stored), str(wanted))]


@pytest.mark.parametrize("planner", ["ours", "stock"])
@pytest.mark.parametrize(
    ("stored", "wanted"), [((), (1,)), ((1,), ()), ((2, 3), (3, 2)), ((6,), (2, 3)), ((0, 3), (3, 0))]
)
def test_another_shape_is_refused(url, planner, stored, wanted):
    saved(url, {"x": torch.ones(stored)})
    target = {"x": torch.zeros(wanted)}
    with pytest.raises(IncompatibleStateError if planner == "ours" else BaseException, match="x"):
        load(planner)(target, storage_reader=sw.CkptStoreReader(url, allow_cast=True))
    assert bits(target["x"]) == bits(torch.zeros(wanted))


@pytest.mark.parametrize("planner", ["ours", "stock"])
@pytest.mark.parametrize(("stored", "wanted"), [(1.5, torch.zeros(1)), (torch.ones(1), 1.5)], ids=["value", "tensor"])
def test_a_value_never_replaces_a_tensor_nor_the_other_way_round(url, planner, stored, wanted):
    saved(url, {"x": stored})
    target = {"x": wanted}
    with pytest.raises(IncompatibleStateError if planner == "ours" or not torch.is_tensor(stored) else BaseException):
        load(planner)(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, {"x": wanted})


def test_a_target_whose_elements_share_memory_is_refused(url):
    saved(url, {"x": torch.ones(3, 4)})
    with pytest.raises(IncompatibleStateError, match="share memory"):
        sw.load({"x": torch.zeros(4).expand(3, 4)}, storage_reader=sw.CkptStoreReader(url))


def test_loading_from_a_run_without_a_commit_says_so(url):
    with pytest.raises(NotFoundError, match="Nothing is committed"):
        sw.load({"x": torch.zeros(1)}, storage_reader=sw.CkptStoreReader(url))
    assert list(open_store(url).list("")) == []


def test_loading_what_is_not_there_says_what_is(url):
    saved(url, {"x": torch.ones(1)}, "step-10")
    for which in ({"checkpoint_id": "step-11"}, {"step": 11}, {"seq": 7}, {"checkpoint_id": "step-10@9"}):
        with pytest.raises(NotFoundError):
            sw.load({"x": torch.zeros(1)}, storage_reader=sw.CkptStoreReader(url, **which))


def damage(url, name, at):
    """Flip one bit of the only shard, `at` bytes after where the item's bytes begin (negative: from the end)."""
    store = open_store(url)
    (key,) = [info.key for info in store.list("data/") if info.key.endswith(".safetensors")]
    body = bytearray(store.get(key, max_bytes=1 << 30))
    if name is None:
        position = at % len(body)
    else:
        length = int.from_bytes(body[:8], "little")
        position = 8 + length + json.loads(body[8 : 8 + length])[name]["data_offsets"][0] + at
    body[position] ^= 1
    store.put(key, bytes(body))


@pytest.mark.parametrize(("name", "at"), [(None, 3), (None, 40), (None, -1)], ids=["length", "header", "leaf table"])
def test_damage_to_the_structure_is_found_before_the_target_is_touched(url, name, at):
    """I13."""
    state = saved(url, model())
    target, before = blank(state), blank(state)
    damage(url, name, at)
    with pytest.raises(IntegrityError, match="No target was touched"):
        sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, before)


def test_damage_inside_a_tensor_is_found_at_its_leaf_and_the_error_says_what_was_written(url):
    """I13."""
    state = saved(url, {"a": torch.randn(2_000_000), "z": torch.randn(2_000_000)})
    target = blank(state)
    damage(url, "z", 7_900_000)
    reader = sw.CkptStoreReader(url, transfer=TransferOptions(fetches_in_flight=1, fetch_bytes=1 << 20))
    with pytest.raises(IntegrityError, match="were already written") as caught:
        sw.load(target, storage_reader=reader)
    assert caught.value.facts["tensor"] == "z"
    assert caught.value.facts["written"] == ["a", "z"]
    assert caught.value.facts["rank"] == 0
    assert bits(target["a"]) == bits(state["a"])
    assert reader.report is None


def test_damage_inside_a_value_is_found_before_the_target_is_touched(url):
    state = saved(url, model())
    target, before = blank(state), blank(state)
    damage(url, "optim.lr", 100)
    with pytest.raises(IntegrityError, match="No target was touched"):
        sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, before)


def test_with_verify_first_damage_anywhere_leaves_the_target_untouched(url):
    state = saved(url, model())
    target, before = blank(state), blank(state)
    damage(url, "model.w", 100)
    with pytest.raises(IntegrityError, match="No target was touched") as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(url, verify_first=True))
    assert caught.value.facts["written_count"] == 0
    assert same(target, before)


@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_verify_first_loads_what_is_whole(url, planner):
    state = saved(url, model())
    target = blank(state)
    load(planner)(target, storage_reader=sw.CkptStoreReader(url, verify_first=True))
    assert same(target, state)


def test_a_missing_shard_is_found_before_the_target_is_touched(url):
    state = saved(url, model())
    target, before = blank(state), blank(state)
    store = open_store(url)
    for info in list(store.list("data/")):
        if info.key.endswith(".safetensors"):
            store.delete(info.key)
    with pytest.raises(IntegrityError, match=r"is missing.*No target was touched"):
        sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, before)


def test_large_tensors_of_another_dtype_pass_through_bounded_memory(url, monkeypatch):
    monkeypatch.setattr(loading, "BOUNCE_BYTES", 10_000)
    state = saved(url, {"x": torch.randn(7, 11, 13, 17), "y": torch.randn(3), "z": torch.randn(())})
    target = {key: torch.zeros(value.shape, dtype=torch.float64) for key, value in state.items()}
    sw.load(target, storage_reader=sw.CkptStoreReader(url, allow_cast=True))
    assert same(target, {key: value.double() for key, value in state.items()})


@pytest.mark.parametrize("limit", [1, 8, 64, 1000, 10**6])
def test_boxes_tile_what_they_cut(limit):
    counts = torch.zeros(5, 1, 7, 4)
    for offsets, lengths in loading.cut((5, 1, 7, 4), 8, limit):
        assert torch.Size(lengths).numel() * 8 <= max(limit, 8)
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    assert counts.min() == counts.max() == 1


def test_a_reader_follows_the_run_from_load_to_load(url):
    reader, target = sw.CkptStoreReader(url), {"x": torch.zeros(1)}
    for value in (1.0, 2.0):
        saved(url, {"x": torch.full((1,), value)})
        sw.load(target, storage_reader=reader)
        assert target["x"].item() == value


def test_what_was_loaded_is_the_parent_of_the_first_commit(url):
    for value in (1.0, 2.0):
        saved(url, {"x": torch.full((1,), value)})
    sw.begin_incarnation(url)  # as a restarted process would
    sw.load({"x": torch.zeros(1)}, storage_reader=sw.CkptStoreReader(url, seq=1))
    writer = sw.CkptStoreWriter(url)
    sw.save({"x": torch.ones(1)}, checkpoint_id="again", storage_writer=writer)
    assert writer.committed.commit.parent == 1


def test_threads_that_share_a_reader_each_get_their_own_checkpoint(url):
    for step in range(3):
        saved(url, {"w": torch.full((64,), float(step))}, name=f"step-{step}")
    reader, together = sw.CkptStoreReader(url), threading.Barrier(3, timeout=30)

    def load_some(step):
        for _ in range(5):
            together.wait()
            target = {"w": torch.zeros(64)}
            sw.load(target, checkpoint_id=f"step-{step}", storage_reader=reader)
            assert target["w"].tolist() == [float(step)] * 64
            assert reader.report.checkpoint_id == f"step-{step}"
        return step

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(load_some, range(3), timeout=60)) == [0, 1, 2]
    assert reader.report.checkpoint_id.startswith("step-")  # asked by a thread that loaded nothing itself


def test_a_readers_copy_loads_what_the_reader_was_made_for(tmp_path):
    for step in range(2):
        saved(tmp_path, {"w": torch.full((4,), float(step))}, name=f"step-{step}")
    made = sw.CkptStoreReader(tmp_path, checkpoint_id="step-0")
    reader = pickle.loads(pickle.dumps(made))  # noqa: S301  (made on the line before)
    target = {"w": torch.ones(4)}
    sw.load(target, storage_reader=reader)
    assert target["w"].tolist() == [0.0] * 4
