"""What the user's own code raises inside a save or a load comes out as itself, or says what it left behind."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import storage_writers as sw
from ckptstore.errors import CkptStoreError, DisagreementError, UnavailableError
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.log import RunLog
from storage_writers.planners import StrictLoadPlanner


class Model:
    """A `Stateful` that fails at a call."""

    def __init__(self, *, fails_in=None, value=1.0):
        self.w, self.fails_in, self.loads = torch.full((3,), value), fails_in, 0

    def state_dict(self):
        if self.fails_in == "state_dict":
            raise RuntimeError("out of memory")
        return {"w": self.w}

    def load_state_dict(self, state):
        if self.fails_in == "load_state_dict":
            raise RuntimeError("size mismatch")
        self.w, self.loads = state["w"], self.loads + 1


def save(url, model, name="a", call=sw.save, **described):
    writer = sw.CkptStoreWriter(url, agree_timeout_seconds=1)
    writer.describe(**described)
    return call({"model": model}, checkpoint_id=name, storage_writer=writer)


def load(url, model):
    sw.load({"model": model}, storage_reader=sw.CkptStoreReader(url, agree_timeout_seconds=1))


@pytest.mark.parametrize("call", [sw.save, sw.async_save])
def test_what_state_dict_raises_comes_out_of_a_save_and_uses_up_the_description(url, call):
    writer = sw.CkptStoreWriter(url)
    writer.describe(tags=["of the save that failed"])
    with pytest.raises(RuntimeError, match="out of memory"):
        call({"model": Model(fails_in="state_dict")}, checkpoint_id="a", storage_writer=writer)
    sw.save({"model": Model()}, checkpoint_id="b", storage_writer=writer)
    kept = RunLog.open(open_store(url)).fold.kept
    assert [(each.commit.checkpoint_id, each.commit.tags) for each in kept] == [("b", ())]


@pytest.mark.parametrize(("call", "words"), [("state_dict", "out of memory"), ("load_state_dict", "size mismatch")])
def test_what_the_model_raises_comes_out_of_a_load(url, call, words):
    save(url, Model())
    with pytest.raises(RuntimeError, match=words):
        load(url, Model(fails_in=call))


def test_a_stateful_target_is_asked_and_given_once(url):
    save(url, Model(value=7.0))
    target = {"model": Model(), "more": torch.zeros(0)}
    sw.load(target, storage_reader=sw.CkptStoreReader(url, allow_missing=True))
    assert (target["model"].w[0].item(), target["model"].loads) == (7.0, 1)


def fail_in_one_model(url, call):
    """Load where the model of rank 1 fails at a call; return what each rank met, and how long that took."""
    save(url, Model(value=7.0))
    model = Model(fails_in=call if dist.get_rank() == 1 else None)
    began = time.monotonic()
    try:
        load(url, model)
    except Exception as error:  # noqa: BLE001  (the outcome)
        return error, time.monotonic() - began
    return model.w[0].item(), time.monotonic() - began


def test_a_model_that_refuses_what_was_loaded_is_no_lost_rank(gang, tmp_path):
    (value, _), (error, _) = gang.values(2, fail_in_one_model, str(tmp_path), "load_state_dict")
    assert value == 7.0
    assert (type(error), str(error)) == (RuntimeError, "size mismatch")


def fail_in_one_save(url):
    try:
        save(url, Model(fails_in="state_dict" if dist.get_rank() == 1 else None))
    except Exception as error:  # noqa: BLE001  (the outcome)
        return error
    return None


def test_a_rank_whose_state_cannot_be_had_is_named_to_the_others_in_time(gang, tmp_path):
    others, error = gang.values(2, fail_in_one_save, str(tmp_path), seconds=20)
    assert isinstance(others, DisagreementError)
    assert others.facts["missing"] == [1]
    assert (type(error), str(error)) == (RuntimeError, "out of memory")


class Hungry(StrictLoadPlanner):
    """A planner that fails when it is given a value; the tensors are filled by then."""

    def load_bytes(self, *_):
        raise MemoryError("no memory")


class Unplugged(ForwardingStore):
    """A store whose client breaks, in its own words, once a number of ranges were read."""

    def __init__(self, url, *, ranges):
        super().__init__(open_store(url))
        self.ranges = ranges

    def get_range(self, key, *, start, length):
        self.ranges -= 1
        if self.ranges < 0:
            raise MemoryError("no memory")
        return super().get_range(key, start=start, length=length)


def told_of_a_mixture(error):
    assert type(error) is CkptStoreError  # not UnavailableError, which says that nothing happened
    assert "MemoryError" in str(error)
    assert "mixture" in str(error)
    assert error.facts["untouched"] is False
    return error.facts["written"]


def test_a_planner_that_fails_late_says_what_was_written(url):
    sw.save({"w": torch.ones(3), "v": "x"}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    target = {"w": torch.zeros(3), "v": ""}
    with pytest.raises(CkptStoreError) as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(url), planner=Hungry())
    assert told_of_a_mixture(caught.value) == ["w", "v"]
    assert target["w"].tolist() == [1, 1, 1]
    assert isinstance(caught.value.__cause__, dcp.CheckpointException)


def test_a_client_that_breaks_while_targets_are_filled_never_says_that_they_are_untouched(url):
    sw.save({"w": torch.ones(3)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    met = []
    for ranges in range(20):
        target = {"w": torch.zeros(3)}
        try:
            sw.load(target, storage_reader=sw.CkptStoreReader(Unplugged(url, ranges=ranges)))
        except dcp.CheckpointException:  # before targets are filled it stays what it is
            assert not target["w"].any()
        except CkptStoreError as error:
            told_of_a_mixture(error)
            met.append(ranges)
        else:
            break
    assert target["w"].tolist() == [1, 1, 1]
    assert met


class Unwritable(ForwardingStore):
    """A store whose client breaks in an upload, in its own words."""

    def open_upload(self, *_, **__):
        raise MemoryError("no memory")


def test_a_foreign_failure_of_an_upload_does_not_pass_for_a_store_that_is_away(url):
    with pytest.raises(CkptStoreError, match=r"upload of .* failed: MemoryError") as caught:
        save(Unwritable(open_store(url)), Model())
    assert not isinstance(caught.value, UnavailableError)
