"""Async saves: what they hold, how they end, and that no writer of a process ever fences another."""

import pickle
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import same
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import storage_writers as sw
from ckptstore.errors import (
    CkptStoreError,
    FencedError,
    InvalidInputError,
    StalledError,
    SupersededError,
    UnavailableError,
    UnsafePickleError,
)
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.log import RunLog
from storage_writers import incarnations


class Gated(ForwardingStore):
    """A store whose uploads wait for a gate, and may fail."""

    def __init__(self, url):
        super().__init__(open_store(url))
        self.gate = threading.Event()
        self.failure = None

    def open_upload(self, key, *, size):
        assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        return super().open_upload(key, size=size)


def wait_for_the_claim(store):
    deadline = time.monotonic() + 20
    while not list(store.list("log/")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def commits(url):
    return [each.commit.checkpoint_id for each in RunLog.open(open_store(url)).fold.kept]


def newest(url, target):
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    return target


def test_an_async_save_holds_the_values_of_the_moment_of_the_call(url):
    store = Gated(url)
    state = {"w": torch.ones(1000), "step": 1, "nested": {"list": [1, 2]}}
    future = sw.async_save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store))
    state["w"].fill_(9)
    state["step"] = 9
    state["nested"]["list"].append(9)
    assert not future.done()
    store.gate.set()
    assert future.result(30) is not None
    found = newest(url, {"w": torch.zeros(1000), "step": 0, "nested": {"list": []}})
    assert same(found, {"w": torch.ones(1000), "step": 1, "nested": {"list": [1, 2]}})


def test_one_save_is_outstanding_and_the_next_waits_for_it(url):
    store = Gated(url)
    writer = sw.CkptStoreWriter(store, busy_timeout_seconds=0.1)
    sw.async_save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
    with pytest.raises(StalledError):
        sw.async_save({"w": torch.ones(1)}, checkpoint_id="b", storage_writer=writer)
    store.gate.set()
    sw.wait(writer, seconds=20)
    sw.async_save({"w": torch.ones(1)}, checkpoint_id="c", storage_writer=writer).result(30)
    assert commits(url) == ["a", "c"]


def test_a_failed_async_save_is_raised_unwrapped_by_its_future(url):
    store = Gated(url)
    store.failure = UnavailableError("no route")
    store.gate.set()
    writer = sw.CkptStoreWriter(store)
    future = sw.async_save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
    with pytest.raises(UnavailableError, match="no route") as caught:
        future.result(30)
    assert isinstance(caught.value.__cause__, dcp.CheckpointException)
    assert isinstance(future.exception(), UnavailableError)
    store.failure = None
    sw.save({"w": torch.ones(1)}, checkpoint_id="b", storage_writer=writer)  # told already: not raised again
    assert commits(url) == ["b"]


@pytest.mark.parametrize("next_call", [sw.wait, sw.save, sw.async_save])
def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_call(url, next_call):
    store = Gated(url)
    store.failure = UnavailableError("no route")
    store.gate.set()
    writer = sw.CkptStoreWriter(store)
    sw.async_save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
    rest = {"state_dict": {"w": torch.ones(1)}, "checkpoint_id": "b"} if next_call is not sw.wait else {}
    with pytest.raises(UnavailableError, match="no route"):
        next_call(**rest, storage_writer=writer)
    store.failure = None
    sw.save({"w": torch.ones(1)}, checkpoint_id="c", storage_writer=writer)
    assert commits(url) == ["c"]


def test_a_value_that_cannot_be_saved_fails_the_async_save_typed(url):
    with pytest.raises(UnsafePickleError, match="f"):
        sw.async_save({"f": open}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url)).result(30)


def test_each_save_records_its_own_description_though_the_next_is_described_meanwhile(url):
    store = Gated(url)
    writer = sw.CkptStoreWriter(store)
    writer.describe(global_step=1, tags=["first"])
    sw.async_save({"w": torch.ones(1)}, storage_writer=writer)
    writer.describe(global_step=2, tags=["second"])
    store.gate.set()
    sw.save({"w": torch.ones(1)}, storage_writer=writer)
    kept = RunLog.open(open_store(url)).fold.kept
    assert [(each.commit.checkpoint_id, each.commit.tags) for each in kept] == [
        ("step-1", ("first",)),
        ("step-2", ("second",)),
    ]


