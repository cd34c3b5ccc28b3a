"""An upload is given up when the engine does not go on, and only then."""

import threading
import time

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

import storage_writers as sw
from ckptstore.errors import BusyError, StalledError
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import TappedStore
from storage_writers.uploading import MAX_HUNG

STATE = {"w": torch.ones(1000)}
IMPATIENT = TransferOptions(retry=RetryOptions(stall_timeout_seconds=0.3))


def commits(url):
    return [each.commit.checkpoint_id for each in RunLog.open(open_store(url)).fold.kept]


def uploads():
    return sum(thread.name == "ckptstore-upload" for thread in threading.enumerate())


@pytest.mark.parametrize("background", [False, True])
def test_uploads_that_hang_again_and_again_do_not_pile_up(url, background):
    answers = threading.Event()

    def tap(call, act):
        if call.operation == "write":
            answers.wait(60)
        return act()

    def save(name, url):
        given = {"checkpoint_id": name, "storage_writer": writers[url]}
        if background:
            sw.async_save(STATE, **given).result(30)
        else:
            sw.save(STATE, **given)

    before, other = uploads(), url + "-other"
    writers = {url: sw.CkptStoreWriter(TappedStore(open_store(url), tap), transfer=IMPATIENT)}
    writers[other] = sw.CkptStoreWriter(other)
    for _ in range(MAX_HUNG):
        with pytest.raises(StalledError):
            save("a", url)
    for _ in range(2):
        with pytest.raises(BusyError, match="have not ended"):
            save("a", url)
    assert uploads() - before == MAX_HUNG
    save("elsewhere", other)  # another store answers
    answers.set()
    deadline = time.monotonic() + 20
    while uploads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    save("b", url)
    assert (commits(url), commits(other)) == (["b"], ["elsewhere"])


class Computes(DefaultSavePlanner):
    """A planner that takes longer for a tensor than an upload may stand still."""

    def resolve_data(self, item):
        time.sleep(1.0)
        return super().resolve_data(item)


def test_an_upload_that_waits_for_what_it_is_to_send_is_not_given_up(url):
    writer = sw.CkptStoreWriter(url, transfer=IMPATIENT)
    sw.save({"v": torch.ones(10), **STATE}, checkpoint_id="a", storage_writer=writer, planner=Computes())
    assert commits(url) == ["a"]


def test_an_upload_whose_store_stands_still_between_two_pieces_is_given_up(url):
    answers, writes = threading.Event(), []

    def tap(call, act):
        if call.operation == "write":
            writes.append(call)
            if len(writes) > 1:
                answers.wait(30)
        return act()

    writer = sw.CkptStoreWriter(TappedStore(open_store(url), tap), transfer=IMPATIENT)
    with pytest.raises(StalledError, match="has not moved"):
        sw.save({"w": torch.ones(3 << 18)}, checkpoint_id="a", storage_writer=writer)
    answers.set()
    assert commits(url) == []
