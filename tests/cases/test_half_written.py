"""A save that was killed, or never got further than a name, is not there; what was whole before it is."""

from pathlib import Path

import pytest
import torch.distributed as dist
from case_samples import (
    body_of,
    command,
    command_here,
    die,
    load,
    loaded_here,
    save,
    sharded,
    shards_under,
    tapped,
    unsharded,
    writer,
)
from states import same

import storage_writers as sw
from ckptstore import CheckpointStore, NotFoundError, UncommittedError
from ckptstore.events import PassedOver
from ckptstore.format.layout import Stem
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.observed import ObservedStore


def part_was_put(call, calls):
    return call.operation == "put" and call.key.endswith(".json.gz")


def commit_is_sent(call, calls):
    return call.key.startswith("log/") and call.operation == "put" and any(part_was_put(each, []) for each in calls)


def shard_is_complete(call, calls):
    return call.operation == "complete"


# Which ranks die, at which call, and whether the call happens; then what is left: shards and parts.
MOMENTS = {
    "one shard is there": (
        {0: (shard_is_complete, False), 1: (shard_is_complete, True), 2: (shard_is_complete, False)},
        (1, 0),
    ),
    "all shards are there": ({0: (part_was_put, False)}, (3, 0)),
    "shards and parts are there": ({0: (commit_is_sent, False)}, (3, 1)),
}


def save_and_die(url, name, seed, moment):
    dies = MOMENTS[moment][0].get(dist.get_rank())

    def tap(call, act):
        now = dies is not None and dies[0](call, store.calls)
        if now and not dies[1]:
            die()
        result = act()
        if now:
            die()
        return result

    store = tapped(url, tap)
    saving = writer(store, agree_timeout_seconds=5)
    sw.save(sharded(seed), checkpoint_id=name, storage_writer=saving)


def killed_save(gang, root, name, seed, moment):
    outcomes = gang.run(3, save_and_die, root, name, seed, moment)
    dying, (shards, parts) = MOMENTS[moment]
    assert [rank for rank, outcome in enumerate(outcomes) if outcome.died] == list(dying)
    assert all(outcome.error is not None for outcome in outcomes if not outcome.died)
    keys = [info.key for info in open_store(root).list("data/") if f"/{name}." in info.key]
    return [sum(key.endswith(end) for key in keys) - count for end, count in ((".safetensors", shards), (".gz", parts))]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_killed_at_any_moment_is_never_chosen_and_needs_no_cleaning_up(gang, root, capsys, moment):
    """I11."""
    gang.values(3, save, root, "step-10", 10)
    assert killed_save(gang, root, "step-20", 20, moment) == [0, 0]

    assert command("latest", root)["checkpoint"]["checkpoint_id"] == "step-10"  # in a new process
    assert CheckpointStore.open(root).latest().checkpoint_id == "step-10"
    assert all(gang.values(2, load, root, 10))
    told = []
    assert same(loaded_here(root, observer=told.append), unsharded(10))

    objects = sum(MOMENTS[moment][1])  # what was skipped, and why
    skipped = [event for event in told if isinstance(event, PassedOver)]
    assert skipped == [PassedOver("step-20", f"never committed, in progress: {objects} objects")]
    (ignored,) = command_here(capsys, "ls", root, "--all")[1]["uncommitted"]
    assert (ignored["checkpoint_id"], ignored["objects"], ignored["state"]) == ("step-20", objects, "in progress")
    with pytest.raises(UncommittedError, match="never committed"):
        loaded_here(root, checkpoint_id="step-20")
    for outcome in gang.run(2, load, root, 20, "step-20"):
        assert isinstance(outcome.error, UncommittedError)

    gang.values(3, save, root, "step-20", 21)
    assert CheckpointStore.open(root).latest().checkpoint_id == "step-20"
    assert all(gang.values(2, load, root, 21))
    assert command_here(capsys, "verify", root, "--level", "full")[0] == 0
    (ignored,) = command_here(capsys, "ls", root, "--all")[1]["uncommitted"]
    assert ignored["state"] == "dead"


def save_here(root, name, seed):
    saving = writer(root)
    sw.save(unsharded(seed), checkpoint_id=name, storage_writer=saving)
    return saving.committed


