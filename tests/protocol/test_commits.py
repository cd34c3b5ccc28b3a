"""The end of a save: verified before the record, decided by the record, whatever comes after it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from run_samples import Job, a_run, append_raw, body_of, carried, opened
from signing_samples import TRAINER, TRUSTED

from ckptstore.errors import (
    CommitUnknownError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SupersededError,
    UnavailableError,
)
from ckptstore.events import AttemptBegan, Committed, HintFailed
from ckptstore.format.codec import MAX_DIRECT_PARTS
from ckptstore.format.layout import slot_key, state_key
from ckptstore.format.records import Claim
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.protocol import coverage
from ckptstore.protocol.attempt import MAX_DESCRIPTION_BYTES, Description, begin
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_parts
from ckptstore.signing import Signing
from ckptstore.testing import simulated
from ckptstore.testing.faults import Fault, FaultyStore


def on_log(store):
    """Return the calls about the log."""
    return [call.operation for call in store.calls if call.key.startswith("log/")]


def begun(job, name="x", *, world_size=2):
    attempt = begin(job.log, job.incarnation, checkpoint_id=name, world_size=world_size)
    return attempt, [simulated.upload(job.store, attempt, rank) for rank in range(world_size)]


def test_a_save_by_an_up_to_date_writer_is_three_gets_and_one_put_on_the_log():
    store = FaultyStore(MemoryStore(), lambda _: None)
    job = Job(store)
    job.save("a")
    del store.calls[:]
    job.save("b")
    assert on_log(store) == ["get", "get", "get", "put"]


@pytest.mark.parametrize("gone", ["", "log/"], ids=["the run", "the log"])
def test_a_run_that_was_removed_between_two_saves_is_not_saved_to(gone):
    job = Job(MemoryStore())
    job.save("a")
    for info in list(job.store.list(gone)):
        job.store.delete(info.key)
    left = list(job.store.list(""))
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"is gone: .* was removed") as caught:
            begun(job)
        assert caught.value.facts["key"] == slot_key(1)
    assert list(job.store.list("")) == left


@pytest.mark.parametrize("now", ["gone", "another one"])
def test_a_log_that_was_removed_in_the_middle_of_a_save_is_not_committed_to(now):
    job = Job(MemoryStore())
    job.save("a")
    attempt, shards = begun(job)
    for info in list(job.store.list("log/")):
        job.store.delete(info.key)
    if now == "another one":
        job.store.put(slot_key(1), b"of a run that began since")
    left = list(job.store.list("log/"))
    for _ in range(2):
        with pytest.raises(IntegrityError, match=f"is {now}"):
            commit(job.log, job.incarnation, attempt, shards)
    assert list(job.store.list("log/")) == left


def test_a_run_that_was_removed_before_its_first_record_is_not_claimed():
    store = MemoryStore()
    log = RunLog.create(store)
    store.delete("run.json")
    with pytest.raises(IntegrityError, match=r"run\.json was read before and is gone"):
        log.append(lambda _: Claim(1, "0" * 32, "job", "host"))
    assert list(store.list("")) == []


def test_a_writer_that_was_overtaken_by_many_records_catches_up_by_reading():
    inner = MemoryStore()
    store = FaultyStore(inner, lambda _: None)
    job = Job(store)
    attempt, shards = begun(job)
    tool = opened(inner)
    for number in range(20):
        tool.log.append(lambda _, number=number: Claim(0, f"{number:032x}", "a faulty", "tool"))
    del store.calls[:]
    assert commit(job.log, job.incarnation, attempt, shards).seq == 21
    assert on_log(store).count("put") == 2


def test_what_was_described_stands_in_the_commit():
    job = Job(MemoryStore())
    said = Description(
        global_step=np.int64(7),
        parallelism={"dp": 8, "tp": np.int32(2)},
        training_state={"epoch": 1, "sampler": {"seed": [1, 2]}},
        metrics={"loss": math.nan, "best": -math.inf, "acc": np.float32(0.5), "n": 3},
        fingerprints={"data": "abc"},
        tags=["nightly", "ñ"],
    )
    attempt = begin(job.log, job.incarnation, checkpoint_id="a/b *?", world_size=1, description=said)
    shard = simulated.upload(job.store, attempt, 0)
    commit(job.log, job.incarnation, carried(attempt), [shard], planner={"flat": [1]}, software={"torch": "2.13"})
    catalog = opened(job.store)
    found = catalog.find("a/b *?")
    read = found.commit
    assert (read.global_step, read.parallelism, read.tags) == (7, {"dp": 8, "tp": 2}, ("nightly", "ñ"))
    assert read.training_state == {"epoch": 1, "sampler": {"seed": [1, 2]}}
    assert math.isnan(read.metrics["loss"])
    assert {**read.metrics, "loss": 0.0} == {"loss": 0.0, "best": -math.inf, "acc": 0.5, "n": 3.0}
    assert (read.fingerprints, read.software) == ({"data": "abc"}, {"torch": "2.13"})
    assert load_parts(job.store, found)[0].planner == {"flat": [1]}


def nested(depth):
    return {"x": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_step": -1},
        {"global_step": 2**63},
        {"global_step": 1.5},
        {"global_step": True},
        {"parallelism": {"dp": "8"}},
        {"metrics": {"loss": "low"}},
        {"metrics": {1: 1.0}},
        {"metrics": {"loss": 10**400}},
        {"metrics": ["loss"]},
        {"metrics": None},
        {"training_state": {"x": object()}},
        {"training_state": {"x": [{"y": {1, 2}}]}},
        {"training_state": {"x": 10**5000}},
        {"training_state": nested(33)},
        {"training_state": [1, 2]},
        {"training_state": {"x": {2: 3}}},
        {"training_state": {"x": "\ud800"}},
        {"fingerprints": {"x": 1}},
        {"tags": [1]},
        {"tags": 5},
        {"tags": ["x" * MAX_DESCRIPTION_BYTES]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_description_that_cannot_be_recorded_is_refused_at_once(wrong):
    with pytest.raises(InvalidInputError) as caught:
        Description(**wrong)
    assert next(iter(wrong)).removesuffix("s") in str(caught.value) or "size" in caught.value.facts  # it is named


def test_what_is_refused_deep_inside_is_named_with_its_path():
    with pytest.raises(InvalidInputError, match=r"training_state\['x'\]\[0\]\['y'\] is a set"):
        Description(training_state={"x": [{"y": {1, 2}}]})


def test_what_is_nested_as_deeply_as_is_allowed_is_saved_and_read_from_any_depth_of_calls():
    job = Job(MemoryStore())
    said = Description(training_state=nested(32))
    attempt = begin(job.log, job.incarnation, checkpoint_id="a", world_size=1, description=said)
    commit(job.log, job.incarnation, attempt, [simulated.upload(job.store, attempt, 0)])

    def from_depth(calls):
        return from_depth(calls - 1) if calls else opened(job.store).latest()

    assert from_depth(500).commit.training_state == nested(32)


@pytest.mark.parametrize("name", ["", "x" * 121, "ñ" * 30, "step@7", "\ud800", 7])
def test_a_name_that_cannot_be_recorded_is_refused_before_anything_is_written(name):
    job = Job(MemoryStore())
    with pytest.raises(InvalidInputError):
        begin(job.log, job.incarnation, checkpoint_id=name, world_size=1)
    assert [info.key for info in job.store.list("")] == ["run.json"]


@pytest.mark.parametrize(
    "name", ["step 1", "a/b", "*?[x]", "#1%20", "ñ", "..", ".", "CON", "a.t0001.a0001." + "0" * 32]
)
def test_any_other_name_is_saved_and_found(name):
    job = Job(MemoryStore())
    job.save(name, seed=3)
    catalog = opened(job.store)
    assert np.array_equal(simulated.load(catalog, catalog.find(name)), simulated.values(0, 3))


def test_the_largest_description_and_the_most_parts_fit_into_a_record():
    """More than 64 KiB would be refused before the first byte, here."""
    job = Job(MemoryStore())
    room = MAX_DESCRIPTION_BYTES - len(
        '{"fingerprints":{},"global_step":null,"metrics":{},"parallelism":{},"tags":[""],"training_state":{}}'
    )
    attempt = begin(
        job.log,
        job.incarnation,
        checkpoint_id="\x01" * 40,
        world_size=100_000,
        description=Description(tags=["x" * room]),
    )
    assert attempt.stem.attempt == 1


def test_what_would_not_fit_into_a_record_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr("ckptstore.format.records.MAX_RECORD_BYTES", 20_000)
    job = Job(MemoryStore())
    with pytest.raises(InvalidInputError):
        begin(job.log, job.incarnation, checkpoint_id="x" * 120, world_size=1)
    assert [info.key for info in job.store.list("")] == ["run.json"]


def test_more_parts_than_a_record_names_hang_under_a_root_part(monkeypatch):
    monkeypatch.setattr("ckptstore.format.codec.MAX_SHARDS", 1)
    monkeypatch.setattr("ckptstore.protocol.commit.MAX_DIRECT_PARTS", 3)
    job = Job(MemoryStore())
    committed = job.save("x", world_size=5, seed=2)
    assert [ref.is_root for ref in committed.commit.parts] == [True]
    assert committed.commit.parts[0].ranks == (0, 4)
    catalog = opened(job.store)
    assert len(load_parts(job.store, committed)) == 5
    assert catalog.verify(committed).ok
    assert np.array_equal(
        simulated.load(catalog, committed), np.concatenate([simulated.values(rank, 2) for rank in range(5)])
    )
    assert MAX_DIRECT_PARTS >= 100


def test_a_rank_with_nothing_to_write_has_no_object_and_an_empty_state_commits():
    job = Job(MemoryStore())
    attempt = begin(job.log, job.incarnation, checkpoint_id="x", world_size=3)
    committed = commit(job.log, job.incarnation, attempt, [], planner={"flat": []})
    catalog = opened(job.store)
    assert committed.commit.shards.count == 0
    assert [part.planner for part in load_parts(job.store, committed)] == [{"flat": []}]
    assert catalog.verify(committed).ok


@pytest.mark.parametrize("harm", ["missing", "shorter", "rewritten"])
def test_a_shard_that_is_not_as_it_was_written_is_not_committed(harm):
    """I4: found by the listing before the record, not by a reader after it."""
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    key = shards[1].shard.path
    body = body_of(job.store, key)
    job.store.delete(key)
    if harm != "missing":
        job.store.put(key, body[:-1] if harm == "shorter" else bytes(len(body)))
    with pytest.raises(IntegrityError) as caught:
        commit(job.log, job.incarnation, attempt, shards)
    assert caught.value.facts["key"] == key
    assert opened(job.store).latest() is None


def test_a_shard_that_the_listing_shows_late_is_looked_for_by_name():
    inner = MemoryStore()
    hidden = []

    class Late(MemoryStore):
        def list(self, prefix, *, after=None):
            infos = list(inner.list(prefix, after=after))
            return iter([info for info in infos if info.key not in hidden])

    store = Late()
    store._objects = inner._objects
    job = Job(store)
    attempt, shards = begun(job)
    hidden.append(shards[0].shard.path)
    assert commit(job.log, job.incarnation, attempt, shards).seq == 1


def test_receipts_that_are_not_this_attempts_are_refused():
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    other, _ = begun(job, "y")
    stranger = Job(MemoryStore())
    stranger.save("z")
    for log, of, given in [
        (job.log, other, shards),
        (job.log, attempt, [shards[0], shards[0]]),
        (job.log, replace(attempt, world_size=1), shards),
        (stranger.log, attempt, shards),
    ]:
        with pytest.raises(InvalidInputError):
            commit(log, job.incarnation, of, given)
    assert opened(job.store).latest() is None


def tiled(shape, *boxes, dtype="float32"):
    """Return shards, one a rank, with these boxes of a tensor."""
    tensor = TensorMeta("w", dtype, shape)
    shards = []
    for rank, (offsets, lengths) in enumerate(boxes):
        chunk = Chunk(tensor, offsets, lengths, math.prod(lengths) * 4)
        shard = simulated.StoredShard(None, (simulated.StoredItem(chunk, 0, 65536, 0),))
        shards.append(replace(shard, shard=_Rank(rank)))
    return shards


class _Rank:
    def __init__(self, rank):
        self.rank = rank


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((4,), [((0,), (1,)), ((1,), (3,))]),
        ((4,), [((0,), (4,)), ((4,), (0,))]),
        ((0, 3), [((0, 0), (0, 3))] * 2),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
    ],
)
def test_chunks_that_tile_a_tensor_are_complete(shape, boxes):
    coverage.covers(tiled(shape, *boxes))


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())] * 2),
        ((4,), [((0,), (1,)), ((2,), (2,))]),
        ((4,), [((0,), (2,)), ((1,), (2,))]),
        ((4,), [((0,), (5,))]),
        ((4,), [((0,), (4,)), ((0,), (4,))]),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]),
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))]),
        ((2, 2), [((0,), (2,))]),
    ],
)
def test_chunks_that_do_not_tile_a_tensor_are_refused_and_it_is_named(shape, boxes):
    with pytest.raises(IntegrityError) as caught:
        coverage.covers(tiled(shape, *boxes))
    assert caught.value.facts["tensor"] == "w"


def test_one_name_with_two_shapes_is_refused():
    with pytest.raises(IntegrityError):
        coverage.covers(tiled((2,), ((0,), (2,))) + tiled((3,), ((0,), (3,))))


def test_a_save_that_misses_a_chunk_commits_nothing():
    job = Job(MemoryStore())
    attempt, shards = begun(job)
    with pytest.raises(IntegrityError):
        commit(job.log, job.incarnation, attempt, shards[:1])
    assert opened(job.store).latest() is None


def silent_after_put(plan_of_first):
    """Return a plan: from the commit's put on, the log does not answer until `plan_of_first` is cleared."""
    puts = []

    def plan(call):
        if call.key != slot_key(2) or not plan_of_first:
            return None
        if call.operation == "put":
            puts.append(call)
            return plan_of_first[0]
        return Fault.REFUSED if puts else None

    return plan


