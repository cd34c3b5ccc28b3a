"""One rank fails, differs or does not come: every other rank raises the same typed error in time, and it says which.

Nothing is committed then, and the next save works.
"""

import datetime as dt
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from case_samples import body_of, load, save, sharded, shards_under, tapped
from refusals import LOADS, SAVES, checked, contents, raised, told
from states import blank, same

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import (
    CkptStoreError,
    CommitUnknownError,
    DisagreementError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from ckptstore.events import UploadBegan
from ckptstore.objectstore.urls import open_store
from storage_writers.loading import Fetcher

RANKS = 3
"""Rank 1 is the one that fails, unless it is said otherwise."""
AGREE_SECONDS = 2.0
SLACK_SECONDS = 8.0
"""What a busy machine may add to a limit."""


def outcome(work):
    """Return what `work` raised, as ours, and the seconds that this took."""
    began = time.monotonic()
    error = raised(work)
    assert error is not None, "nothing was raised"
    ours = sw.cause(error)
    assert ours is not None, f"{type(error).__name__}: {error}"
    return ours, time.monotonic() - began


def same_error(errors, kind, *names):
    """Check that all ranks raised the very same error."""
    for error in errors:
        checked(error, kind, *names)
    assert len({(str(error), repr(sorted(error.facts.items()))) for error in errors}) == 1
    return errors[0]


def full_disk(url, error):
    def tap(call, act):
        if call.operation == "write" and dist.get_rank() == 1:
            raise error
        return act()

    return tapped(url, tap)


def save_that_fails(url, how, call):
    """Save in a way that fails on rank 1; then all is well again."""
    store = {
        "disk is full": lambda: full_disk(url, OSError(28, "No space left on device")),
        "store is away": lambda: full_disk(url, UnavailableError("The disk of this host is full.")),
        "memory is full": lambda: full_disk(url, MemoryError("9 GiB")),
    }.get(how, lambda: url)()
    writer = sw.CkptStoreWriter(store, agree_timeout_seconds=AGREE_SECONDS)

    state = sharded(7)

    def work():
        if how == "state is not built" and dist.get_rank() == 1:
            raise DisagreementError("this rank has no state")  # and it keeps running
        SAVES[call](state, checkpoint_id="bad", storage_writer=writer)

    error, seconds = outcome(work)
    dist.barrier()
    kept = [each.checkpoint_id for each in CheckpointStore.open(url).checkpoints()]
    dist.barrier()
    save(url, "after", 9)
    return error, seconds, kept, load(url, 9)


FAILURES = {
    "state is not built": (DisagreementError, ("Rank 1 of 3 did not come",)),
    "disk is full": (CkptStoreError, ("Rank 1", "No space left", "rank-00001.safetensors")),
    "store is away": (UnavailableError, ("Rank 1", "The disk of this host is full")),
    "memory is full": (CkptStoreError, ("Rank 1", "9 GiB")),
}


@pytest.mark.parametrize(
    ("root", "how"),
    [("file", how) for how in FAILURES] + [pytest.param("s3", "disk is full", marks=pytest.mark.servers)],
    indirect=["root"],
)
def test_what_fails_on_one_rank_is_raised_by_all_in_time_and_the_next_save_works(gang, root, how):
    kind, names = FAILURES[how]
    gang.values(RANKS, save, root, "before", 5)
    kept = ["before"]
    for call in SAVES:
        heard = gang.values(RANKS, save_that_fails, root, how, call)
        others = [each for rank, each in enumerate(heard) if rank != 1 or how != "state is not built"]
        error = same_error([error for error, *_ in others], kind, *names)
        assert error.facts.get("rank", error.facts.get("missing")) in (1, [1])
        for _, seconds, committed, works_after in heard:
            assert seconds < AGREE_SECONDS + SLACK_SECONDS
            assert committed == kept
            assert works_after
        kept = ["after", *kept]


def group_of(seconds):
    """Return a group of all ranks with a time-out; in a collective not every rank talks to every other."""
    return dist.new_group(timeout=dt.timedelta(seconds=seconds))


def exit_in_write(url, who):
    group = group_of(2)

    def observe(event):
        if isinstance(event, UploadBegan) and dist.get_rank() == who:
            os._exit(3)

    writer, state = sw.CkptStoreWriter(url, observer=observe, process_group=group), sharded(7)
    return outcome(lambda: sw.save(state, checkpoint_id="bad", storage_writer=writer, process_group=group))


@pytest.mark.parametrize(
    ("who", "kind", "said"),
    [
        (1, DisagreementError, "Nothing was committed"),
        (0, CommitUnknownError, "whether that was committed is not known"),
    ],
    ids=["a rank", "the coordinator"],
)
def test_a_rank_that_exits_in_its_upload_is_named_by_all_survivors_and_nothing_is_committed(
    gang, root, who, kind, said
):
    gang.values(RANKS, save, root, "before", 5)
    outcomes = gang.run(RANKS, exit_in_write, root, who)
    assert [rank for rank, each in enumerate(outcomes) if each.died] == [who]
    survivors = [each.value for rank, each in enumerate(outcomes) if rank != who]
    error = same_error([error for error, _ in survivors], kind, f"Rank {who} of 3 was lost", said)
    assert error.facts["missing"] == [who]
    assert max(seconds for _, seconds in survivors) < 2 + 5 + SLACK_SECONDS
    assert [each.checkpoint_id for each in CheckpointStore.open(root).checkpoints()] == ["before"]
    assert gang.values(RANKS, load, root, 5) == [True] * RANKS
    gang.values(RANKS, save, root, "after", 9)
    assert gang.values(RANKS, load, root, 9) == [True] * RANKS


def test_of_more_ranks_those_far_from_the_dead_one_hear_of_it_at_the_groups_time_out(gang, tmp_path):
    root = str(tmp_path / "run")
    gang.values(4, save, root, "before", 5)
    outcomes = gang.run(4, exit_in_write, root, 1)
    survivors = [each.value for rank, each in enumerate(outcomes) if rank != 1]
    error = same_error(
        [error for error, _ in survivors], DisagreementError, "Rank 1 of 4 was lost", "Nothing was committed"
    )
    assert error.facts["missing"] == [1]
    assert max(seconds for _, seconds in survivors) < 2 + 5 + SLACK_SECONDS
    assert gang.values(4, load, root, 5) == [True] * 4


def exit_after_the_commit(url):
    """Rank 1 is gone before the others hear that the save ended well."""
    group, common = group_of(2), dist.distributed_c10d._get_default_store()

    def tap(call, act):
        answer = act()
        if call.key == "latest.json" and call.operation == "put":
            common.set("committed", "yes")
            time.sleep(0.5)  # so that the other one is gone
        return answer

    def wait_for_the_commit(store):
        store.get("committed")
        os._exit(3)

    def observe(event):
        if isinstance(event, UploadBegan) and dist.get_rank() == 1:
            threading.Thread(target=wait_for_the_commit, args=(common.clone(),), daemon=True).start()

    store = tapped(url, tap) if dist.get_rank() == 0 else url
    writer = sw.CkptStoreWriter(store, observer=observe, process_group=group)
    state = sharded(7)
    return outcome(lambda: sw.save(state, checkpoint_id="good", storage_writer=writer, process_group=group))


def test_a_save_that_lost_a_rank_after_its_commit_says_that_it_is_committed(gang, tmp_path):
    """I5: what is reported as not committed never appears."""
    root = str(tmp_path / "run")
    outcomes = gang.run(RANKS, exit_after_the_commit, root)
    assert outcomes[1].died
    survivors = [each.value[0] for rank, each in enumerate(outcomes) if rank != 1]
    latest = CheckpointStore.open(root).latest()
    error = same_error(survivors, DisagreementError, "Rank 1 of 3 was lost", f"committed before, in slot {latest.seq}")
    assert (error.facts["committed"], latest.checkpoint_id) == (latest.seq, "good")


def exit_in_load(url):
    whole = Fetcher.fill
    if dist.get_rank() == 1:
        Fetcher.fill = lambda *_, **__: os._exit(3)
    target, reader = blank(sharded(5)), sw.CkptStoreReader(url)
    try:
        return outcome(lambda: sw.load(target, storage_reader=reader))
    finally:
        Fetcher.fill = whole


def test_a_rank_that_exits_in_a_load_is_named_by_all_survivors(gang, tmp_path):
    root = str(tmp_path / "run")
    gang.values(RANKS, save, root, "before", 5)
    outcomes = gang.run(RANKS, exit_in_load, root)
    survivors = [each.value for rank, each in enumerate(outcomes) if rank != 1]
    error = same_error([error for error, _ in survivors], DisagreementError, "Rank 1 of 3 was lost", "mixture")
    assert error.facts["missing"] == [1]
    assert gang.values(RANKS, load, root, 5) == [True] * RANKS


HIDDEN = {
    "the newest record": (lambda call: call.key == "log/000000000002.json", DisagreementError, "seq 1"),
    "the whole run": (lambda call: call.key in ("run.json", "log/"), IntegrityError, "the log was lost"),
    "its shard": (lambda call: "/rank-00001" in call.key, IntegrityError, "rank-00001.safetensors is missing"),
}


def load_what_one_does_not_see(url, what, call):
    hidden = HIDDEN[what][0]

    def tap(call, act):
        if dist.get_rank() == 1 and hidden(call):
            if call.operation == "list":
                return []
            raise NotFoundError(f"{call.key} is not there.", key=call.key)
        answer = act()
        if call.operation == "list" and dist.get_rank() == 1 and what == "the newest record":
            return [info for info in answer if info.key != "log/000000000002.json"]
        return answer

    target, untouched = blank(sharded(6)), blank(sharded(6))
    reader = sw.CkptStoreReader(tapped(url, tap), agree_timeout_seconds=AGREE_SECONDS)
    error, seconds = outcome(lambda: LOADS[call](target, storage_reader=reader))
    tensors = same(target["model"], untouched["model"])
    dist.barrier()
    return error, seconds, tensors, load(url, 6)


@pytest.mark.parametrize("what", HIDDEN)
def test_a_rank_whose_view_of_the_store_is_another_stops_the_load_of_all_before_a_target_is_touched(gang, root, what):
    """I12."""
    _, kind, said = HIDDEN[what]
    for seed in (5, 6):
        gang.values(RANKS, save, root, f"step-{seed}", seed)
    for call in LOADS:
        heard = gang.values(RANKS, load_what_one_does_not_see, root, what, call)
        error = same_error([error for error, *_ in heard], kind, said)
        assert error.facts.get("rank") == 1 or error.facts["values"]["1"] != error.facts["values"]["0"]
        for _, seconds, untouched, works_after in heard:
            assert (seconds < AGREE_SECONDS + SLACK_SECONDS, untouched, works_after) == (True, True, True)


def load_damaged(url, call):
    target = blank(sharded(5))
    error, seconds = outcome(lambda: LOADS[call](target, storage_reader=sw.CkptStoreReader(url)))
    return error, seconds, dist.get_rank()


def test_damage_to_the_shard_of_one_rank_stops_all_and_rank_key_and_leaf_are_named(gang, root):
    """I13. The size stays the same, so that only the hash of a leaf can tell."""
    gang.values(RANKS, save, root, "before", 5)
    store, (key,) = open_store(root), [key for key in shards_under(root) if "rank-00001" in key]
    body = body_of(store, key)
    store.put(key, body[:1000] + bytes([body[1000] ^ 1]) + body[1001:])
    for call in LOADS:
        heard = gang.values(RANKS, load_damaged, root, call)
        error = same_error([error for error, *_ in heard], IntegrityError, "Rank 1", key, "leaf")
        assert (error.facts["rank"], max(seconds for _, seconds, _ in heard) < SLACK_SECONDS) == (1, True)
    store.put(key, body)
    assert gang.values(RANKS, load, root, 5) == [True] * RANKS


def save_at_other_steps(url, call):
    writer = sw.CkptStoreWriter(url, agree_timeout_seconds=AGREE_SECONDS)
    writer.describe(global_step=10 + dist.get_rank())
    name = f"step-{10 + dist.get_rank()}"
    error, seconds = outcome(lambda: SAVES[call](sharded(5), checkpoint_id=name, storage_writer=writer))
    dist.barrier()
    found = sorted(contents(url))
    dist.barrier()
    return error, seconds, found


def test_ranks_at_different_steps_all_hear_every_step_before_the_first_byte(gang, root):
    for call in SAVES:
        heard = gang.values(2, save_at_other_steps, root, call)
        error = same_error([error for error, *_ in heard], DisagreementError, "step-10", "step-11")
        assert error.facts["values"] == {"0": "step-10", "1": "step-11"}
        for _, seconds, found in heard:
            assert seconds < AGREE_SECONDS + SLACK_SECONDS
            assert found == ["run.json"]
    gang.values(2, save, root, "after", 9)
    assert gang.values(2, load, root, 9) == [True, True]


def save_on_rank_0_only(url, call):
    error, seconds = None, 0.0
    if dist.get_rank() == 0:
        writer = sw.CkptStoreWriter(url, agree_timeout_seconds=AGREE_SECONDS)
        error, seconds = outcome(lambda: SAVES[call](sharded_alone(), checkpoint_id="a", storage_writer=writer))
    dist.barrier()
    return error, seconds


def sharded_alone():
    return {"model": {"w": torch.arange(5.0)}}


def test_a_lone_call_ends_in_time_and_says_who_is_missing(gang, root):
    for call in SAVES:
        (error, seconds), (nothing, _) = gang.values(2, save_on_rank_0_only, root, call)
        checked(error, DisagreementError, "Rank 1 of 2 did not come")
        assert (error.facts["missing"], seconds < AGREE_SECONDS + SLACK_SECONDS, nothing) == ([1], True, None)
    assert set(contents(root)) == {"run.json"}
    gang.values(2, save, root, "after", 9)
    assert gang.values(2, load, root, 9) == [True, True]


def save_in_groups_of_different_sizes(url):
    small = dist.new_group([1, 2])
    group = None if dist.get_rank() == 0 else small
    writer = sw.CkptStoreWriter(
        f"{url}/{dist.get_rank() > 0}", agree_timeout_seconds=AGREE_SECONDS, process_group=group
    )
    error = raised(lambda: sw.save(sharded_alone(), checkpoint_id="a", storage_writer=writer, process_group=group))
    return error and sw.cause(error)


def test_a_rank_that_believes_in_a_larger_world_than_the_others_is_told_who_is_missing(gang, tmp_path):
    error, *others = gang.values(3, save_in_groups_of_different_sizes, str(tmp_path))
    checked(error, DisagreementError, "Rank 1, 2 of 3 did not come")
    assert others == [None, None]
    assert CheckpointStore.open(tmp_path / "True").latest().saved_world_size == 2
    assert CheckpointStore.open(tmp_path / "False").latest() is None


@pytest.mark.parametrize(
    ("root", "said"),
    [("file", said) for said in ("2", "many", "0", "-1", "9" * 5000)]
    + [pytest.param("s3", "2", marks=pytest.mark.servers)],
    indirect=["root"],
    ids=lambda each: each[:5],
)
def test_a_launcher_of_many_without_a_process_group_is_refused_before_the_run_exists(root, monkeypatch, said):
    monkeypatch.setenv("WORLD_SIZE", said)
    for call in SAVES:
        writer = sw.CkptStoreWriter(root)
        work = lambda call=call, writer=writer: SAVES[call](sharded_alone(), checkpoint_id="a", storage_writer=writer)  # noqa: E731
        error = told(work, InvalidInputError, "processes", seconds=5)
        assert "allow_one_rank" in error.hint
    assert contents(root) == {}
    sw.save(sharded_alone(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(root, allow_one_rank=True))
