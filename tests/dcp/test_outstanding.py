"""One background save at a time: what becomes of the next, of one that does not end, and of what it holds."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import same

import storage_writers as sw
from ckptstore.errors import BusyError, CkptStoreError, InvalidInputError, StalledError, UnavailableError
from ckptstore.events import SaveAbandoned, SaveSkipped
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore

STATE = {"w": torch.ones(1000)}


def plain(state, *, checkpoint_id, storage_writer):
    return dcp.async_save(
        state, checkpoint_id=checkpoint_id, storage_writer=storage_writer, process_group=storage_writer.process_group
    )


WAYS = {"sw.async_save": sw.async_save, "dcp.async_save": plain}


class Gated(ForwardingStore):
    """A store whose uploads wait for a gate."""

    def __init__(self, url):
        super().__init__(open_store(url))
        self.gate = threading.Event()
        self.opened = 0

    def open_upload(self, key, *, size):
        self.opened += 1
        assert self.gate.wait(60)
        return super().open_upload(key, size=size)


def commits(url):
    return [each.commit.checkpoint_id for each in RunLog.open(open_store(url)).fold.kept]


@pytest.fixture(params=WAYS)
def begin(request):
    return WAYS[request.param]


def test_the_next_save_waits_by_default_and_both_are_committed(begin, url):
    store = Gated(url)
    writer = sw.CkptStoreWriter(store)
    first = begin(STATE, checkpoint_id="a", storage_writer=writer)
    threading.Timer(0.5, store.gate.set).start()
    began = time.monotonic()
    second = begin(STATE, checkpoint_id="b", storage_writer=writer)
    assert time.monotonic() - began > 0.3
    assert first.done()
    second.result(30)
    assert commits(url) == ["a", "b"]


@pytest.mark.parametrize("save", [sw.save, dcp.save], ids=["sw.save", "dcp.save"])
def test_a_save_in_the_foreground_waits_for_the_one_in_the_background(begin, save, url):
    store = Gated(url)
    writer = sw.CkptStoreWriter(store, when_busy="raise")
    begin(STATE, checkpoint_id="a", storage_writer=writer)
    threading.Timer(0.3, store.gate.set).start()
    save(STATE, checkpoint_id="b", storage_writer=writer)
    assert commits(url) == ["a", "b"]


def test_a_writer_that_skips_says_so_and_leaves_the_save_in_flight_alone(url):
    store, heard = Gated(url), []
    with sw.CkptStoreWriter(store, when_busy="skip", observer=heard.append) as writer:
        first = sw.async_save(STATE, checkpoint_id="a", storage_writer=writer)
        writer.describe(global_step=7)
        second = sw.async_save(STATE, checkpoint_id="b", storage_writer=writer)
        assert (first.skipped, second.skipped, second.done(), second.result(), second.exception()) == (
            False,
            True,
            True,
            None,
            None,
        )
        assert [event.checkpoint_id for event in heard if isinstance(event, SaveSkipped)] == ["b"]
        with pytest.raises(BusyError):  # DCP cannot be told that there is nothing to save
            plain(STATE, checkpoint_id="c", storage_writer=writer)
        store.gate.set()
        first.result(30)
        sw.async_save(STATE, checkpoint_id="d", storage_writer=writer).result(30)
    kept = RunLog.open(open_store(url)).fold.kept
    assert [(each.commit.checkpoint_id, each.commit.global_step) for each in kept] == [("a", None), ("d", None)]


def test_a_writer_that_raises_when_busy_raises_and_the_save_in_flight_goes_on(begin, url):
    store = Gated(url)
    writer = sw.CkptStoreWriter(store, when_busy="raise")
    first = begin(STATE, checkpoint_id="a", storage_writer=writer)
    with pytest.raises(BusyError) as caught:
        begin(STATE, checkpoint_id="b", storage_writer=writer)
    assert caught.value.facts["ranks"] == [0]
    store.gate.set()
    first.result(30)
    begin(STATE, checkpoint_id="c", storage_writer=writer).result(30)
    assert commits(url) == ["a", "c"]


def test_what_is_no_word_for_being_busy_is_refused(url):
    with pytest.raises(InvalidInputError, match="when_busy"):
        sw.CkptStoreWriter(url, when_busy="later")


def busy_on_one(url, when_busy):
    """Begin two saves; rank 1 of the first is slow. Return what the second did here, and what was kept."""
    store = Gated(url)
    if dist.get_rank() != 1:
        store.gate.set()
    state = {f"x{rank}": torch.ones(1000) for rank in range(dist.get_world_size())}
    writer = sw.CkptStoreWriter(store, when_busy=when_busy)
    first = sw.async_save(state, checkpoint_id="a", storage_writer=writer)
    try:
        said = sw.async_save(state, checkpoint_id="b", storage_writer=writer).skipped
    except BusyError as error:
        said = error.facts["ranks"]
    store.gate.set()
    first.result(30)
    writer.close()
    return said


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_a_save_that_is_busy_on_one_rank_is_busy_on_all(gang, tmp_path, when_busy):
    heard = gang.values(2, busy_on_one, str(tmp_path), when_busy)
    assert heard[0] == heard[1]
    assert heard[0] is True or 1 in heard[0]
    assert commits(str(tmp_path)) == ["a"]


def test_what_dcps_own_future_was_asked_is_not_raised_again(url):
    store = Gated(url)
    store.gate.set()
    writer = sw.CkptStoreWriter(TappedStore(store, refuse_the_first()))
    future = plain(STATE, checkpoint_id="a", storage_writer=writer)
    assert isinstance(sw.cause(future.exception(30)), UnavailableError)
    plain(STATE, checkpoint_id="b", storage_writer=writer).result(30)
    assert commits(url) == ["b"]


def refuse_the_first():
    uploads = []

    def tap(call, act):
        if call.operation == "open_upload":
            uploads.append(call)
            if len(uploads) == 1:
                raise UnavailableError("no route")
        return act()

    return tap


@pytest.mark.parametrize("end", ["save", "async_save", "wait", "close", "with", "dcp.save", "dcp.async_save"])
def test_a_failure_that_nobody_asked_for_is_raised_by_whatever_comes_next_and_once(begin, end, url):
    store = Gated(url)
    store.gate.set()
    writer = sw.CkptStoreWriter(TappedStore(store, refuse_the_first()))
    begin(STATE, checkpoint_id="a", storage_writer=writer)

    def go_on():
        given = {"checkpoint_id": "b", "storage_writer": writer}
        {
            "save": lambda: sw.save(STATE, **given),
            "async_save": lambda: sw.async_save(STATE, **given),
            "dcp.save": lambda: dcp.save(STATE, **given),
            "dcp.async_save": lambda: plain(STATE, **given),
            "wait": writer.wait,
            "close": writer.close,
            "with": lambda: contextlib.ExitStack().enter_context(writer).__exit__(None, None, None),
        }[end]()

    with pytest.raises(UnavailableError, match="no route"):
        go_on()
    assert commits(url) == []
    go_on()
    writer.close()
    sw.save(STATE, checkpoint_id="c", storage_writer=writer)
    assert commits(url) == (["c"] if end in ("wait", "close", "with") else ["b", "c"])


def test_a_save_that_is_not_committed_in_its_time_is_given_up_and_never_committed_later(begin, url):
    """The next save goes on beside the thread that hangs."""
    store, heard = Gated(url), []
    writer = sw.CkptStoreWriter(store, commit_timeout_seconds=0.3, observer=heard.append)
    future = begin(STATE, checkpoint_id="a", storage_writer=writer)
    began = time.monotonic()
    error = future.exception(30)
    assert isinstance(error, StalledError)
    assert "never will be" in str(error)
    assert future.done()
    assert time.monotonic() - began < 10
    writer.wait()  # told already
    assert [event.seconds for event in heard if isinstance(event, SaveAbandoned)] == [0.3]
    held_back, store.gate = store.gate, threading.Event()
    store.gate.set()
    begin(STATE, checkpoint_id="b", storage_writer=writer).result(30)
    held_back.set()
    future.outstanding._ended.wait(30)
    assert future.outstanding.ended
    assert commits(url) == ["b"]
    sw.save(STATE, checkpoint_id="c", storage_writer=writer)
    assert commits(url) == ["b", "c"]


def test_a_save_that_hangs_before_the_record_is_sent_is_given_up_by_wait_and_the_record_is_not_sent(url):
    """What the abandoned thread does when it wakes up late: everything is uploaded, the commit alone is missing."""
    gate, uploaded = threading.Event(), threading.Event()

    def tap(call, act):
        if call.operation == "complete":
            uploaded.set()
        if call.operation == "list" and call.key.startswith("data/") and uploaded.is_set() and not gate.is_set():
            gate.wait(60)
        return act()

    writer = sw.CkptStoreWriter(TappedStore(open_store(url), tap), commit_timeout_seconds=0.5)
    future = sw.async_save(STATE, checkpoint_id="a", storage_writer=writer)
    with pytest.raises(StalledError, match="not committed within"):
        writer.wait()
    assert uploaded.is_set()
    gate.set()
    assert future.outstanding._ended.wait(30)
    assert commits(url) == []
    sw.save(STATE, checkpoint_id="b", storage_writer=writer)
    assert commits(url) == ["b"]


def test_saves_that_are_given_up_again_and_again_do_not_pile_up(url):
    store = Gated(url)
    writer = sw.CkptStoreWriter(store, commit_timeout_seconds=0.1)
    for name in ("a", "b"):
        sw.async_save(STATE, checkpoint_id=name, storage_writer=writer)
        with pytest.raises(StalledError):
            writer.wait()
    with pytest.raises(BusyError, match="given up") as caught:
        sw.async_save(STATE, checkpoint_id="c", storage_writer=writer)
    assert "Restart" in caught.value.hint
    assert store.opened == 2
    store.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("AsyncCheckpointExecutor"):
            thread.join(30)
    writer = sw.CkptStoreWriter(url)
    sw.save(STATE, checkpoint_id="d", storage_writer=writer)
    assert commits(url) == ["d"]


def given_up_on_one(url):
    """Rank 1 hangs in its upload. Return what each rank heard, then save again on all."""
    store = Gated(url)
    if dist.get_rank() != 1:
        store.gate.set()
    state = {f"x{rank}": torch.ones(1000) for rank in range(dist.get_world_size())}
    writer = sw.CkptStoreWriter(store, commit_timeout_seconds=1)
    sw.async_save(state, checkpoint_id="a", storage_writer=writer)
    group = writer.process_group
    errors = []
    try:
        writer.wait()
    except CkptStoreError as error:
        errors.append(error)
    old, store.gate = store.gate, threading.Event()
    store.gate.set()
    sw.async_save(state, checkpoint_id="b", storage_writer=writer).result(30)
    old.set()
    sw.save(state, checkpoint_id="c", storage_writer=writer)
    writer.close()
    return errors, writer.process_group is group


def test_a_save_that_hangs_on_one_rank_is_given_up_by_all_who_go_on_in_another_group(gang, tmp_path):
    heard = gang.values(2, given_up_on_one, str(tmp_path))
    for errors, same_group in heard:
        assert [(type(error), error.message) for error in errors] == [(StalledError, heard[0][0][0].message)]
        assert same_group is False
    assert commits(str(tmp_path)) == ["b", "c"]


class HangsInWrite(ForwardingStore):
    """A file system that does not answer, in the write of a shard; until it does."""

    def __init__(self, url):
        super().__init__(open_store(url))
        self.answers = threading.Event()

    def open_upload(self, key, *, size):
        return _Hanging(super().open_upload(key, size=size), self.answers)


class _Hanging(ForwardingUpload):
    def __init__(self, inner, answers):
        super().__init__(inner)
        self._answers = answers

    def write(self, data):
        self._answers.wait(60)
        super().write(data)


@pytest.mark.parametrize("way", ["sw.save", *WAYS])
def test_an_upload_that_hangs_in_a_system_call_fails_the_save_in_time(way, url):
    store = HangsInWrite(url)
    options = TransferOptions(retry=RetryOptions(stall_timeout_seconds=0.5))
    writer = sw.CkptStoreWriter(store, transfer=options)
    began = time.monotonic()
    given = {"state_dict": STATE, "checkpoint_id": "a", "storage_writer": writer}
    save = sw.save if way == "sw.save" else lambda **given: WAYS[way](given.pop("state_dict"), **given).result(30)
    with pytest.raises((StalledError, dcp.CheckpointException)) as caught:
        save(**given)
    error = sw.cause(caught.value)
    assert isinstance(error, StalledError)
    assert "has not moved" in error.message
    assert time.monotonic() - began < 10
    store.answers.set()
    sw.save(STATE, checkpoint_id="b", storage_writer=writer)
    assert commits(url) == ["b"]


def test_an_upload_that_is_slow_and_moves_is_not_given_up(tmp_path):
    """It may stand still for 3.2 s, and takes longer as a whole."""

    def tap(call, act):
        if call.operation == "write":
            time.sleep(1.2)
        return act()

    options = TransferOptions(retry=RetryOptions(stall_timeout_seconds=0.2))
    writer = sw.CkptStoreWriter(TappedStore(open_store(str(tmp_path)), tap), transfer=options)
    began = time.monotonic()
    sw.save({name: torch.ones(3 << 16) for name in "abcd"}, checkpoint_id="a", storage_writer=writer)
    assert time.monotonic() - began > 3.5
    assert commits(str(tmp_path)) == ["a"]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_state_is_held_when_the_callbacks_run(begin, fails, url):
    """So that a callback which begins the next save finds the memory free. The pool is the writer's and stays."""
    store = Gated(url)
    writer = sw.CkptStoreWriter(TappedStore(store, refuse_the_first()) if fails else store)
    state = {"w": torch.ones(1000), "deep": {"v": torch.ones(1000)}}
    live = [weakref.ref(state["w"]), weakref.ref(state["deep"]["v"])]
    future = begin(state, checkpoint_id="a", storage_writer=writer)
    staged = future.outstanding.staged
    copies = [weakref.ref(staged.state["w"]), weakref.ref(staged.state["deep"]["v"])]
    del staged, state
    found, called = [], threading.Event()

    def look(_):
        gc.collect()
        found.extend(each() is None for each in [*live, *copies])
        called.set()

    future.add_done_callback(look)
    store.gate.set()
    assert called.wait(30)
    assert found == [True] * 4
    assert (future.exception() is not None) is fails