def test_dcps_own_async_save_records_what_was_described_before_it_however_late_it_begins(url):
    writer = sw.CkptStoreWriter(url)
    futures = []
    for step in range(1, 13):
        writer.describe(global_step=step)
        futures.append(dcp.async_save({"w": torch.ones(1)}, checkpoint_id=f"s{step}", storage_writer=writer))
        writer.describe(global_step=100 + step)
        if step % 2:
            futures[-1].exception(30)
    for future in futures:  # of two that are under way at once either may commit first, and supersede the other
        assert future.exception(30) is None or isinstance(sw.cause(future.exception()), SupersededError)
    kept = RunLog.open(open_store(url)).fold.kept
    assert [each.commit.checkpoint_id for each in kept] == [f"s{each.commit.global_step}" for each in kept]
    assert len(kept) >= 6


def test_what_was_described_goes_with_the_writer_to_the_process_that_saves(url):
    """DCP stages on the thread that calls, and sends the writer from another one."""
    writer, sent = sw.CkptStoreWriter(url), []
    writer.describe(global_step=4)
    with writer._session.asking(writer._session.descriptions.take()):
        writer.stage({"w": torch.ones(1)})
    thread = threading.Thread(target=lambda: sent.append(pickle.dumps(writer)))
    thread.start()
    thread.join(20)
    sw.save({"w": torch.ones(1)}, storage_writer=pickle.loads(sent[0]))  # noqa: S301  (our own)
    assert commits(url) == ["step-4"]


def test_a_description_that_a_stager_of_the_users_leaves_behind_is_not_guessed_at(url):
    writer = sw.CkptStoreWriter(url)
    writer.describe(global_step=1)
    stager = DefaultStager(StagingOptions(*[False] * 4))
    future = dcp.async_save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer, async_stager=stager)
    assert isinstance(future.exception(30), InvalidInputError)
    assert "thread" in str(future.exception())
    assert not list(open_store(url).list("log/"))


def test_dcps_own_sync_save_may_run_while_the_writer_saves_in_the_background(url):
    """The later attempt commits first, so the earlier one is superseded: it says so, and nothing is mixed up."""
    store = Gated(url)
    writer = sw.CkptStoreWriter(store)
    background = dcp.async_save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
    wait_for_the_claim(store)
    threading.Timer(0.2, store.gate.set).start()
    dcp.save({"w": torch.zeros(2)}, checkpoint_id="b", storage_writer=writer)
    error = background.exception(30)
    assert error is None or isinstance(sw.cause(error), SupersededError)
    assert commits(url) == (["a", "b"] if error is None else ["b"])


def test_new_writers_and_mixed_saves_of_one_process_never_fence_each_other(url):
    """I15."""
    kept = sw.CkptStoreWriter(url)
    for step in range(3):
        sw.save({"w": torch.ones(1)}, checkpoint_id=f"new-{step}", storage_writer=sw.CkptStoreWriter(url))
        sw.save({"w": torch.ones(1)}, checkpoint_id=f"kept-{step}", storage_writer=kept)
        sw.async_save({"w": torch.ones(1)}, checkpoint_id=f"async-{step}", storage_writer=kept).result(30)
        copy = pickle.loads(pickle.dumps(kept))  # noqa: S301  (our own)
        sw.save({"w": torch.ones(1)}, checkpoint_id=f"copy-{step}", storage_writer=copy)
    log = RunLog.open(open_store(url))
    assert len(log.fold.kept) == 12
    assert log.fold.term == 1


def test_a_writer_that_was_pickled_before_its_first_save_carries_its_incarnation_and_nothing_live(url):
    """As DCP's process-based async save does: neither the child nor the parent may fence the other (I15)."""
    writer = sw.CkptStoreWriter(url, observer=lambda _: None)
    writer.describe(global_step=4)
    pickled = pickle.dumps(writer)
    assert len(pickled) < 5000
    parents = dict(incarnations._reigns)
    incarnations._reigns.clear()  # what the child finds
    child = pickle.loads(pickled)  # noqa: S301  (our own)
    sw.save({"w": torch.ones(1)}, checkpoint_id="child", storage_writer=child)
    incarnations._reigns.clear()
    incarnations._reigns.update(parents)
    sw.save({"w": torch.ones(1)}, storage_writer=writer)
    assert commits(url) == ["child", "step-4"]
    assert RunLog.open(open_store(url)).fold.term == 1


def test_a_new_incarnation_fences_the_saves_of_the_old_one(url):
    """A roll-back in a running process: what is under way is another lineage (I15)."""
    store = Gated(url)
    under_way = sw.async_save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store))
    wait_for_the_claim(store)
    sw.begin_incarnation(url)
    sw.save({"w": torch.ones(1)}, checkpoint_id="b", storage_writer=sw.CkptStoreWriter(url))
    store.gate.set()
    assert isinstance(under_way.exception(30), FencedError)
    sw.save({"w": torch.ones(1)}, checkpoint_id="c", storage_writer=sw.CkptStoreWriter(url))
    assert commits(url) == ["b", "c"]


