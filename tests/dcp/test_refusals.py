import dataclasses
import io
import os
import pathlib
import pickle
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import same
from torch.distributed.checkpoint.api import CheckpointException

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import (
    CommitUnknownError,
    IncompatibleStateError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptstore.events import Committed
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from storage_writers import pickles


def objects(url):
    return [info.key for info in open_store(url).list("data/")]


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (lambda: 1, UnsupportedError),
        (Evil(), UnsafePickleError),
        (dataclasses.make_dataclass("P", ["x"])(1), UnsupportedError),
    ],
    ids=["lambda", "runs a command", "class without a module"],
)
def test_a_value_that_needs_pickle_is_refused_with_its_key_before_anything_is_written(url, value, error):
    with pytest.raises(error, match=r"job\.hook"):
        sw.save({"w": torch.ones(1), "job": {"hook": value}}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    assert objects(url) == []


class Plain:
    """A class of the user's, which only unrestricted pickle can build."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("name", ["step-9", "step_9", "step-009", pathlib.PurePath("step-9")])
def test_a_name_and_a_description_that_say_different_steps_are_refused_before_anything_is_written(url, name):
    writer = sw.CkptStoreWriter(url)
    writer.describe(global_step=7)
    with pytest.raises(InvalidInputError, match=r"says step 9.*global_step=7") as caught:
        sw.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=writer)
    assert (caught.value.facts["checkpoint_id"], caught.value.facts["global_step"]) == (str(name), 7)
    assert objects(url) == []
    writer.describe(global_step=9)
    sw.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=writer)
    assert (writer.committed.commit.checkpoint_id, writer.committed.commit.global_step) == (str(name), 9)


@pytest.mark.parametrize("name", ["best", "step-9-ema", "runs/step-9", "s9", "9"])
def test_a_name_that_says_no_step_may_be_of_any(url, name):
    writer = sw.CkptStoreWriter(url)
    writer.describe(global_step=7)
    sw.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=writer)
    assert (writer.committed.commit.checkpoint_id, writer.committed.commit.global_step) == (name, 7)


def test_allow_pickle_is_needed_on_both_sides_and_is_recorded(url):
    writer = sw.CkptStoreWriter(url, allow_pickle=True)
    sw.save({"v": (Plain(5),), "n": (1,)}, checkpoint_id="a", storage_writer=writer)
    target = {"v": None, "n": None}
    with pytest.raises(UnsafePickleError, match="allow_pickle"):
        sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert target == {"v": None, "n": None}
    sw.load(target, storage_reader=sw.CkptStoreReader(url, allow_pickle=True))
    assert (target["v"][0].x, target["n"]) == (5, (1,))


@pytest.mark.parametrize("planner", ["ours", "stock"])
@pytest.mark.parametrize("allow", [False, True], ids=["strict", "allow_pickle"])
def test_a_payload_that_was_swapped_for_a_pickle_that_runs_code_is_never_unpickled(url, monkeypatch, planner, allow):
    """Even if somebody rewrites shard, leaf table, part and record consistently: here the writer itself is fooled."""

    monkeypatch.setattr(pickles, "check", lambda *_, **__: False)
    marker = []
    monkeypatch.setattr(os, "system", marker.append)
    sw.save({"v": (Evil(),)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    load = sw.load if planner == "ours" else unwrapped_load
    with pytest.raises(UnsafePickleError, match="v"):
        load({"v": None}, storage_reader=sw.CkptStoreReader(url, allow_pickle=allow))
    assert marker == []


def unwrapped_load(state, **options):
    try:
        dcp.load(state, **options)
    except CheckpointException as failed:
        raise sw.cause(failed) from failed


def test_a_pickle_cannot_change_the_classes_of_the_process():
    stream = io.BytesIO()
    torch.save(1, stream)
    poisoned = io.BytesIO()
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(poisoned, "w") as sink:
        for name in source.namelist():
            body = b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00exists\x88s\x86b."
            sink.writestr(name, body if name.endswith("data.pkl") else source.read(name))
    before = pathlib.PosixPath.exists
    with pytest.raises(UnsafePickleError, match="cannot be changed"):
        pickles.restricted_load(poisoned.getvalue(), key="v")
    assert pathlib.PosixPath.exists is before


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_torch_save_did_not_write_is_refused():
    script, old = io.BytesIO(), io.BytesIO()
    torch.save(1, old, _use_new_zipfile_serialization=False)
    module = torch.jit.freeze(torch.jit.script(torch.nn.Identity().eval()))
    torch.jit.save(module, script)
    for data in (b"", b"x" * 100, pickle.dumps(1), old.getvalue(), script.getvalue()):
        with pytest.raises(UnsafePickleError):
            pickles.restricted_load(data, key="v")


@pytest.mark.parametrize("state", [{}, {"model": {}}, {"model": {"layers": {}}}])
def test_an_empty_state_is_refused_before_the_run_is_claimed(url, state):
    with pytest.raises(InvalidInputError, match="empty"):
        sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    assert list(open_store(url).list("log/")) == []


def test_a_save_without_a_name_or_a_step_is_refused(url):
    with pytest.raises(InvalidInputError, match="no name"):
        sw.save({"w": torch.ones(1)}, storage_writer=sw.CkptStoreWriter(url))


@pytest.mark.parametrize("name", ["a/b", "a*?[1]#% ñ~", ".", "..", "x" * 120])
def test_any_name_that_fits_can_be_used(url, name):
    sw.save({"w": torch.ones(2)}, checkpoint_id=name, storage_writer=sw.CkptStoreWriter(url))
    target = {"w": torch.zeros(2)}
    sw.load(target, checkpoint_id=name, storage_reader=sw.CkptStoreReader(url))
    assert same(target, {"w": torch.ones(2)})


@pytest.mark.parametrize("name", ["", "x" * 600, "ñ" * 60, "a@1", "\ud800"])
def test_a_name_that_does_not_fit_is_refused_before_anything_is_written(url, name):
    with pytest.raises(InvalidInputError):
        sw.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=sw.CkptStoreWriter(url))
    assert list(open_store(url).list("")) == []


def test_a_description_that_cannot_be_recorded_is_refused_at_once(url):
    writer = sw.CkptStoreWriter(url)
    for wrong in ({"global_step": -1}, {"metrics": {"loss": "low"}}, {"training_state": {"x": "y" * 20_000}}):
        with pytest.raises(InvalidInputError):
            writer.describe(**wrong)


def test_a_planner_that_caches_plans_is_refused_before_the_first_byte(url):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(UnsupportedError, match="caches plans"):
        sw.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url), planner=planner)
    with pytest.raises(UnsupportedError, match="cach"):
        sw.save({"w": torch.ones(1)}, checkpoint_id="b", storage_writer=sw.CkptStoreWriter(url), planner=planner)
    assert objects(url) == []
    for cached in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(dcp.SavePlanner, cached).clear()


def test_a_planner_that_hands_out_the_plan_of_an_earlier_save_is_refused_before_the_first_byte(url):
    class Keeping(dcp.DefaultSavePlanner):
        kept = None

        def finish_plan(self, new_plan):
            type(self).kept = type(self).kept or new_plan
            return super().finish_plan(type(self).kept)

    writer = sw.CkptStoreWriter(url)
    sw.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer, planner=Keeping())
    before = objects(url)
    with pytest.raises(InvalidInputError, match="another save"):
        sw.save({"w": torch.zeros(1)}, checkpoint_id="b", storage_writer=writer, planner=Keeping())
    assert objects(url) == before
    sw.save({"w": torch.zeros(1)}, checkpoint_id="c", storage_writer=writer)


@pytest.mark.parametrize("keep", [slice(0, -1), slice(0, 0)], ids=["one item lost", "all lost"])
def test_a_planner_that_loses_items_on_the_way_cannot_commit(url, keep):
    class Losing(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return super().finish_plan(dataclasses.replace(new_plan, items=new_plan.items[keep]))

    state = {"a": torch.ones(1), "b": torch.ones(2), "c": 3}
    with pytest.raises(IntegrityError, match="planned"):
        sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url), planner=Losing())
    with pytest.raises(NotFoundError):
        sw.load({}, storage_reader=sw.CkptStoreReader(url))


def test_a_planner_whose_metadata_lack_what_was_written_cannot_commit(url):
    class Forgetting(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            del metadata.state_dict_metadata["b"]
            return plans, metadata

    with pytest.raises(IntegrityError, match="planned"):
        sw.save(
            {"a": torch.ones(1), "b": torch.ones(2)},
            checkpoint_id="a",
            storage_writer=sw.CkptStoreWriter(url),
            planner=Forgetting(),
        )


def test_a_planner_that_gives_another_tensor_than_it_planned_cannot_commit(url):
    class Halving(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item).half()

    with pytest.raises(InvalidInputError, match=r"float32.*float16"):
        sw.save({"w": torch.ones(3)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url), planner=Halving())


def test_a_save_that_never_got_further_than_its_name_leaves_nothing_to_the_next(url):
    class Failing(dcp.DefaultSavePlanner):
        def set_up_planner(self, *_, **__):
            raise RuntimeError("planner")

    writer = sw.CkptStoreWriter(url)
    writer.describe(global_step=1)
    with pytest.raises(CheckpointException):
        sw.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer, planner=Failing())
    writer.describe(global_step=2)
    sw.save({"w": torch.ones(1)}, storage_writer=writer)
    assert writer.committed.commit.checkpoint_id == "step-2"


def test_saving_without_collectives_is_refused(url):
    with pytest.raises(UnsupportedError, match="use_collectives"):
        dcp.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url), use_collectives=False)
    assert list(open_store(url).list("log/")) == []


def test_a_launcher_of_many_without_a_process_group_is_refused_unless_it_is_meant(url, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidInputError, match="init_process_group"):
        sw.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    assert list(open_store(url).list("")) == []
    sw.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url, allow_one_rank=True))


def test_a_sparse_tensor_is_refused_with_its_key(url):
    with pytest.raises(UnsupportedError, match=r"a\.b.*sparse"):
        sw.save({"a": {"b": torch.eye(3).to_sparse()}}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    assert objects(url) == []


def test_a_tensor_without_memory_is_refused(url):
    with pytest.raises(InvalidInputError, match="w"):
        sw.save({"w": torch.empty(3, device="meta")}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))


def freed(count):
    """Return a tensor whose storage was freed, as FSDP does between uses."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("call", [sw.save, dcp.save])
def test_a_tensor_whose_memory_was_freed_is_refused_with_its_key(url, call):
    state = {"fine": torch.ones(3), "model": {"freed": freed(10)}}
    with pytest.raises((InvalidInputError, CheckpointException), match=r"model\.freed has no memory"):
        call(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    assert objects(url) == []
    sw.save({"w": freed(10)[:0]}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))


def test_a_target_whose_memory_was_freed_is_refused_with_its_key(url):
    state = {"fine": torch.ones(3), "model": {"freed": torch.ones(10)}}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    target = {"fine": torch.zeros(3), "model": {"freed": freed(10)}}
    with pytest.raises(IncompatibleStateError, match=r"model\.freed has no memory"):
        sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert torch.equal(target["fine"], torch.zeros(3))


@pytest.mark.parametrize("state", [{"a": {"b": torch.ones(1)}, "a.b": 0}, {"a.b": torch.ones(1), "a": {"b": 1}}])
def test_two_values_under_one_key_are_refused_with_it(url, state):
    with pytest.raises(InvalidInputError, match=r"have the key a\.b\."):
        sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    assert objects(url) == []
    sw.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    with pytest.raises(InvalidInputError, match=r"have the key a\.b\."):
        sw.load(state, storage_reader=sw.CkptStoreReader(url))


@pytest.mark.parametrize("call", [sw.save, dcp.save])
def test_an_interrupt_after_the_commit_is_never_reported_as_a_failure(url, call):
    """I5: the commit stands, and whoever is told of the interrupt is told so."""

    def interrupt(event):
        if isinstance(event, Committed):
            raise KeyboardInterrupt

    writer = sw.CkptStoreWriter(url, observer=interrupt)
    with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)) as caught:
        call({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
    if call is sw.save:
        assert type(caught.value) is KeyboardInterrupt
        assert "committed in slot 1" in caught.value.__notes__[-1]
    else:
        error = sw.cause(caught.value)
        assert type(error) is CommitUnknownError
        assert "committed in slot 1" in error.message
    assert writer.committed.seq == 1
    sw.load({"w": torch.zeros(1)}, storage_reader=sw.CkptStoreReader(url, checkpoint_id="a"))
    sw.save({"w": torch.ones(1)}, checkpoint_id="b", storage_writer=sw.CkptStoreWriter(url))


def test_an_interrupt_before_the_commit_is_decided_says_that_it_must_be_looked_up():
    class InterruptedStore(MemoryStore):
        def put(self, key, body, **more):
            if "/part-" in key:
                raise KeyboardInterrupt
            return super().put(key, body, **more)

    writer = sw.CkptStoreWriter(InterruptedStore())
    with pytest.raises(CommitUnknownError, match="interrupted during its commit") as caught:
        sw.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
    assert "ckptstore log" in caught.value.hint
    assert writer.committed is None


@pytest.mark.parametrize("save", [sw.save, sw.async_save])
@pytest.mark.parametrize("left", [("data/",), ("data/", "run.json")], ids="+".join)
def test_a_save_begins_no_run_where_one_was_whose_log_was_lost(tmp_path, left, save):
    for name in ("a", "b"):
        sw.save({"w": 1}, checkpoint_id=name, storage_writer=sw.CkptStoreWriter(tmp_path))
    sw.begin_incarnation(tmp_path)
    store = open_store(tmp_path)
    for info in list(store.list("")):
        if not info.key.startswith(left):
            store.delete(info.key)
    before = [info.key for info in store.list("")]
    with pytest.raises(IntegrityError, match="the log was lost"), sw.CkptStoreWriter(tmp_path) as writer:
        save({"w": 2}, checkpoint_id="c", storage_writer=writer)
    assert [info.key for info in store.list("")] == before
    with pytest.raises(IntegrityError, match="the log was lost"):
        sw.load({"w": 0}, storage_reader=sw.CkptStoreReader(tmp_path))
    repair = CheckpointStore.open(tmp_path).repair()
    repair.rebuild_log(repair.rebuilding())
    assert [each.checkpoint_id for each in CheckpointStore.open(tmp_path).checkpoints()] == ["b", "a"]