@pytest.mark.parametrize("landed", [True, False])
def test_after_an_unknown_outcome_the_next_save_finds_out(landed):
    """I5, I7: nothing was deleted; if it landed it is the next one's parent."""
    how = []
    inner = MemoryStore()
    job = Job(FaultyStore(inner, silent_after_put(how)), options=LogOptions(deadline_seconds=5))
    job.save("a", seed=1)
    how.append(Fault.LOST_REPLY if landed else Fault.UNSENT)
    objects = len(list(inner.list("data/")))
    with pytest.raises(CommitUnknownError) as caught:
        job.save("b", seed=2)
    assert caught.value.facts == {"key": slot_key(2), "kind": "COMMIT"}
    assert len(list(inner.list("data/"))) > objects
    how.clear()
    committed = job.save("c", seed=3)
    assert (committed.seq, committed.commit.parent) == ((3, 2) if landed else (2, 1))
    assert [each.commit.checkpoint_id for each in opened(inner).checkpoints()] == (
        ["a", "b", "c"] if landed else ["a", "c"]
    )


@pytest.mark.parametrize("landed", [True, False])
def test_an_attempt_of_unknown_outcome_may_be_committed_again(landed):
    """I16: it is committed once."""
    how = []
    store = FaultyStore(MemoryStore(), silent_after_put(how))
    job = Job(store, options=LogOptions(deadline_seconds=5))
    job.save("a")
    attempt, shards = begun(job, "b")
    how.append(Fault.LOST_REPLY if landed else Fault.LATE)
    with pytest.raises(CommitUnknownError):
        commit(job.log, job.incarnation, attempt, shards)
    how.clear()
    assert commit(job.log, job.incarnation, attempt, shards).seq == 2
    assert body_of(store, attempt.stem.committed_key) == body_of(store, slot_key(2))
    store.deliver()
    assert commit(job.log, job.incarnation, attempt, shards).seq == 2
    assert len(opened(store).checkpoints()) == 2


