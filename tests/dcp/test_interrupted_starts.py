"""Ctrl-C while a thread is started: whatever that thread does then, no save is torn, and nothing is left behind."""

import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from interrupted import WHENS, interrupt_start
from odd_stores import Gated
from staged import bytes_of, saved
from states import same

import storage_writers as sw
import storage_writers.session
import storage_writers.staged
from ckptstore.errors import BusyError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore
from storage_writers import exits, outstanding, uploading
from storage_writers.outstanding import Outstanding
from storage_writers.staging import StagingPool

SOON = 20.0
UPLOAD, COPY, DCP = "ckptstore-upload", "ckptstore-staging", "AsyncCheckpointExecutor"


def commits(url):
    return [each.commit.checkpoint_id for each in RunLog.open(open_store(url)).fold.kept]


def plain(state, *, checkpoint_id, storage_writer):
    return dcp.async_save(state, checkpoint_id=checkpoint_id, storage_writer=storage_writer)


def working(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name) and thread.is_alive()]


@pytest.fixture
def held_copy(monkeypatch):
    """Copies of tensors of 777 elements stand still until they are let go; return what tells and lets go."""
    copy, begun, go = torch._foreach_copy_, threading.Event(), threading.Event()

    def holding(targets, sources, **how):
        if any(source.numel() == 777 for source in sources):
            begun.set()
            assert go.wait(SOON)
        copy(targets, sources, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", holding)
    return begun, go


@pytest.mark.parametrize("when", WHENS)
def test_a_staging_that_was_interrupted_leaves_the_pool_free_and_no_thread(monkeypatch, when):
    pool = StagingPool(staging_bytes=1 << 20)
    with monkeypatch.context() as patched:
        interrupt_start(patched, COPY, when)
        with pytest.raises(KeyboardInterrupt):
            pool.stage({"w": torch.full((100_000,), 1.0)})
        again = pool.stage({"w": torch.full((100_000,), 2.0)})
        time.sleep(0.3 if when == "late" else 0)
        assert saved(again) == {"w": bytes_of(torch.full((100_000,), 2.0))}
    again.end()
    pool.close()
    assert working(COPY) == []


def test_memory_into_which_an_interrupted_staging_still_copies_is_not_used(monkeypatch, held_copy):
    """Else the next save's state would be overwritten, and stored under a right checksum."""
    begun, go = held_copy
    monkeypatch.setattr(storage_writers.staged, "JOIN_SECONDS", 0.05)
    pool = StagingPool(staging_bytes=1 << 20)
    interrupted = interrupt_start(monkeypatch, COPY, "running", until=begun)
    with pytest.raises(KeyboardInterrupt):
        pool.stage({"w": torch.full((777,), 1.0)})
    with pytest.raises(BusyError, match="not come back from its device"):
        pool.stage({"w": torch.full((776,), 2.0)})
    go.set()
    interrupted[0].join(SOON)
    again = pool.stage({"w": torch.full((776,), 2.0)})
    assert saved(again) == {"w": bytes_of(torch.full((776,), 2.0))}
    again.end()
    pool.close()


def test_an_end_that_was_interrupted_is_made_up_for_by_the_next_staging(monkeypatch, held_copy):
    begun, go = held_copy
    pool = StagingPool(staging_bytes=1 << 20)
    staged = pool.stage({"w": torch.ones(777)})
    assert begun.wait(SOON)

    def interrupted(self, timeout=None):
        go.set()
        join(self, SOON)
        raise KeyboardInterrupt

    join = threading.Thread.join
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staged.end()
    pool.stage({"w": torch.ones(1000)}).end()
    pool.close()


def left_over(root):
    return [path for path in root.rglob("*") if path.is_file() and "/data/" in str(path)]


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("items", [{"w": torch.ones(1000)}, {"empty": torch.ones(0)}], ids=["pieces", "no-pieces"])
def test_an_upload_whose_start_was_interrupted_leaves_no_file(tmp_path, monkeypatch, when, items):
    begun = threading.Event()

    def tap(call, act):
        if call.operation == "open_upload":
            done = act()
            begun.set()
            time.sleep(0.2)
            return done
        return act()

    url = str(tmp_path)
    writer = sw.CkptStoreWriter(TappedStore(open_store(url), tap))
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(uploading, "ABORT_SECONDS", 30.0)
        interrupt_start(patched, UPLOAD, when, until=begun)
        with pytest.raises(KeyboardInterrupt):
            sw.save(items, checkpoint_id="a", storage_writer=writer)
        took = time.monotonic() - began
        time.sleep(0.3 if when == "late" else 0)
    assert took < 20  # it did not wait to the end for an upload that never began
    assert left_over(tmp_path) == []
    assert working(UPLOAD) == []
    sw.save(items, checkpoint_id="b", storage_writer=writer)
    assert commits(url) == ["b"]


def test_an_interrupt_while_parts_are_written_stays_one_and_leaves_no_file(tmp_path, monkeypatch):
    writing, wait = threading.Event(), uploading.wait

    def tap(call, act):
        if call.operation == "write":
            writing.set()
            time.sleep(0.1)
        return act()

    def interrupted(futures, timeout=None):
        if writing.is_set():
            raise KeyboardInterrupt
        return wait(futures, timeout=0.02)

    writer = sw.CkptStoreWriter(TappedStore(open_store(str(tmp_path)), tap))
    state = {f"w{each}": torch.ones(1 << 20) for each in range(8)}
    with monkeypatch.context() as patched:
        patched.setattr(uploading, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sw.save(state, checkpoint_id="a", storage_writer=writer)
    assert left_over(tmp_path) == []
    sw.save(state, checkpoint_id="b", storage_writer=writer)
    assert commits(str(tmp_path)) == ["b"]


@pytest.mark.parametrize("begin", [sw.async_save, plain], ids=["sw.async_save", "dcp.async_save"])
@pytest.mark.parametrize("when", [*WHENS, "begun"])
def test_a_save_whose_submit_was_interrupted_has_ended_and_the_next_one_goes_on(url, monkeypatch, begin, when):
    store, met = Gated(open_store(url)), []
    writer = sw.CkptStoreWriter(store, when_busy="wait", busy_timeout_seconds=SOON)
    state = {"w": torch.full((1000,), 1.0)}
    begun, begins = threading.Event(), Outstanding.begin

    def noted(save):
        try:
            return begins(save)
        finally:
            begun.set()

    with monkeypatch.context() as patched:
        patched.setattr(Outstanding, "begin", noted)
        if when == "begun":
            interrupt_start(patched, DCP, "running", until=begun)
        else:
            interrupt_start(patched, DCP, when)
        with pytest.raises(KeyboardInterrupt):
            begin(state, checkpoint_id="a", storage_writer=writer)
        state["w"].fill_(2.0)
        threading.Timer(0.2, store.gate.set).start()
        writer.wait()
        agreed = storage_writers.session.agreed
        patched.setattr(
            storage_writers.session, "agreed", lambda *args, **how: met.append(args[1]) or agreed(*args, **how)
        )
        begin(state, checkpoint_id="b", storage_writer=writer).result(SOON)
        time.sleep(0.3 if when == "late" else 0)
    assert met == ["b"]  # the thread that came late met nobody
    begin(state, checkpoint_id="c", storage_writer=writer).result(SOON)
    writer.close()
    assert commits(url) == ["b", "c"]
    for name in ("b", "c"):
        target = {"w": torch.zeros(1000)}
        sw.load(target, checkpoint_id=name, storage_reader=sw.CkptStoreReader(url))
        assert same(target, {"w": torch.full((1000,), 2.0)})


@pytest.mark.parametrize("begin", [sw.async_save, plain], ids=["sw.async_save", "dcp.async_save"])
def test_a_save_whose_future_was_not_taken_has_ended_and_nobody_speaks_of_it(url, monkeypatch, begin):
    store = Gated(open_store(url))
    writer = sw.CkptStoreWriter(store, busy_timeout_seconds=SOON)
    watch = exits.watch

    def interrupted(save):
        watch(save)
        assert store.begun.wait(SOON)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(outstanding.exits, "watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin({"w": torch.ones(1000)}, checkpoint_id="a", storage_writer=writer)
    assert exits._watched == {}
    store.gate.set()
    writer.wait()
    begin({"w": torch.ones(1000)}, checkpoint_id="b", storage_writer=writer).result(SOON)
    writer.close()
    assert commits(url) == ["b"]
