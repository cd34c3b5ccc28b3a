"""A write that fails publishes nothing: no object under its name, no pending upload, no other answer."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_samples import body_of, shards_under, tapped, writer
from states import blank, same

import storage_writers as sw
from ckptstore import AccessDeniedError, CheckpointStore, CkptStoreError, CommitUnknownError, UnavailableError
from ckptstore.events import HintFailed
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.units import KIB, MIB

SHARD_BYTES = 20 * MIB
PARTS = TransferOptions(part_bytes=5 * MIB)


def two_tensors(first_bytes):
    """Return a state whose shard has 20 MiB, so many of them in the tensor that is written first."""
    return {"first": torch.ones(first_bytes // 4), "second": torch.ones((SHARD_BYTES - first_bytes) // 4)}


def disk_error():
    raise OSError(5, "Input/output error")


def interrupt():
    raise KeyboardInterrupt


def terminate():
    """Meet a SIGTERM, which reaches the main thread: that one waits for the upload, and gives it up."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)


@pytest.fixture
def handler():
    """A handler as schedulers' wrappers install it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    yield
    signal.signal(signal.SIGTERM, before)


class Breaking(dcp.DefaultSavePlanner):
    """Cannot give the second tensor."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def resolve_data(self, write_item):
        if write_item.index.fqn == "second":
            self.fault()
        return super().resolve_data(write_item)


def wait_until(true, seconds=10):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def saved(root):
    """A run with one checkpoint; what `latest.json` says then."""
    sw.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer(root))
    return body_of(open_store(root), "latest.json")


def check_nothing_happened(root, saved, shards=1):
    assert len(shards_under(root)) == shards
    assert body_of(open_store(root), "latest.json") == saved
    assert CheckpointStore.open(root).latest().checkpoint_id == "step-1"


def what_happened(error):
    """Return what the caller of a save can learn of the fault under it."""
    if isinstance(error, dcp.CheckpointException):
        return type(error.failures[0][0])
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return type(error)
    assert "Input/output error" in str(error)
    return OSError


@pytest.mark.parametrize("fault", [disk_error, interrupt, terminate])
@pytest.mark.parametrize("first_bytes", [KIB, 12 * MIB], ids=["1 KiB", "12 MiB"])
def test_a_shard_that_breaks_off_is_not_published(root, saved, server_leftovers, handler, first_bytes, fault):
    """Also when several parts of it are on the server already."""

    def look_and_break():
        if first_bytes > PARTS.part_bytes:
            wait_until(server_leftovers)  # it is under way
        fault()

    saving, state = writer(root, transfer=PARTS), two_tensors(first_bytes)
    with pytest.raises((CkptStoreError, dcp.CheckpointException, KeyboardInterrupt, SystemExit)) as caught:
        sw.save(state, checkpoint_id="step-2", storage_writer=saving, planner=Breaking(look_and_break))
    assert what_happened(caught.value) == {disk_error: OSError, interrupt: KeyboardInterrupt}.get(fault, SystemExit)
    check_nothing_happened(root, saved)
    assert server_leftovers() == []


def test_after_a_shard_that_broke_off_the_same_step_is_saved_without_cleaning_up(root, saved, server_leftovers):
    saving, state = writer(root, transfer=PARTS), two_tensors(12 * MIB)
    with pytest.raises(CkptStoreError, match="Input/output error"):
        sw.save(state, checkpoint_id="step-2", storage_writer=saving, planner=Breaking(disk_error))
    sw.save(state, checkpoint_id="step-2", storage_writer=saving)
    target = blank(state)
    sw.load(target, storage_reader=sw.CkptStoreReader(root))
    assert same(target, state)
    assert server_leftovers() == []


def save_and_break_on_rank_one(url):
    state = {f"{name}{dist.get_rank()}": tensor for name, tensor in two_tensors(12 * MIB).items()}
    planner = Breaking(disk_error) if dist.get_rank() == 1 else None
    if planner is not None:
        state["second"] = state.pop("second1")
    try:
        saving = writer(url, transfer=PARTS)
        sw.save(state, checkpoint_id="step-2", storage_writer=saving, planner=planner)
    except CkptStoreError as error:
        return error.facts["rank"], "Input/output error" in str(error)
    return None


def test_a_shard_that_breaks_off_on_one_rank_is_heard_of_on_all(gang, root, saved, server_leftovers):
    assert gang.values(2, save_and_break_on_rank_one, root) == [(1, True)] * 2
    check_nothing_happened(root, saved, shards=2)  # rank 0's is there, and no commit names it
    assert server_leftovers() == []


def is_part(call):
    return call.key.endswith(".json.gz")


def is_commit(call):
    return call.key.startswith("log/")


def failing(root, at, error):
    """Return a store that refuses to put what `at` says; nothing arrives."""

    def tap(call, act):
        if call.operation == "put" and at(call):
            raise error
        return act()

    return tapped(root, tap)


@pytest.mark.parametrize("at", [is_part, is_commit])
@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (AccessDeniedError("403"), AccessDeniedError),
        (UnavailableError("503"), UnavailableError),
        (OSError(28, "No space left on device"), (UnavailableError, CommitUnknownError)),
    ],
    ids=["denied", "unavailable", "no space"],
)
def test_a_manifest_or_a_commit_that_cannot_be_written_commits_nothing(root, saved, server_leftovers, at, error, heard):
    """I5: what is not understood is called unknown, and the next save finds out."""
    saving = writer(failing(root, at, error), log=LogOptions(deadline_seconds=0.3))
    with pytest.raises(heard) as caught:
        sw.save({"w": torch.zeros(3)}, checkpoint_id="step-2", storage_writer=saving)
    assert isinstance(caught.value, CkptStoreError)
    check_nothing_happened(root, saved, shards=2)
    assert server_leftovers() == []
    assert len([info for info in open_store(root).list("data/") if is_part(info)]) == (1 if at is is_part else 2)
    sw.save({"w": torch.full((3,), 3.0)}, checkpoint_id="step-3", storage_writer=writer(root))
    assert [each.checkpoint_id for each in CheckpointStore.open(root).checkpoints()] == ["step-3", "step-1"]


@pytest.mark.parametrize("error", [AccessDeniedError("403"), UnavailableError("429"), OSError(28, "No space left")])
def test_a_pointer_that_cannot_be_written_fails_nothing_and_is_told(root, saved, server_leftovers, error):
    """I10."""
    told = []

    def at(call):
        return call.key == "latest.json" or call.key.endswith("/COMMITTED")

    saving = writer(failing(root, at, error), observer=told.append)
    sw.save({"w": torch.full((3,), 2.0)}, checkpoint_id="step-2", storage_writer=saving)
    assert body_of(open_store(root), "latest.json") == saved
    assert len([event for event in told if isinstance(event, HintFailed)]) == 2
    assert CheckpointStore.open(root).latest().checkpoint_id == "step-2"
    target = {"w": torch.zeros(3)}
    sw.load(target, storage_reader=sw.CkptStoreReader(root))
    assert same(target, {"w": torch.full((3,), 2.0)})
    assert server_leftovers() == []