def in_doubt(*, signing=None):
    """Return a job, its store, an attempt whose commit is under way and nobody knows of it, and what ends the silence.

    The attempt's name is `b`; `a` is committed.
    """
    how = []
    store = FaultyStore(MemoryStore(), silent_after_put(how))
    job = Job(store, options=LogOptions(deadline_seconds=5, signing=signing))
    job.save("a")
    attempt, shards = begun(job, "b")
    how.append(Fault.LATE)
    with pytest.raises(CommitUnknownError):
        commit(job.log, job.incarnation, attempt, shards)
    return job, store, (attempt, shards), how.clear


@pytest.mark.parametrize("refusal", [Fault.REFUSED, Fault.DENIED])
def test_an_attempt_of_unknown_outcome_that_is_refused_when_it_is_committed_again_stays_unknown(refusal):
    """I5: the first request may still land."""
    job, store, (attempt, shards), _ = in_doubt()
    refused = FaultyStore(store.inner, lambda call: refusal if call.creates and call.key.startswith("log/") else None)
    job.log.store, incarnation = refused, carried(job.incarnation)
    with pytest.raises(CommitUnknownError, match="may still land") as caught:
        commit(job.log, incarnation, attempt, shards)
    assert caught.value.facts == {"prefix": str(attempt.stem)}
    store.deliver()
    assert commit(job.log, incarnation, attempt, shards).seq == 2


