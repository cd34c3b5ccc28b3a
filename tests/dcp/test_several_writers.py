"""Several writers in one process: a new one per save, two of one run, two runs. Their saves do not meet each other."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import storage_writers as sw
from ckptstore.errors import BusyError, CkptStoreError, UnavailableError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore


def commits(url):
    return [each.commit.checkpoint_id for each in RunLog.open(open_store(url)).fold.kept]


def slow(url):
    """Return a store in which ranks are slow at other moments."""
    seconds = iter([0.02 + 0.1 * ((dist.get_rank() + count) % 2) for count in range(1000)])

    def tap(call, act):
        if call.operation == "open_upload":
            time.sleep(next(seconds))
        return act()

    return TappedStore(open_store(url), tap)


def state(number):
    return {f"x{dist.get_rank()}": torch.full((1000,), float(number)), "same": torch.full((1000,), float(number))}


def saved_in_turn(urls, new):
    """Save to the runs in turn; return how each save ended."""
    writers = [sw.CkptStoreWriter(slow(url), agree_timeout_seconds=20) for url in urls]
    futures = []
    for number in range(6):
        if new:
            writers = [sw.CkptStoreWriter(slow(url), agree_timeout_seconds=20) for url in urls]
        writer = writers[number % len(writers)]
        futures.append(sw.async_save(state(number), checkpoint_id=f"s{number}", storage_writer=writer))
    errors = [future.exception(60) for future in futures]
    for writer in writers:
        writer.close()
    return errors


@pytest.mark.parametrize("new", [False, True], ids=["kept", "new"])
@pytest.mark.parametrize("runs", [["a"], ["a", "b"], ["a", "a"]], ids=["one", "two-runs", "two-writers"])
def test_saves_of_several_writers_run_one_after_the_other_on_all_ranks(gang, tmp_path, runs, new):
    urls = [str(tmp_path / run) for run in runs]
    assert gang.values(2, saved_in_turn, urls, new) == [[None] * 6] * 2
    for at, url in enumerate(urls):
        names = [f"s{number}" for number in range(6) if urls[number % len(urls)] == url]
        assert commits(url) == names, at
        for name in names:
            target = {"x0": torch.zeros(1000), "x1": torch.zeros(1000), "same": torch.zeros(1000)}
            sw.load(target, checkpoint_id=name, storage_reader=sw.CkptStoreReader(url))
            assert all(bool((tensor == float(name[1:])).all()) for tensor in target.values())


def busy_with_anothers(url, when_busy):
    """Begin a save of another writer while one runs that ends late; return what became of it."""

    def tap(call, act):
        if call.operation == "open_upload" and dist.get_rank() == 1:
            time.sleep(1.5)
        return act()

    first, second = sw.CkptStoreWriter(TappedStore(open_store(url), tap)), sw.CkptStoreWriter(url, when_busy=when_busy)
    future = sw.async_save(state(1), checkpoint_id="a", storage_writer=first)
    try:
        said = sw.async_save(state(2), checkpoint_id="b", storage_writer=second).skipped
    except BusyError as error:
        said = sorted(error.facts["ranks"])
    assert future.exception(30) is None
    second.close()
    first.close()
    return said


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_a_writer_that_does_not_wait_does_not_wait_for_anothers_save_either(gang, tmp_path, when_busy):
    one, other = gang.values(2, busy_with_anothers, str(tmp_path), when_busy)
    assert one == other
    assert one is True or 1 in one
    assert commits(str(tmp_path)) == ["a"]


def told_by_its_own(url):
    """Let a save fail, save with other writers, and return what each call raised."""
    failing = iter([dist.get_rank() == 1])

    def tap(call, act):
        if call.operation == "open_upload" and next(failing, False):
            raise UnavailableError("no route")
        return act()

    first, second = sw.CkptStoreWriter(TappedStore(open_store(url), tap)), sw.CkptStoreWriter(url)
    heard = []

    def call(act):
        try:
            act()
            heard.append(None)
        except CkptStoreError as error:
            heard.append(error.message)

    call(lambda: sw.async_save(state(1), checkpoint_id="a", storage_writer=first))
    call(lambda: sw.async_save(state(2), checkpoint_id="b", storage_writer=second))
    call(lambda: sw.save(state(3), checkpoint_id="c", storage_writer=second))
    call(second.close)
    call(first.wait)
    call(first.close)
    return heard


def test_a_failure_is_told_once_and_by_the_writer_whose_save_it_was(gang, tmp_path):
    one, other = gang.values(2, told_by_its_own, str(tmp_path))
    assert one == other
    assert [message is not None for message in one] == [False, False, False, False, True, False]
    assert "no route" in one[4]
    assert commits(str(tmp_path)) == ["b", "c"]


def given_up_and_another(url):
    """A save of one writer hangs; another writer's save waits for it, gives it up and goes on in another group."""
    answers = threading.Event()

    def tap(call, act):
        if call.operation == "open_upload" and dist.get_rank() == 1:
            answers.wait(60)
        return act()

    first = sw.CkptStoreWriter(TappedStore(open_store(url), tap), commit_timeout_seconds=1)
    second = sw.CkptStoreWriter(url)
    sw.async_save(state(1), checkpoint_id="a", storage_writer=first)
    group = second.process_group
    sw.async_save(state(2), checkpoint_id="b", storage_writer=second).result(60)
    left = second.process_group is not group
    heard = []
    try:
        first.wait()
    except CkptStoreError as error:
        heard.append(type(error).__name__)
    sw.async_save(state(3), checkpoint_id="c", storage_writer=second).result(60)
    answers.set()
    second.close()
    first.close()
    return left, heard


def test_a_save_that_hangs_does_not_hold_up_another_writer_for_longer_than_its_time(gang, tmp_path):
    assert gang.values(2, given_up_and_another, str(tmp_path)) == [(True, ["StalledError"])] * 2
    assert commits(str(tmp_path)) == ["b", "c"]


def on_the_group_that_trains(url):
    """Save in the background with DCP's own call, without and with a group; return what was raised."""
    writer, heard = sw.CkptStoreWriter(url), []
    for group in (None, writer.process_group):
        try:
            dcp.async_save(state(1), checkpoint_id="a", storage_writer=writer, process_group=group).result()
        except CkptStoreError as error:
            heard.append((type(error).__name__, error.hint))
    writer.close()
    return heard


def test_a_save_in_the_background_on_the_group_that_trains_is_refused(gang, tmp_path):
    one, other = gang.values(2, on_the_group_that_trains, str(tmp_path))
    assert one == other == [("InvalidInputError", "Pass process_group=writer.process_group to dcp.async_save.")]
    assert commits(str(tmp_path)) == ["a"]