def test_a_callback_may_begin_the_next_save(begin, url):
    writer = sw.CkptStoreWriter(url)
    futures, done = [], threading.Event()

    def again(_):
        if len(futures) < 3:
            futures.append(begin(STATE, checkpoint_id=f"s{len(futures)}", storage_writer=writer))
            futures[-1].add_done_callback(again)
        else:
            done.set()

    again(None)
    assert done.wait(60)
    assert [future.exception(30) for future in futures] == [None] * 3
    assert commits(url) == ["s0", "s1", "s2"]
    writer.close()


def test_a_fence_before_the_optimizer_lets_a_save_return_at_once_and_the_step_wait(begin, url):
    """The state is far larger than the pool, so that the upload reads it from where it is: until then no step."""
    store = Gated(url)
    parameter = torch.nn.Parameter(torch.ones(3 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    writer = sw.CkptStoreWriter(store, staging_bytes=1 << 20)
    fence = writer.fence_before(optimizer)
    future = begin({"w": parameter}, checkpoint_id="a", storage_writer=writer)
    parameter.grad = torch.ones_like(parameter)
    threading.Timer(0.5, store.gate.set).start()
    began = time.monotonic()
    optimizer.step()
    assert time.monotonic() - began > 0.3
    future.result(30)
    target = {"w": torch.zeros(3 << 20)}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, {"w": torch.ones(3 << 20)})
    assert float(parameter.detach()[0]) == 0
    assert not writer.should_synchronize_after_execute
    fence.remove()
    fence.remove()
    assert writer.should_synchronize_after_execute


def test_without_a_fence_a_save_returns_only_when_the_state_may_be_changed(begin, url):
    store = Gated(url)
    weight = torch.ones(3 << 20)
    threading.Timer(0.5, store.gate.set).start()
    future = begin({"w": weight}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store, staging_bytes=1 << 20))
    assert store.gate.is_set()
    weight.fill_(9)
    future.result(30)
    target = {"w": torch.zeros(3 << 20)}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, {"w": torch.ones(3 << 20)})


def test_a_writer_that_is_closed_has_freed_its_memory_and_can_save_again(url):
    writer = sw.CkptStoreWriter(url)
    sw.async_save(STATE, checkpoint_id="a", storage_writer=writer)
    pool = writer._session._pool
    assert pool.held_bytes > 0
    writer.close()
    writer.close()
    assert pool.held_bytes == 0
    sw.async_save(STATE, checkpoint_id="b", storage_writer=writer)
    writer.close()
    assert commits(url) == ["a", "b"]


def test_a_future_cannot_be_cancelled_because_the_other_ranks_are_saving_too(begin, url):
    store = Gated(url)
    future = begin(STATE, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store))
    assert future.cancel() is False
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert not future.done()
    store.gate.set()
    assert future.result(30) is not None
    assert commits(url) == ["a"]