def test_an_attempt_of_unknown_outcome_that_was_collected_since_is_superseded():
    """I7: its data are gone, and the log says why."""
    job, store, (attempt, shards), answer = in_doubt()
    answer()
    job.save("c")
    for info in list(store.inner.list("data/")):
        if str(attempt.stem) in info.key:
            store.inner.delete(info.key)
    with pytest.raises(SupersededError):
        commit(job.log, job.incarnation, attempt, shards)
    assert [each.commit.checkpoint_id for each in opened(store).checkpoints()] == ["a", "c"]


def test_a_forged_claim_does_not_decide_an_attempt_of_unknown_outcome_where_signatures_are_required():
    job, store, (attempt, shards), answer = in_doubt(signing=Signing(key=TRAINER, trusted=TRUSTED))
    answer()
    append_raw(store.inner, kind="CLAIM", term=9, incarnation="f" * 32, job="stranger", host="h")
    with pytest.raises(CommitUnknownError, match="is not signed"):
        commit(job.log, job.incarnation, attempt, shards)
    assert not job.incarnation.fenced


def test_an_attempt_below_a_committed_one_is_superseded():
    """I7: a collector may have taken it for an orphan since."""
    job = Job(MemoryStore())
    attempt, shards = begun(job, "b")
    job.save("c")
    with pytest.raises(SupersededError):
        commit(job.log, job.incarnation, attempt, shards)
    assert [each.commit.checkpoint_id for each in opened(job.store).checkpoints()] == ["c"]