def put_raw(request, root, key, body):
    """Make an object, or what stands for an empty folder, past the store."""
    if root.startswith("s3://"):
        server = request.getfixturevalue("seaweedfs")
        prefix = root.removeprefix(f"s3://{server.bucket}/")
        server.client().put_object(Bucket=server.bucket, Key=f"{prefix}/{key}", Body=body)
        return
    path = Path(root, key)
    if key.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def test_empty_folders_and_empty_objects_with_a_higher_step_change_nothing(request, capsys, root):
    committed = save_here(root, "step-10", 10)
    record = body_of(open_store(root), committed.commit.stem.committed_key)
    stem = Stem("step-30", committed.commit.term, committed.commit.attempt + 1, "f" * 32)
    put_raw(request, root, "step-30/", b"")
    put_raw(request, root, stem.prefix(), b"")
    put_raw(request, root, "data/5/", b"")
    for rank in range(3):
        put_raw(request, root, stem.shard_key(rank), b"")
        put_raw(request, root, f"step-30/__{rank}_0.distcp", b"")
    put_raw(request, root, "step-30/.metadata", b"")
    put_raw(request, root, stem.part_key(0), b"")
    put_raw(request, root, stem.committed_key, record)  # even with a commit record beside it

    assert CheckpointStore.open(root).latest().checkpoint_id == "step-10"
    assert same(loaded_here(root), unsharded(10))
    for which in ({"checkpoint_id": "step-30"}, {"step": 30}):
        with pytest.raises((UncommittedError, NotFoundError), match="committed"):
            loaded_here(root, **which)
    (ignored,) = command_here(capsys, "ls", root)[1]["uncommitted"]
    assert (ignored["checkpoint_id"], ignored["objects"]) == ("step-30", 5)
    assert command_here(capsys, "verify", root, "--all", "--level", "full")[0] == 0
    save_here(root, "step-30", 31)
    assert same(loaded_here(root), unsharded(31))


def test_a_step_that_is_saved_again_is_the_old_one_until_the_new_one_is_whole(gang, root, capsys):
    """I6, I11: the shards of rank 0 and 1 of the second save are there, and nobody reads them."""
    gang.values(3, save, root, "step-20", 1)
    outcomes = gang.run(2, save_and_die, root, "step-20", 2, "all shards are there")
    assert [outcome.died for outcome in outcomes] == [True, False]
    assert len(shards_under(root)) == 3 + 2
    assert all(gang.values(2, load, root, 1))
    assert all(gang.values(3, load, root, 1, "step-20"))
    assert command_here(capsys, "verify", root, "--level", "full")[0] == 0

    gang.values(2, save, root, "step-20", 3)
    assert all(gang.values(3, load, root, 3))
    prefix = CheckpointStore.open(root).latest().commit.prefix
    calls = []
    store = ObservedStore(open_store(root), calls.append)
    assert same(loaded_here(store), unsharded(3))
    assert {call.key.split("/")[2] for call in calls if call.key.startswith("data/")} == {prefix}
    assert CheckpointStore.open(root).get("step-20@1").saved_world_size == 3
    assert same(loaded_here(root, seq=1), unsharded(1))


def save_but_rank_one_never_uploads(url, name, seed):
    """Rank 0 stores its shard, then rank 1 dies."""

    def tap(call, act):
        if dist.get_rank() == 1 and call.operation == "open_upload":
            die()
        return act()

    saving = writer(tapped(url, tap), agree_timeout_seconds=5)  # for who never comes
    sw.save(sharded(seed), checkpoint_id=name, storage_writer=saving)


def test_one_shard_of_two_that_is_written_again_is_never_mixed_with_the_other(gang, root):
    """I6."""
    gang.values(2, save, root, "step-20", 1)
    before = {key: body_of(open_store(root), key) for key in shards_under(root)}
    outcomes = gang.run(2, save_but_rank_one_never_uploads, root, "step-20", 2)
    assert [outcome.died for outcome in outcomes] == [False, True]
    assert outcomes[0].error is not None
    assert len(shards_under(root)) == 3
    assert {key: body_of(open_store(root), key) for key in before} == before
    assert all(gang.values(2, load, root, 1))
