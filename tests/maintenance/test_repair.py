"""Repair: hints from the log, objects from a replica, a log from copies; killed anywhere, nothing is worse."""

from __future__ import annotations

import itertools
import json

import pytest
from places import on
from scrubbed import (
    Run,
    body_of,
    contents,
    copy_of,
    flip,
    forget_log,
    is_whole,
    opened,
)

from ckptstore.errors import ConflictError, IntegrityError, InvalidInputError, NotFoundError
from ckptstore.format.layout import LATEST_KEY, slot_key, state_key
from ckptstore.format.records import ABANDONED, Claim, Envelope, Retire, SetAside, encode_record
from ckptstore.maintenance import rebuild
from ckptstore.maintenance.collect import retire, retire_by
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.maintenance.retention import Keep
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing.crash import DyingStore, Killed
from ckptstore.testing.simulated import CountedIds, ManualClock

LANDS = pytest.mark.parametrize("lands", [False, True], ids=["lost", "landed"])


@pytest.fixture
def run():
    return Run(MemoryStore(clock=ManualClock()))


def replica_of(store):
    return copy_of(store, MemoryStore(clock=ManualClock()))


def damaged(run, committed):
    """Damage a shard, lose one, and damage the part and the documents; return their keys."""
    stem = committed.commit.stem
    flip(run.store, stem.shard_key(0), 400)
    run.store.delete(stem.shard_key(2))
    flip(run.store, committed.commit.parts[0].path, 40)
    run.store.delete(committed.commit.documents.path)
    return {
        stem.shard_key(0),
        stem.shard_key(2),
        committed.commit.parts[0].path,
        committed.commit.documents.path,
    }


# --- objects from a replica ---


@on("memory", "files", "obstore-seaweedfs")
def test_what_is_damaged_or_missing_comes_back_from_a_replica_bit_by_bit(place):
    """I4, I6."""
    run = Run(place.probed().store())
    committed = run.save(1)
    before, replica = contents(run.store, "data/"), replica_of(run.store)
    keys = damaged(run, committed)
    mends, verdict = run.repair().mend(committed, replica)
    assert verdict.passed is all(each.outcome == "mended" for each in mends)
    assert {(each.key, each.outcome) for each in mends} == {(key, "mended") for key in keys}
    assert contents(run.store, "data/") == before
    assert is_whole(run.store, committed, 1)
    assert run.repair().mend(committed, replica)[0] == []


def test_what_would_be_mended_is_shown_and_nothing_is_changed(run):
    committed = run.save(1)
    replica = replica_of(run.store)
    stem = committed.commit.stem
    flip(run.store, stem.shard_key(0), 400)
    run.store.delete(stem.shard_key(2))
    before = contents(run.store)
    work = run.repair()
    mends = [*work.mends(committed, work.verdict(committed), replica)]
    assert {(each.key, each.outcome) for each in mends} == {
        (stem.shard_key(0), "can be mended"),
        (stem.shard_key(2), "can be mended"),
    }
    assert contents(run.store) == before


def test_a_replica_with_other_bytes_mends_nothing(run):
    """I6: what is stored is what our own records name, whatever the replica says of itself."""
    committed = run.save(1)
    replica = replica_of(run.store)
    key = committed.commit.stem.shard_key(0)
    flip(run.store, key, 400)
    flip(replica, key, 410)
    run.store.delete(committed.commit.documents.path)
    flip(replica, committed.commit.documents.path, 20)
    before = contents(run.store)
    mends, verdict = run.repair().mend(committed, replica)
    assert verdict.passed is all(each.outcome == "mended" for each in mends)
    assert [each.outcome for each in mends] == ["cannot be mended"] * 2
    assert all("replica" in each.reason for each in mends)
    assert contents(run.store) == before


@pytest.mark.parametrize(
    "read", [4, 5, 6, 7]
)  # header, leaf table, header again, leaves: after as many that were right
def test_a_replica_that_changes_between_two_looks_stores_nothing(run, read):
    """I6."""
    committed = run.save(1)
    replica = replica_of(run.store)
    key = committed.commit.stem.shard_key(0)
    flip(run.store, key, 400)
    before = contents(run.store)

    class Changing(ForwardingStore):
        reads = 0

        def get_range(self, key, *, start, length):
            self.reads += 1
            body = bytearray(super().get_range(key, start=start, length=length))
            if self.reads == read:
                body[-1] ^= 1
            return bytes(body)

    changing = Changing(replica)
    ((mend,), _) = run.repair().mend(committed, changing)
    assert (mend.outcome, changing.reads) == ("cannot be mended", read)
    assert contents(run.store) == before