def test_a_commit_that_landed_before_the_fence_is_reported_as_committed():
    """I5: the fence came after it."""
    how = []
    inner = MemoryStore()
    job = Job(FaultyStore(inner, silent_after_put(how)), options=LogOptions(deadline_seconds=5))
    job.save("a")
    attempt, shards = begun(job, "b")
    how.append(Fault.LOST_REPLY)
    with pytest.raises(CommitUnknownError):
        commit(job.log, job.incarnation, attempt, shards)
    how.clear()
    Job(inner, job="other").save("c")
    with pytest.raises(Exception, match="Term 2"):
        job.save("d")
    assert commit(job.log, job.incarnation, attempt, shards).seq == 2


def test_a_part_that_cannot_be_stored_fails_the_save_and_nothing_is_committed():
    def plan(call):
        return Fault.UNSENT if "part-" in call.key and call.operation in ("put", "get") else None

    inner = MemoryStore()
    job = Job(FaultyStore(inner, plan), options=LogOptions(deadline_seconds=5))
    with pytest.raises(UnavailableError):
        job.save("a")
    assert opened(inner).latest() is None


def test_no_hint_and_no_observer_can_fail_a_commit():
    """I10."""
    events = []

    def observe(event):
        events.append(event)
        raise RuntimeError("an observer's bug")

    def plan(call):
        return Fault.DENIED if call.key == "latest.json" or call.key.endswith("COMMITTED") else None

    job = Job(FaultyStore(MemoryStore(), plan), observer=observe)
    committed = job.save("a", step=3)
    kinds = [type(event) for event in events]
    assert kinds.count(HintFailed) == 2
    assert kinds.count(AttemptBegan) == kinds.count(Committed) == 1
    assert opened(job.store).latest() == committed


def test_a_state_is_written_at_every_64th_slot():
    store, job = a_run(saves=64)
    assert [info.key for info in store.list("state/")] == [state_key(64)]
    assert body_of(store, slot_key(64)).count(b'"fold":"') == 1
    assert job.log.fold.end == 65


def test_a_log_that_was_opened_for_reading_begins_no_run():
    store = MemoryStore()
    log = RunLog.open(store)
    job = Job(MemoryStore())
    with pytest.raises(NotFoundError):
        begin(log, job.incarnation, checkpoint_id="x", world_size=1)
    assert list(store.list("")) == []


def test_two_writers_that_begin_a_run_at_once_share_it():
    store = MemoryStore()
    first, second = RunLog.open(store), RunLog.open(store)
    first.begin_run()
    second.begin_run()
    assert first.run == second.run is not None


def test_many_receipts_stay_in_order_of_their_ranks():
    job = Job(MemoryStore())
    attempt, shards = begun(job, world_size=20)
    committed = commit(job.log, job.incarnation, attempt, list(reversed(shards)))
    ranks = [each.shard.rank for part in load_parts(job.store, committed) for each in part.shards]
    assert ranks == list(range(20))
    assert all(isinstance(each, StoredShard) for each in shards)
