"""What another process does to a run is seen at once, and nothing is seen before it is whole."""

import threading
import time

import pytest
import torch.distributed as dist
from case_samples import die, load, loaded_here, save, sharded, tapped, unsharded, writer
from states import blank, same

import storage_writers as sw
from ckptstore import CheckpointStore, NotFoundError, UnavailableError
from ckptstore.events import ShardStored
from ckptstore.format.records import Retire
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.throttled import ThrottledStore
from ckptstore.protocol.log import RunLog

SLOW_SECONDS = 2.0
SLOW_BYTES_PER_SECOND = 65_000  # a shard of rank 1 has 130 KB and more


def go_back_to(root, name):
    store = CheckpointStore.open(root)
    store.rollback(store.get(name))


def prune(root, name):
    """Retire a checkpoint and delete what it owns, as a collection does."""
    store = open_store(root)
    log = RunLog.create(store)
    retired = CheckpointStore.open(root).get(name)
    log.append(lambda _: Retire((retired.seq,), "keep the last"))
    for info in store.list("data/"):
        if f"/{retired.commit.prefix}/" in info.key:
            store.delete(info.key)


def names(store):
    return [each.checkpoint_id for each in store.checkpoints()]


def test_what_another_process_commits_takes_back_and_deletes_is_seen_at_once_by_all_that_looked_before(gang, root):
    empty = CheckpointStore.open(root)
    assert (empty.latest(), empty.uncommitted()) == (None, [])
    gang.values(1, save, root, "step-10", 10)
    assert empty.latest().checkpoint_id == "step-10"
    stores = [empty, CheckpointStore.open(root), CheckpointStore.open(root)]
    readers = [sw.CkptStoreReader(root), sw.CkptStoreReader(open_store(root))]

    def check(seen, newest):
        for store in [*stores, CheckpointStore.open(root)]:
            assert store.latest().checkpoint_id == newest
            assert names(store) == seen
            assert store.uncommitted() == []
        for reader in readers:
            target = blank(unsharded(0))
            sw.load(target, storage_reader=reader)
            assert same(target, unsharded(int(newest.removeprefix("step-"))))

    check(["step-10"], "step-10")
    gang.values(1, save, root, "step-20", 20)
    check(["step-20", "step-10"], "step-20")
    gang.values(1, go_back_to, root, "step-10")
    check(["step-10"], "step-10")
    gang.values(1, save, root, "step-30", 30)
    gang.values(1, save, root, "step-40", 40)
    gang.values(1, prune, root, "step-10")
    check(["step-40", "step-30"], "step-40")
    for store in stores:
        with pytest.raises(NotFoundError):
            store.get("step-10")
    with pytest.raises(NotFoundError):
        loaded_here(root, checkpoint_id="step-10")


def save_in_the_background(url, name, seed, fate):
    """Save while rank 1 is slow; return when its shard was stored, or what the ranks heard."""
    stored = []
    store = open_store(url)
    if dist.get_rank() == 1:
        store = ThrottledStore(store, bytes_per_second=SLOW_BYTES_PER_SECOND)
    if fate == "fails" and dist.get_rank() == 1:
        store = tapped(url, refusing_to_complete)
    if fate == "is killed":
        threading.Timer(SLOW_SECONDS / 2, die).start()

    def note(event):
        if isinstance(event, ShardStored):
            stored.append(time.time())

    saving = writer(store, observer=note)
    error = sw.async_save(sharded(seed), checkpoint_id=name, storage_writer=saving).exception(60)
    return stored, error


def refusing_to_complete(call, act):
    if call.operation == "complete":
        time.sleep(SLOW_SECONDS / 2)
        raise UnavailableError(f"{call.key} was refused for good.")
    return act()


def watched(gang, root, fate):
    """Run the save, and return what became of it and what was seen meanwhile: when, which, and whether it is whole."""
    outcomes = []
    job = threading.Thread(
        target=lambda: outcomes.extend(gang.run(2, save_in_the_background, root, "step-20", 20, fate))
    )
    seen, store = [], CheckpointStore.open(root)
    job.start()
    while job.is_alive():
        newest = store.latest().checkpoint_id
        target = loaded_here(root)
        step = target["step"]
        seen.append((time.time(), newest, step, same(target, unsharded(step))))
        time.sleep(0.05)
    job.join()
    return outcomes, seen


def test_latest_does_not_move_before_the_slowest_rank_has_stored_its_shard(gang, root):
    """I5, I11: neither when the save is dispatched nor when rank 0 has stored its own."""
    gang.values(2, save, root, "step-10", 10)
    outcomes, seen = watched(gang, root, "ends well")
    (first,), (second,) = (outcome.value[0] for outcome in outcomes)
    assert [outcome.value[1] for outcome in outcomes] == [None, None]
    assert second - first > SLOW_SECONDS / 2
    before = [each for each in seen if each[0] < second]
    assert [each for each in before if each[0] > first]
    assert {each[1:] for each in before} == {("step-10", 10, True)}
    assert {each[2:] for each in seen} <= {(10, True), (20, True)}
    assert CheckpointStore.open(root).latest().checkpoint_id == "step-20"
    assert all(gang.values(3, load, root, 20))


@pytest.mark.parametrize("fate", ["is killed", "fails"])
def test_a_background_save_that_never_ends_leaves_latest_where_it_was_and_every_rank_hears_of_it(gang, root, fate):
    gang.values(2, save, root, "step-10", 10)
    outcomes, seen = watched(gang, root, fate)
    assert seen
    assert {each[1:] for each in seen} == {("step-10", 10, True)}
    if fate == "is killed":
        assert [outcome.died for outcome in outcomes] == [True, True]
    else:
        for outcome in outcomes:
            assert isinstance(outcome.value[1], UnavailableError)
            assert outcome.value[1].facts["rank"] == 1
    gang.values(2, save, root, "step-30", 30)
    assert names(CheckpointStore.open(root)) == ["step-30", "step-10"]
    assert all(gang.values(3, load, root, 30))