def test_an_object_that_is_whole_is_never_written(run):
    committed = run.save(1)
    replica = replica_of(run.store)
    damaged(run, committed)
    written = []

    class Noting(ForwardingStore):
        def put(self, key, body, **more):
            written.append(key)
            return super().put(key, body, **more)

        def open_upload(self, key, *, size):
            written.append(key)
            return super().open_upload(key, size=size)

    keys = {each.key for each in run.repair(store=Noting(run.store)).mend(committed, replica)[0]}
    assert sorted(written) == sorted(keys)


def test_where_a_failed_upload_may_lose_what_stands_there_nothing_is_replaced(run):
    committed = run.save(1)
    replica = replica_of(run.store)
    stem = committed.commit.stem
    flip(run.store, stem.shard_key(0), 400)
    run.store.delete(stem.shard_key(1))

    class Clearing(ForwardingStore):
        engine = "fsspec"

    mends = {each.key: each for each in run.repair(store=Clearing(run.store)).mend(committed, replica)[0]}
    assert mends[stem.shard_key(1)].outcome == "mended"
    assert mends[stem.shard_key(0)].outcome == "cannot be mended"
    assert "fsspec" in mends[stem.shard_key(0)].reason


def test_a_checkpoint_that_is_retired_meanwhile_is_not_mended(run):
    committed = run.save(1)
    for step in (2, 3):
        run.save(step)
    replica = replica_of(run.store)
    work = run.repair()
    run.store.delete(committed.commit.stem.shard_key(0))
    shown = [*work.mends(committed, work.verdict(committed), replica)]
    run.log.append(lambda _: Retire((committed.seq,), "old"))
    with pytest.raises(NotFoundError):
        work._mended(committed, shown[0], replica)
    assert work.mend(committed, replica)[0] == []


@LANDS
def test_killed_at_any_call_of_a_mending_nothing_is_worse_and_it_can_be_done_again(lands):
    """I4, I6, I11: each object is as it was, or right; and none that was right is touched."""
    base = Run(MemoryStore(clock=ManualClock()))
    committed = base.save(1)
    right, replica = contents(base.store), replica_of(base.store)
    damaged(base, committed)
    hurt = contents(base.store)
    for calls in itertools.count():
        store = MemoryStore(clock=ManualClock())
        for key, body in hurt.items():
            store.put(key, body)
        base.store = store
        dying = DyingStore(store, after_calls=calls, last_call_lands=lands)
        try:
            base.repair(store=dying).mend(committed, replica)
        except Killed:
            now = contents(store)
            assert {key for key in right if now.get(key) not in (right[key], hurt.get(key))} == set()
            assert {each.outcome for each in base.repair().mend(committed, replica)[0]} <= {"mended"}
            assert contents(store, "data/") == {key: body for key, body in right.items() if key.startswith("data/")}
        else:
            break
    assert calls > 20


# --- restoring ---


def test_what_was_quarantined_alone_may_be_restored_and_what_the_run_went_back_from_may_not(run):
    first, second, third = (run.save(step) for step in (1, 2, 3))
    run.catalog.set_aside([second.seq], reason="quarantined", note="x")
    run.catalog.rollback(first.seq)  # third is abandoned
    run.catalog.set_aside([third.seq], reason="quarantined", note="y")
    work = run.repair()
    assert [work.may_be_restored(each) for each in (first, second, third)] == [False, True, False]
    run.catalog.restore([third.seq])
    run.catalog.set_aside([third.seq], reason="quarantined", note="z")
    assert work.may_be_restored(third)
    assert work.restore(second) is True
    assert run.catalog.find(seq=second.seq).set_aside is None


def test_a_record_that_did_not_count_at_its_slot_does_not_say_that_the_run_went_back(run):
    first, second = run.save(1), run.save(2)
    fold = run.log.fold
    envelope = Envelope(1, fold.run, fold.end, "f" * 32, "2027-01-01T00:00:00.000Z", fold.last)
    record = SetAside((first.seq, 999), ABANDONED, "")
    run.store.put(slot_key(fold.end), encode_record(record, envelope))
    run.catalog.set_aside([first.seq], reason="quarantined", note="x")
    assert [each.seq for each in run.log.fold.ignored] == [second.seq + 1]
    assert run.repair().may_be_restored(first)


def test_a_checkpoint_that_is_whole_is_read_once(run):
    committed = run.save(1)
    reads = []

    class Reading(ForwardingStore):
        def get_range(self, key, **more):
            reads.append((key, *more.values()))
            return super().get_range(key, **more)

    mends, verdict = run.repair(store=Reading(run.store)).mend(committed, replica_of(run.store))
    assert (mends, verdict.passed) == ([], True)
    assert len(reads) == len(set(reads)) >= 6


