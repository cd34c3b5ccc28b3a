"""A call that ends with an exception has decided: its save is not committed with what the caller does next."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from odd_stores import Gated
from states import same

import storage_writers as sw
from ckptstore.errors import BusyError, CkptStoreError, CommitUnknownError, StalledError, UnsupportedError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.attempt import Description
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore
from storage_writers import outstanding, worker
from storage_writers.gates import Gate
from storage_writers.outstanding import Outstanding
from storage_writers.ranks import Peers
from storage_writers.saving import Save
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


@pytest.mark.parametrize("call", ["save", "load"])
def test_an_interrupt_comes_out_as_an_interrupt(url, call):
    interrupts = iter([])

    def tap(what, act):
        if what.operation in ("open_upload", "get_range", "read_boxes") and next(interrupts, False):
            raise KeyboardInterrupt
        return act()

    store = TappedStore(open_store(url), tap)
    writer, target = sw.CkptStoreWriter(store), {"w": torch.zeros(1000)}
    if call == "load":
        sw.save(STATE, checkpoint_id="a", storage_writer=writer)
    interrupts = iter([True])
    calls = {
        "save": lambda: sw.save(STATE, checkpoint_id="a", storage_writer=writer),
        "load": lambda: sw.load(target, storage_reader=sw.CkptStoreReader(store)),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    sw.save(STATE, checkpoint_id="b", storage_writer=writer)
    sw.load(target, storage_reader=sw.CkptStoreReader(store))
    assert same(target, STATE)


def test_keys_of_several_types_are_loaded_back(url):
    sw.save(
        {1: torch.ones(3), "epoch": 7, "m": torch.ones(3)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url)
    )
    target = {1: torch.zeros(3), "epoch": 0, "m": torch.zeros(3)}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    assert same(target, {1: torch.ones(3), "epoch": 7, "m": torch.ones(3)})


def test_a_save_that_is_committed_and_does_not_end_says_so(url, monkeypatch):
    """DCP still waits for a rank after the commit: there is nothing to return, and nothing to save again."""
    monkeypatch.setattr(outstanding, "DECIDING_SECONDS", 0.1)
    gate = Gate(0.1)
    gate.pass_through()
    save = Outstanding(Description(), gate, is_root=True, by_process=False)
    save.save = Save("id", "a", Description(), RunLog.create(open_store(url)), Peers(0, 1), gate, committed=3)
    future = Future()
    save.adopt(future, lambda *_: None, planner=None)
    assert future.exception() is None
    with pytest.raises(StalledError, match="committed in slot 3"):
        future.result()
    future.set_result(None)


def test_calls_of_several_threads_on_one_writer_go_one_after_the_other(url):
    writer, futures = sw.CkptStoreWriter(url), []

    def save(number):
        state = {"w": torch.full((1000,), float(number))}
        futures.append((number, sw.async_save(state, checkpoint_id=f"s{number}", storage_writer=writer)))
        state["w"].fill_(-1)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [future.exception(30) for _, future in futures] == [None] * 6
    assert sorted(commits(url)) == [f"s{number}" for number in range(6)]
    for number in range(6):
        target = {"w": torch.zeros(1000)}
        sw.load(target, checkpoint_id=f"s{number}", storage_reader=sw.CkptStoreReader(url))
        assert float(target["w"][0]) == number


def test_a_fork_does_not_wait_for_a_save_of_its_parent(tmp_path):
    store = Gated(open_store(str(tmp_path)))
    writer = sw.CkptStoreWriter(store)
    future = sw.async_save(STATE, checkpoint_id="a", storage_writer=writer)
    child = os.fork()
    if not child:
        began = time.monotonic()
        try:
            writer.wait()
            writer.close()
            os._exit(0 if time.monotonic() - began < 5 else 1)
        finally:
            os._exit(2)
    deadline, ended = time.monotonic() + 20, (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)
    store.gate.set()
    future.result(30)
    writer.close()


def interrupted_before_they_met(root, which):
    """Interrupt one rank before it meets the other; return what each call raised, all saves having one name."""
    writer, rank = sw.CkptStoreWriter(root, agree_timeout_seconds=5), dist.get_rank()
    heard = []
    for number in range(4):
        state = {f"x{rank}": torch.full((10,), float(number)), "same": torch.full((10,), float(number))}
        settle = writer._session.settle
        if rank == which and number == 1:

            def interrupted(_):
                raise KeyboardInterrupt

            writer._session.settle = interrupted
        try:
            sw.async_save(state, checkpoint_id="last", storage_writer=writer).result(30)
            heard.append(None)
        except (KeyboardInterrupt, CkptStoreError) as error:
            heard.append(type(error).__name__)
        writer._session.settle = settle
    writer.close()
    return heard


@pytest.mark.parametrize("which", [0, 1])
def test_ranks_of_which_one_was_interrupted_meet_in_the_same_call_again(gang, tmp_path, which):
    heard = gang.values(2, interrupted_before_they_met, str(tmp_path), which)
    assert heard[which] == [None, "KeyboardInterrupt", None, None]
    assert heard[1 - which] == [None, "DisagreementError", None, None]
    target = {name: torch.zeros(10) for name in ("x0", "x1", "same")}
    sw.load(target, storage_reader=sw.CkptStoreReader(str(tmp_path)))
    assert same(target, {name: torch.full((10,), 3.0) for name in target})


def left_out_by_one(root):
    """Leave out the second save on rank 1; return what each call raised here."""
    writer, rank = sw.CkptStoreWriter(root, agree_timeout_seconds=1), dist.get_rank()
    heard = []
    for number in range(4):
        if (rank, number) == (1, 1):
            continue
        state = {f"x{rank}": torch.full((10,), float(number))}
        try:
            sw.async_save(state, checkpoint_id=f"s{number}", storage_writer=writer).result(30)
            heard.append(None)
        except CkptStoreError as error:
            heard.append(type(error).__name__)
        if (rank, number) == (0, 1):
            Path(f"{root}-went-on").touch()
        while rank == 1 and number == 0 and not Path(f"{root}-went-on").exists():
            time.sleep(0.05)
    writer.close()
    return heard


def test_a_rank_that_leaves_out_a_save_is_missed_and_the_next_one_works(gang, tmp_path):
    root = str(tmp_path / "run")
    assert gang.values(2, left_out_by_one, root, seconds=120) == [
        [None, "DisagreementError", None, None],
        [None, None, None],
    ]
    assert commits(root) == ["s0", "s2", "s3"]
