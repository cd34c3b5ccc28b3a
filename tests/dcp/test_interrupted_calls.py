"""A call that ends with an exception has decided: its save is not committed with what the caller does next."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from odd_stores import Gated
from states import same

import storage_writers as sw
from ckptstore.errors import BusyError, CkptStoreError, CommitUnknownError, StalledError, UnsupportedError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore
from storage_writers import outstanding, worker
from storage_writers.gates import Gate
from storage_writers.outstanding import Outstanding
from storage_writers.staged import Staged

STATE = {"w": torch.ones(1000)}


def commits(url):
    return [each.commit.checkpoint_id for each in RunLog.open(open_store(url)).fold.kept]


def plain(state, *, checkpoint_id, storage_writer):
    return dcp.async_save(
        state, checkpoint_id=checkpoint_id, storage_writer=storage_writer, process_group=storage_writer.process_group
    )


@pytest.fixture(params=[sw.async_save, plain], ids=["sw.async_save", "dcp.async_save"])
def begin(request):
    return request.param


def interrupt_the_fence(monkeypatch, store):
    """Let waiting for the staging be interrupted when the upload has begun; return what undoes it."""

    def interrupted(self, *, seconds):
        assert store.begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(Staged, "fence", interrupted)
    return monkeypatch.undo


def test_a_save_whose_fence_was_interrupted_is_not_committed_and_the_next_waits_for_its_end(begin, url, monkeypatch):
    store = Gated(open_store(url))
    writer = sw.CkptStoreWriter(store, staging_bytes=0, when_busy="raise")
    state = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
    undo = interrupt_the_fence(monkeypatch, store)
    with pytest.raises(KeyboardInterrupt):
        begin(state, checkpoint_id="a", storage_writer=writer)
    undo()
    state["a"].fill_(9)
    with pytest.raises(BusyError):
        begin(STATE, checkpoint_id="b", storage_writer=writer)
    threading.Timer(0.3, store.gate.set).start()
    writer.wait()  # told already
    assert store.gate.is_set()
    assert commits(url) == []
    begin(STATE, checkpoint_id="c", storage_writer=writer).result(30)
    assert commits(url) == ["c"]
    writer.close()


def test_a_save_that_had_read_everything_when_its_call_was_interrupted_is_as_it_was(url, monkeypatch):
    """It may be committed, or not: what is there is of one moment."""
    writer, state = sw.CkptStoreWriter(url), {"w": torch.ones(1000)}
    fence = Staged.fence

    def late(self, *, seconds):
        fence(self, seconds=seconds)
        save = writer._session.outstanding
        assert save._ended.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(Staged, "fence", late)
    with pytest.raises(KeyboardInterrupt):
        sw.async_save(state, checkpoint_id="a", storage_writer=writer)
    state["w"].fill_(9)
    writer.close()
    target = {"w": torch.zeros(1000)}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, {"w": torch.ones(1000)})


def test_an_optimizer_whose_step_was_interrupted_while_it_waited_does_not_tear_a_checkpoint(url, monkeypatch):
    store = Gated(open_store(url))
    parameter = torch.nn.Parameter(torch.ones(3 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    writer = sw.CkptStoreWriter(store, staging_bytes=0)
    fence = writer.fence_before(optimizer)
    future = sw.async_save({"w": parameter}, checkpoint_id="a", storage_writer=writer)
    undo = interrupt_the_fence(monkeypatch, store)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    undo()
    store.gate.set()
    assert isinstance(future.exception(30), StalledError)
    assert commits(url) == []
    fence.remove()
    writer.close()


def interrupted_on_one(root):
    """Interrupt rank 1 while it waits for its staging; return how the save ended, and save again."""
    store = Gated(open_store(root))
    rank = dist.get_rank()
    if rank == 0:
        store.gate.set()
    state = {f"x{each}": torch.ones(1 << 18) for each in range(2)}
    writer = sw.CkptStoreWriter(store, staging_bytes=0)
    fence, futures = writer._session.fence, []
    if rank == 1:

        def interrupted():
            save = writer._session.outstanding
            save.refuse(KeyboardInterrupt())
            raise KeyboardInterrupt

        writer._session.fence = interrupted
    try:
        futures.append(sw.async_save(state, checkpoint_id="a", storage_writer=writer))
    except KeyboardInterrupt:
        futures.append(None)
    writer._session.fence = fence
    for tensor in state.values():
        tensor.fill_(rank)
    store.gate.set()
    error = futures[0].exception(30) if futures[0] is not None else None
    writer.wait()
    sw.async_save(state | {"same": torch.ones(1)}, checkpoint_id="b", storage_writer=writer).result(30)
    writer.close()
    return None if error is None else type(error).__name__


def test_one_rank_that_is_interrupted_keeps_the_save_from_being_committed_on_all(gang, tmp_path):
    heard = gang.values(2, interrupted_on_one, str(tmp_path))
    assert heard == ["StalledError", None]
    assert commits(str(tmp_path)) == ["b"]


def test_a_streamed_save_that_hangs_is_given_up_by_its_own_call_and_what_comes_next_goes_on(url):
    store = Gated(open_store(url))
    writer = sw.CkptStoreWriter(store, staging_bytes=0, commit_timeout_seconds=0.5)
    with pytest.raises(StalledError):
        sw.async_save(STATE, checkpoint_id="a", storage_writer=writer)
    writer.wait()  # told already
    held_back, store.gate = store.gate, threading.Event()
    store.gate.set()
    writer._session.limits = sw.CkptStoreWriter(url)._session.limits
    sw.async_save(STATE, checkpoint_id="b", storage_writer=writer).result(30)
    held_back.set()
    writer.close()
    assert commits(url) == ["b"]


def test_a_copy_that_fails_before_a_process_saves_gives_the_pool_back(url, monkeypatch):
    """The error is of the save that meets it, and not of every one that comes after."""

    def broken(self, *, seconds):
        raise StalledError("the device does not answer", hint="Look at it.")

    writer = sw.CkptStoreWriter(url)
    monkeypatch.setattr(Staged, "wait_copied", broken)
    with pytest.raises(StalledError, match="does not answer"):
        dcp.async_save(
            STATE, checkpoint_id="a", storage_writer=writer, async_checkpointer_type=sw_process(), no_dist=True
        )
    monkeypatch.undo()
    sw.async_save(STATE, checkpoint_id="b", storage_writer=writer).result(30)
    writer.close()
    assert commits(url) == ["b"]


def sw_process():
    return dcp.state_dict_saver.AsyncCheckpointerType.PROCESS


def test_a_torch_whose_async_save_is_another_is_refused_before_anything_is_staged(url, monkeypatch):
    monkeypatch.setattr("storage_writers.dcp_frames._FUTURE", "renamed")
    writer = sw.CkptStoreWriter(url)
    with pytest.raises(UnsupportedError, match="torch"):
        plain(STATE, checkpoint_id="a", storage_writer=writer)
    sw.async_save(STATE, checkpoint_id="b", storage_writer=writer).result(30)
    assert commits(url) == ["b"]


def test_a_torch_that_gives_no_future_is_refused_and_its_save_is_not_committed(url, monkeypatch):
    store = Gated(open_store(url))
    writer = sw.CkptStoreWriter(store, commit_timeout_seconds=2)
    monkeypatch.setattr("storage_writers.session.future_and_planner", lambda: (object(), None))
    with pytest.raises(UnsupportedError, match="torch"):
        plain(STATE, checkpoint_id="a", storage_writer=writer)
    monkeypatch.undo()
    store.gate.set()
    writer.wait()
    sw.save(STATE, checkpoint_id="b", storage_writer=writer)
    assert commits(url) == ["b"]


@pytest.mark.parametrize("call", [sw.async_save, sw.save, plain])
def test_what_was_said_of_a_save_is_used_up_where_the_failure_before_it_is_raised(call, url):
    failing = iter([True])

    def tap(call, act):
        if call.operation == "open_upload" and next(failing, False):
            raise CkptStoreError("no route")
        return act()

    writer = sw.CkptStoreWriter(TappedStore(open_store(url), tap))
    sw.async_save(STATE, checkpoint_id="first", storage_writer=writer)
    writer.describe(global_step=500, metrics={"loss": 1.0})
    with pytest.raises(CkptStoreError, match="no route"):
        call(STATE, checkpoint_id="second", storage_writer=writer)
    done = call(STATE, checkpoint_id="third", storage_writer=writer)
    if call is not sw.save:
        done.result(30)
    (kept,) = RunLog.open(open_store(url)).fold.kept
    assert (kept.commit.checkpoint_id, kept.commit.global_step, dict(kept.commit.metrics)) == ("third", None, {})


def test_a_save_that_ends_has_ended_whatever_goes_wrong_in_noting_it(url, monkeypatch):
    def broken(error):
        raise RuntimeError("a traceback that cannot be written")

    writer = sw.CkptStoreWriter(TappedStore(open_store(url), refuse))
    with monkeypatch.context() as patched:
        patched.setattr(outstanding, "let_go", broken)
        future = sw.async_save(STATE, checkpoint_id="a", storage_writer=writer)
        with pytest.raises(CkptStoreError, match="no route"):
            future.result(30)
    future = sw.async_save(STATE, checkpoint_id="b", storage_writer=writer)  # the pool is free
    assert "no route" in str(future.exception(30))


def refuse(call, act):
    if call.operation == "open_upload":
        raise CkptStoreError("no route")
    return act()


def test_of_a_save_by_a_process_that_was_killed_at_its_time_nobody_says_that_it_never_was_committed(monkeypatch):
    monkeypatch.setattr(worker, "kill", lambda: None)
    monkeypatch.setattr(outstanding, "GRACE_SECONDS", 0.0)
    save = Outstanding(None, Gate(0.01), is_root=True, by_process=True, generation=0)
    time.sleep(0.05)
    assert isinstance(save.wait(None), CommitUnknownError)


def test_a_save_in_the_foreground_on_another_thread_does_not_take_the_place_of_the_one_that_was_staged(url):
    go, saved = threading.Event(), []
    writer = sw.CkptStoreWriter(url)

    def foreground():
        assert go.wait(30)
        saved.append(writer._session.outstanding.begin())

    thread = threading.Thread(target=foreground)
    thread.start()
    with writer._session.asking(writer._session.descriptions.take()):
        writer.stage(STATE)
    go.set()
    thread.join(30)
    assert saved == [False]