# --- hints ---


def test_hints_that_are_missing_or_stale_are_made_again_as_the_log_says(run):
    """I10."""
    for step in range(1, 68):  # a snapshot stands at slot 64
        run.save(step)
    right = contents(run.store)
    copies = [key for key in right if key.endswith("COMMITTED")]
    assert run.repair().stale_hints() == []
    run.store.delete(LATEST_KEY)
    run.store.put(state_key(64), b"nonsense")
    run.store.delete(copies[0])
    flip(run.store, copies[1], 100)
    work = run.repair()
    stale = work.stale_hints()
    assert {(each.key, each.why) for each in stale} == {
        (LATEST_KEY, "missing"),
        (state_key(64), "stale"),
        (copies[0], "missing"),
        (copies[1], "stale"),
    }
    work.write_hints(stale)
    assert contents(run.store) == right


def test_the_witness_of_a_lost_tail_is_left_as_it_is(run):
    for step in (1, 2, 3):
        run.save(step)
    hint = body_of(run.store, LATEST_KEY)
    run.store.delete("log/000000000003.json")
    work = run.repair()
    assert LATEST_KEY not in {each.key for each in work.stale_hints()}
    work.write_hints(work.stale_hints())
    assert body_of(run.store, LATEST_KEY) == hint


def test_an_older_latest_and_nonsense_in_its_place_are_stale(run):
    run.save(1)
    old = body_of(run.store, LATEST_KEY)
    run.save(2)
    for body in (old, b"", b"{}", b"x" * 100_000):
        run.store.put(LATEST_KEY, body)
        work = run.repair()
        assert [(each.key, each.why) for each in work.stale_hints()] == [(LATEST_KEY, "stale")]


# --- a log from copies ---


@on("memory", "files", "obstore-seaweedfs")
def test_a_log_that_was_lost_comes_back_with_every_checkpoint_bit_by_bit(place):
    """I3, I4, I11."""
    run = Run(place.probed().store())
    saved = [run.save(step) for step in (1, 2)]
    later = Run(run.store, digit="c", clock=run.clock)
    saved += [later.save(step) for step in (3, 4)]
    forget_log(run.store)
    work = run.repair()
    plan = work.rebuilding()
    assert [each.committed.commit.checkpoint_id for each in plan.found] == ["step-1", "step-2", "step-3", "step-4"]
    assert plan.left_out == ()
    assert sorted(work.rebuild_log(plan)) == sorted(each.commit.prefix for each in saved)
    catalog = opened(place.store())
    assert catalog.log.lost_from is None
    assert catalog.log.run == run.log.run
    found = catalog.checkpoints()
    assert [each.commit.global_step for each in found] == [1, 2, 3, 4]
    assert [each.written_at for each in found] == [each.written_at for each in saved]
    assert [each.commit.term for each in found] == [1, 1, 2, 2]
    assert [each.commit.parent and catalog.find(seq=each.commit.parent).commit.global_step for each in found] == [
        None,
        1,
        None,
        3,
    ]
    for each in found:
        assert is_whole(run.store, each, each.commit.global_step)
    assert run.repair().stale_hints() == []
    after = Run(run.store, digit="d", clock=run.clock)
    after.save(5)
    assert opened(place.store()).latest().commit.global_step == 5


def test_a_log_is_never_rebuilt_over_records(run):
    run.save(1)
    for keep in ("log/000000000000.json", "log/000000000001.json", "log/of another tool"):
        store = replica_of(run.store)
        for info in list(store.list("log/")):
            if info.key != keep:
                store.delete(info.key)
        if "tool" in keep:
            store.put(keep, b"x")
        before = contents(store)
        with pytest.raises((InvalidInputError, IntegrityError)):  # a hole is damage, and is told so
            Run.repair(run, store=store).rebuilding()
        assert contents(store) == before
    with pytest.raises(InvalidInputError):
        run.repair().rebuilding()


def test_what_is_damaged_or_has_no_whole_copy_is_left_out_and_named(run):
    saved = [run.save(step) for step in (1, 2, 3, 4)]
    flip(run.store, saved[1].commit.stem.shard_key(0), 400)
    flip(run.store, saved[2].commit.stem.committed_key, 100)
    forget_log(run.store)
    plan = run.repair().rebuilding()
    assert [each.committed.commit.global_step for each in plan.found] == [1, 4]
    assert {each.key for each in plan.left_out} == {each.commit.stem.committed_key for each in saved[1:3]}
    run.repair().rebuild_log(plan)
    found = opened(run.store).checkpoints()
    assert [(each.commit.global_step, each.commit.parent) for each in found] == [(1, None), (4, None)]