def train_with_async_saves(url):
    """Save in the background while collectives of the training run on the default group."""
    writer = sw.CkptStoreWriter(url)
    weight = torch.zeros(50_000)
    state = {
        f"shard{rank}": weight if rank == dist.get_rank() else torch.zeros(50_000)
        for rank in range(dist.get_world_size())
    }
    for step in range(1, 4):
        weight.fill_(step)
        writer.describe(global_step=step)
        future = sw.async_save(state, storage_writer=writer)
        for _ in range(20):
            dist.all_reduce(torch.ones(10))
            time.sleep(0.001)
    future.result(60)
    sw.save(state, checkpoint_id="last", storage_writer=writer)
    return [str(type(writer.process_group).__name__), writer.process_group is not dist.group.WORLD]


def test_async_saves_of_several_ranks_run_beside_the_collectives_of_the_training(gang, tmp_path):
    assert gang.values(3, train_with_async_saves, str(tmp_path)) == [["ProcessGroup", True]] * 3
    assert commits(str(tmp_path)) == ["step-1", "step-2", "step-3", "last"]
    assert RunLog.open(open_store(str(tmp_path))).fold.term == 1


def train_with_dcps_own_async_saves(url):
    writer = sw.CkptStoreWriter(url)
    for step in range(1, 4):
        future = dcp.async_save(
            {"w": torch.full((10,), step)},
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            process_group=writer.process_group,
        )
        dist.all_reduce(torch.ones(10))
        future.result(60)


def test_dcps_own_async_save_works_with_the_writers_group(gang, tmp_path):
    gang.values(2, train_with_dcps_own_async_saves, str(tmp_path))
    assert commits(str(tmp_path)) == ["step-1", "step-2", "step-3"]


def fail_in_the_background(url):
    store = Gated(url)
    store.gate.set()
    store.failure = UnavailableError("no route") if dist.get_rank() == 1 else None
    state = {f"x{rank}": torch.ones(1000) for rank in range(dist.get_world_size())}
    future = sw.async_save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store))
    return future.exception(60)


def test_a_background_failure_of_one_rank_reaches_all(gang, tmp_path):
    for error in gang.values(3, fail_in_the_background, str(tmp_path)):
        assert isinstance(error, UnavailableError)
        assert error.facts["rank"] == 1
    assert commits(str(tmp_path)) == []


def fail_and_go_on(url, who_asks, seconds):
    """Save in the background, which fails on rank 1; some ranks ask; then save again. Return what that raised."""
    store = Gated(url)
    store.gate.set()
    store.failure = UnavailableError("no route") if dist.get_rank() == 1 else None
    state = {f"x{rank}": torch.ones(1000) for rank in range(dist.get_world_size())}
    writer = sw.CkptStoreWriter(store, agree_timeout_seconds=seconds)
    future = sw.async_save(state, checkpoint_id="a", storage_writer=writer)
    if dist.get_rank() in who_asks:
        assert isinstance(future.exception(60), UnavailableError)
    while not future.done():
        time.sleep(0.01)
    store.failure = None
    errors, began = [], time.monotonic()
    for name in ("b", "c"):
        try:
            sw.save(state, checkpoint_id=name, storage_writer=writer)
        except UnavailableError as error:
            errors.append(error)
    return errors, time.monotonic() - began


@pytest.mark.parametrize("who_asks", [[0], [1], [0, 1, 2], []], ids=str)
def test_a_failure_is_raised_on_all_ranks_if_nobody_asked_and_else_on_none(gang, tmp_path, who_asks):
    for errors, seconds in gang.values(3, fail_and_go_on, str(tmp_path), who_asks, 30):
        assert [error.facts["rank"] for error in errors] == ([] if who_asks else [1])
        assert seconds < 15
    assert commits(str(tmp_path)) == (["b", "c"] if who_asks else ["c"])


def one_cannot_stage(url):
    """Begin a background save that rank 1 has no memory for; then save on all."""
    writer = sw.CkptStoreWriter(url, agree_timeout_seconds=2)
    errors = []

    class Large:
        def __deepcopy__(self, memo):
            raise MemoryError("no memory")

    whole = {"w": torch.ones(10)}
    for call, state in ((sw.async_save, whole | {"v": Large()} if dist.get_rank() == 1 else whole), (sw.save, whole)):
        try:
            call(state, checkpoint_id="a", storage_writer=writer)
        except (MemoryError, CkptStoreError) as error:
            errors.append(type(error).__name__)
    return errors


def test_a_rank_that_could_not_stage_has_been_told_and_the_next_save_works(gang, tmp_path):
    assert gang.values(2, one_cannot_stage, str(tmp_path)) == [[], ["MemoryError"]]
    assert commits(str(tmp_path)) == ["a"]