def test_what_was_retired_does_not_come_back_and_what_was_abandoned_does(run):
    saved = [run.save(step) for step in range(1, 7)]
    run.catalog.rollback(saved[4].seq)  # the last is abandoned
    assert retire(run.log, [saved[0].seq], reason="old") == [saved[0].seq]
    assert retire_by(run.log, Keep(last=3)) == [saved[1].seq]
    forget_log(run.store)
    plan = run.repair().rebuilding()
    assert plan.left_out == ()
    run.repair().rebuild_log(plan)
    assert [each.commit.global_step for each in opened(run.store).checkpoints()] == [3, 4, 5, 6]


def test_what_was_left_out_waits_until_its_copy_is_deleted_by_hand(run):
    saved = [run.save(step) for step in (1, 2, 3)]
    stem = saved[0].commit.stem
    flip(run.store, stem.shard_key(0), 400)
    forget_log(run.store)
    work = run.repair()
    work.rebuild_log(work.rebuilding())
    log = RunLog.create(run.store, clock=ManualClock(), ids=CountedIds("e"))
    claim(log, Incarnation("e" * 32, job="job", host="host"))
    waiting = plan_collection(log, grace_seconds=0)
    assert (waiting.delete, [each.prefix for each in waiting.waiting]) == ((), [str(stem)])
    run.store.delete(stem.committed_key)
    planned = plan_collection(log, grace_seconds=0)
    assert {each.key for each in planned.delete} == {key for key in contents(run.store, "data/") if str(stem) in key}


def test_the_run_keeps_its_identity_though_its_file_is_lost_too(run):
    run.save(1)
    forget_log(run.store)
    run.store.delete("run.json")
    work = run.repair()
    work.rebuild_log(work.rebuilding())
    catalog = opened(run.store)
    assert catalog.log.run == run.log.run
    assert catalog.latest().commit.global_step == 1


def test_copies_of_two_runs_make_no_log(run):
    run.save(1)
    stranger = Run(MemoryStore(clock=ManualClock()), digit="e")
    stranger.save(2)
    forget_log(run.store)
    for key, body in contents(stranger.store, "data/").items():
        run.store.put(key, body)
    with pytest.raises(InvalidInputError):
        run.repair().rebuilding()
    assert list(run.store.list("log/")) == []


def test_a_job_that_claims_meanwhile_ends_it(run):
    """Of a release that did not look whether a log was lost."""
    for step in (1, 2):
        run.save(step)
    forget_log(run.store)
    work = run.repair()
    plan = work.rebuilding()
    job = RunLog.open(run.store, clock=ManualClock())
    job.append(lambda fold: Claim(fold.term + 1, "c" * 32, "gpt", "host"))
    with pytest.raises(InvalidInputError):
        work.rebuild_log(plan)
    with pytest.raises(ConflictError):
        rebuild.rebuild(RunLog.open(run.store, clock=ManualClock()), plan.run, plan.found)
    assert [entry.record.job for entry in job.records(end=job.refresh().end)] == ["gpt"]


@LANDS
def test_killed_at_any_call_of_a_rebuilding_it_goes_on_when_it_is_done_again(lands):
    """I2, I3, I11, I16."""
    base = Run(MemoryStore(clock=ManualClock()))
    for step in (1, 2):
        base.save(step)
    Run(base.store, digit="c", clock=base.clock).save(3)
    forget_log(base.store)
    hurt = contents(base.store)
    data = contents(base.store, "data/")
    ended, calls = False, 0
    while not ended:
        store = MemoryStore(clock=ManualClock())
        for key, body in hurt.items():
            store.put(key, body)
        base.store = store
        try:
            work = base.repair(store=DyingStore(store, after_calls=calls, last_call_lands=lands))
            work.rebuild_log(work.rebuilding())
            ended = True
        except Killed:
            calls += 1
            offered = [each.commit.global_step for each in opened(store).log.fold.selectable]
            assert offered == [1, 2, 3][: len(offered)]
            again = base.repair()
            again.rebuild_log(again.rebuilding())
        catalog = opened(store)
        assert [each.commit.global_step for each in catalog.checkpoints()] == [1, 2, 3]
        assert catalog.log.lost_from is None
        kinds = [json.loads(entry.body)["kind"] for entry in catalog.log.records()]
        assert kinds == ["CLAIM", "COMMIT", "COMMIT", "CLAIM", "COMMIT"]
        kept = contents(store, "data/")
        assert {key for key in data if not key.endswith("COMMITTED") and kept.get(key) != data[key]} == set()
    assert calls > 60
