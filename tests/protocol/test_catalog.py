"""Looking up, pinning, setting aside, going back, verifying."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from blake3 import blake3
from run_samples import Job, a_run, append_raw, body_of, opened, sealed

from ckptstore.errors import (
    CommitUnknownError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ResumeError,
    UncommittedError,
    UnsupportedError,
)
from ckptstore.format.codec import encode_part
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.catalog import Uncommitted
from ckptstore.protocol.fold import Pinned
from ckptstore.protocol.parts import load_parts
from ckptstore.testing import simulated
from ckptstore.testing.crash import DyingStore, Killed
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.reference import without_hints
from ckptstore.testing.tapped import TappedStore


def names(committed):
    return [each.commit.checkpoint_id for each in committed]


def test_the_latest_is_the_highest_seq_whatever_its_step():
    """I11."""
    store, job = a_run(saves=2)
    job.save("again", step=1)
    assert opened(store).latest().commit.checkpoint_id == "again"


def test_readers_with_and_without_hints_are_given_one_identity():
    """I12: what the ranks of a load compare."""
    store, _ = a_run(saves=70)
    bare = without_hints(store)
    assert {(each.seq, each.blake3) for each in (opened(store).latest(), opened(bare).latest())} == {
        (70, blake3(body_of(store, slot_key(70))).hexdigest())
    }


def test_a_name_and_a_step_may_repeat_and_mean_the_newest():
    store, job = a_run(saves=1)
    job.save("step-1", step=1)
    catalog = opened(store)
    assert catalog.find("step-1").seq == catalog.find(step=1).seq == 2
    assert catalog.find("step-1@1").seq == catalog.find(seq=1).seq == 1


@pytest.mark.parametrize(
    "question", [{"checkpoint_id": "step-1@2"}, {"checkpoint_id": "step-1@99"}, {"seq": 0}, {"seq": 99}, {"step": 77}]
)
def test_what_is_not_there_is_not_found(question):
    store, _ = a_run()
    with pytest.raises(NotFoundError):
        opened(store).find(**question)


def test_a_name_that_is_not_there_lists_those_near_it():
    store, _ = a_run()
    with pytest.raises(NotFoundError, match="step-2") as caught:
        opened(store).find("stp-2")
    assert "ckptstore ls" in caught.value.hint


@pytest.mark.parametrize("question", [{}, {"checkpoint_id": "x", "step": 1}, {"step": 1, "seq": 1}])
def test_exactly_one_question_is_asked(question):
    store, _ = a_run()
    with pytest.raises(InvalidInputError):
        opened(store).find(**question)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_name_with_nothing_but_uncommitted_attempts_says_so(rank):
    """I11: data without a commit are never loaded, in whichever lane they lie."""
    store, job = a_run(saves=1)
    attempt = begin(job.log, job.incarnation, checkpoint_id="step-9", world_size=8)
    simulated.upload(store, attempt, rank)
    with pytest.raises(UncommittedError) as caught:
        opened(store).find("step-9")
    assert str(attempt.stem) in caught.value.facts["attempts"][0]
    with pytest.raises(NotFoundError):
        opened(store).find("step-")


def test_attempts_without_a_commit_are_in_progress_or_dead():
    """I7."""
    store, job = a_run(saves=1)
    older = begin(job.log, job.incarnation, checkpoint_id="old", world_size=1)
    simulated.upload(store, older, 0)
    job.save("step-2")
    newer = begin(job.log, job.incarnation, checkpoint_id="new", world_size=2)
    size = sum(simulated.upload(store, newer, rank).shard.size for rank in range(2))
    found = opened(store).in_progress()
    assert [(each.stem, each.state) for each in found] == [(older.stem, "dead"), (newer.stem, "in progress")]
    assert found[1] == Uncommitted(newer.stem, "in progress", 2, size, found[1].modified)
    Job(store, job="other").save("step-3")
    assert {each.state for each in opened(store).in_progress()} == {"dead"}


def test_none_is_answered_only_if_nothing_was_ever_committed():
    job = Job(MemoryStore())
    assert opened(job.store).latest() is None
    begin(job.log, job.incarnation, checkpoint_id="x", world_size=1)
    assert opened(job.store).latest() is None
    seq = job.save("x").seq
    job.catalog.set_aside([seq], reason="quarantined", note="a bad disk")
    with pytest.raises(ResumeError) as caught:
        opened(job.store).latest()
    assert caught.value.facts["set_aside"] == ["x@1 (quarantined)"]
    append_raw(job.store, kind="RETIRE", seqs=[seq], reason="old")
    with pytest.raises(ResumeError):  # gone, and still no fresh start
        opened(job.store).latest()


def test_what_is_set_aside_is_found_only_when_it_is_named_exactly():
    store, job = a_run()
    job.catalog.set_aside([3], reason="quarantined", note="flipped bit in rank-00000")
    catalog = opened(store)
    assert catalog.latest().seq == 2
    with pytest.raises(NotFoundError, match="step-3@3"):
        catalog.find("step-3")
    with pytest.raises(NotFoundError):
        catalog.find(step=3)
    assert catalog.find("step-3@3").set_aside == "quarantined"
    assert names(catalog.checkpoints()) == ["step-1", "step-2"]
    assert names(catalog.checkpoints(include_set_aside=True)) == ["step-1", "step-2", "step-3"]
    job.catalog.restore([3])
    assert opened(store).latest().seq == 3


def test_a_roll_back_abandons_everything_above_and_survives_a_crash():
    store, job = a_run(saves=4)
    job.catalog.rollback(2)
    assert opened(store).latest().seq == 2
    again = Job(store)  # crashed before it trained: it comes up where it went back to
    assert again.catalog.latest().seq == 2
    again.incarnation.loaded = 2
    assert again.save("step-3", step=3).commit.parent == 2
    assert names(opened(store).checkpoints()) == ["step-1", "step-2", "step-3"]
    assert opened(store).find("step-3").seq > 5


def test_a_roll_back_abandons_what_is_above_it_in_the_log_whatever_its_step():
    """I11."""
    store, job = a_run(saves=3)
    job.save("lower", step=1)
    job.catalog.rollback(2)
    assert names(opened(store).checkpoints()) == ["step-1", "step-2"]


@pytest.mark.parametrize("lands", [False, True])
def test_a_roll_back_killed_anywhere_is_whole_or_absent(lands):
    """I11."""
    calls = 0
    while True:
        store, _ = a_run(saves=4)
        dying = DyingStore(store, after_calls=calls, last_call_lands=lands)
        calls += 1
        try:
            Job(dying).catalog.rollback(2)
        except Killed:
            assert opened(store).latest().seq in (2, 4)
        else:
            assert opened(store).latest().seq == 2
            assert calls > 4
            return


def test_a_roll_back_needs_a_target_that_may_be_loaded():
    _, job = a_run()
    job.catalog.set_aside([2], reason="quarantined")
    with pytest.raises(InvalidInputError):
        job.catalog.rollback(2)
    with pytest.raises(NotFoundError):
        job.catalog.rollback(7)
    assert job.catalog.rollback(3) is None


def test_pins_are_a_set_of_holders_with_reasons():
    store, job = a_run()
    job.catalog.pin(2, holder="eval", reason="release candidate")
    job.catalog.pin(2, holder="audit", reason="incident")
    assert opened(store).find(seq=2).pins == (Pinned("audit", "incident"), Pinned("eval", "release candidate"))
    assert job.catalog.pin(2, holder="eval", reason="release candidate") is None
    job.catalog.pin(2, holder="eval", reason="released")
    job.catalog.unpin(2, holder="audit")
    assert opened(store).find(seq=2).pins == (Pinned("eval", "released"),)
    assert job.catalog.unpin(2, holder="nobody") is None
    with pytest.raises(NotFoundError):
        job.catalog.pin(77, holder="eval", reason="x")


def test_a_tool_fences_nobody():
    store, job = a_run()
    tool = opened(store)
    tool.pin(1, holder="tool", reason="x")
    tool.rollback(2)
    tool.restore([3])
    assert job.save("step-4").commit.term == 1


def test_a_pin_of_unknown_outcome_is_asked_for_again_and_stands_once():
    """I16."""
    how = []

    def plan(call):
        if how and call.key.startswith("log/") and (call.operation == "put" or len(how) > 1):
            how.append(call)
            return Fault.LOST_REPLY
        return None

    store, _ = a_run()
    faulty = FaultyStore(store, plan)
    tool = opened(faulty, options=LogOptions(deadline_seconds=2))
    how.append(True)
    with pytest.raises(CommitUnknownError):
        tool.pin(2, holder="eval", reason="x")
    how.clear()
    assert tool.pin(2, holder="eval", reason="x") is None
    assert len(list(store.list("log/"))) == 5


def test_nothing_is_appended_to_a_run_that_does_not_exist():
    store = MemoryStore()
    with pytest.raises(NotFoundError):
        opened(store).pin(1, holder="x", reason="y")
    assert list(store.list("")) == []


LEVELS = ("chain", "exists", "etag", "full")


class OtherEtags(ForwardingStore):
    """Calls the same bytes by another ETag than when they were written, as a copy of the bucket does."""

    def list(self, prefix, *, after=None):
        for info in super().list(prefix, after=after):
            yield replace(info, etag=f"{info.etag}-copied")


def level_that_finds(store, seq=3):
    """Return the weakest level that finds something, with the findings."""
    catalog = opened(store)
    for level in LEVELS:
        verdict = catalog.verify(catalog.find(seq=seq), level=level)
        if not verdict.ok:
            return level, verdict.findings
    return None, ()


def test_an_undamaged_checkpoint_is_verified_at_every_level_and_every_byte_is_read():
    store, _ = a_run()
    assert level_that_finds(store) == (None, ())
    catalog = opened(store)
    found = catalog.find(seq=3)
    verdict = catalog.verify(found)
    assert verdict.bytes_read == found.commit.shards.bytes
    assert catalog.verify(level="chain").ok


@pytest.mark.parametrize(
    ("what", "harm", "found"),
    [
        ("shard", None, ("exists", "missing")),
        ("shard", lambda body: body[:-1], ("exists", "size")),
        ("shard", lambda body: body + b"x", ("exists", "size")),
        ("part", None, ("exists", "missing")),
        ("part", lambda body: body[:-9] + bytes([body[-9] ^ 1]) + body[-8:], ("exists", "damaged")),
    ],
    ids=["shard missing", "shard shorter", "shard longer", "part missing", "part flipped"],
)
def test_each_kind_of_harm_is_found_at_its_level_and_names_the_object(what, harm, found):
    """I13."""
    store, _ = a_run()
    stem = opened(store).find(seq=3).commit.stem
    key = stem.shard_key(0) if what == "shard" else stem.part_key(0)
    body = body_of(store, key)
    store.delete(key)
    if harm is not None:
        store.put(key, harm(body))
    level, findings = level_that_finds(store)
    assert [(level, each.kind, each.key) for each in findings] == [(*found, key)]


def test_bytes_that_changed_are_rewritten_at_level_etag_and_damaged_at_level_full():
    """I13: a different ETag alone is no proof of damage."""
    store, _ = a_run()
    key = opened(store).find(seq=3).commit.stem.shard_key(0)
    body = body_of(store, key)
    store.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    catalog = opened(store)
    found = catalog.find(seq=3)
    assert [each.kind for each in catalog.verify(found, level="etag").findings] == ["rewritten"]
    assert [each.kind for each in catalog.verify(found, level="full").findings] == ["rewritten", "damaged"]
    assert catalog.find(seq=3).set_aside is None


def test_the_same_bytes_under_another_etag_are_rewritten_at_level_etag_and_fine_at_level_full():
    """I13: as after a copy of the bucket; BLAKE3 of every byte is the proof."""
    store, _ = a_run()
    key = opened(store).find(seq=3).commit.stem.shard_key(0)
    catalog = opened(OtherEtags(store))
    found = catalog.find(seq=3)
    assert [(each.kind, each.key) for each in catalog.verify(found, level="etag").findings] == [("rewritten", key)]
    verdict = catalog.verify(found, level="full")
    assert (verdict.ok, verdict.bytes_read) == (True, found.commit.shards.bytes)


LATER = [{"format": 2, "kind": "COMMIT"}, {"format": 1, "kind": "MERGE", "what": 1}]


@pytest.mark.parametrize("later", LATER, ids=lambda later: later["kind"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_log_that_was_not_read_to_its_end_is_never_called_fine(later, level):
    store, _ = a_run()
    seq = append_raw(store, **later)
    store.put(slot_key(seq + 1), b"nobody has read this")
    catalog = opened(store)
    asked = [
        lambda: catalog.verify(catalog.find("step-2@2"), level=level),
        lambda: list(catalog.verify_kept(level=level)),
    ]
    for ask in [*asked, catalog.verify]:
        with pytest.raises(UnsupportedError) as caught:
            ask()
        assert caught.value.facts["key"] == slot_key(seq)


def test_damage_below_a_record_of_a_later_release_is_found_all_the_same():
    """I1: a reader that started from a state has not looked below it."""
    store, _ = a_run(saves=70)
    append_raw(store, **LATER[1])
    store.put(slot_key(5), body_of(store, slot_key(5)).replace(b"step-5", b"step-6"))
    assert [each.key for each in opened(store).verify().findings] == [slot_key(5)]


def test_what_is_appended_while_the_log_is_verified_is_no_damage():
    """I1: another thread appends through the same open log."""
    store, _ = a_run()
    appended = []

    def meanwhile(call, act):
        if call.key == "run.json" and armed and not appended:
            appended.append(catalog.pin(2, holder="eval", reason="x"))
        return act()

    armed = []
    catalog = opened(TappedStore(store, meanwhile))
    armed.append(True)
    assert catalog.verify().findings == ()
    assert appended


def test_a_log_that_was_damaged_after_it_was_opened_is_found_at_level_chain():
    """I1, I13: also below the state from which a reader starts."""
    store, _ = a_run(saves=70)
    catalog = opened(store)
    store.put(slot_key(5), body_of(store, slot_key(5)).replace(b"step-5", b"step-6"))
    assert opened(store).latest().seq == 70  # starts from a state, which is right
    verdict = catalog.verify(level="chain")
    assert [(each.level, each.kind, each.key) for each in verdict.findings] == [("chain", "damaged", slot_key(5))]
    store.delete(slot_key(5))
    assert [each.kind for each in catalog.verify(level="chain").findings] == ["missing"]


def test_a_run_file_that_changed_after_the_log_was_opened_is_found_at_level_chain():
    """I13."""
    store, _ = a_run()
    catalog = opened(store)
    store.put("run.json", body_of(store, "run.json").replace(b"2026", b"2027"))
    assert [(each.kind, each.key) for each in catalog.verify(level="chain").findings] == [("damaged", "run.json")]
    store.delete("run.json")
    assert [(each.kind, each.key) for each in catalog.verify(level="chain").findings] == [("missing", "run.json")]


def test_a_level_that_is_none_is_refused():
    store, _ = a_run()
    with pytest.raises(InvalidInputError):
        opened(store).verify(level="full")
    with pytest.raises(InvalidInputError):
        opened(store).verify(opened(store).latest(), level="deep")
    with pytest.raises(InvalidInputError):
        opened(store).verify_kept(level="deep")  # before any verdict


@pytest.mark.parametrize(
    "path",
    [
        "../other/part-00000.json.gz",
        "/etc/passwd",
        "data/0/../0/{stem}/part-00000.json.gz",
        "data//0/{stem}/part-00000.json.gz",
        "data/1/{stem}/part-00000.json.gz",
        "data/0/{other}/part-00000.json.gz",
        "data/0/{stem}/rank-00000.safetensors",
        "data/0/{stem}/part-00000.json.gz/",
        "data/0/{stem}/part-0.json.gz",
        "run.json",
    ],
)
def test_a_path_outside_of_its_own_attempt_is_refused_before_any_request(path):
    store, _ = a_run()
    stems = [each.commit.prefix for each in opened(store).checkpoints()]
    value = json.loads(body_of(store, slot_key(3)))
    value["parts"][0]["path"] = path.format(stem=stems[2], other=stems[1])
    store.put(slot_key(3), sealed(value))
    counted = FaultyStore(store, lambda _: None)
    with pytest.raises(IntegrityError) as caught:
        opened(counted)
    assert caught.value.facts["key"] == slot_key(3)
    assert not any(call.key.startswith("data/") or ".." in call.key for call in counted.calls)


def test_a_part_that_names_a_shard_of_another_attempt_is_refused():
    """I4: swapped parts and shards."""
    store, _ = a_run()
    theirs = load_parts(store, opened(store).find(seq=2))[0]
    committed = opened(store).find(seq=3)
    body, inflated = encode_part(theirs)
    ref = replace(committed.commit.parts[0], size=len(body), blake3=blake3(body).hexdigest(), inflated=inflated)
    store.put(ref.path, body)
    swapped = replace(committed, commit=replace(committed.commit, parts=(ref,)))
    counted = FaultyStore(store, lambda _: None)
    with pytest.raises(IntegrityError) as caught:
        load_parts(counted, swapped)
    assert caught.value.facts["path"] == theirs.shards[0].shard.path
    assert [call.key for call in counted.calls] == [ref.path]


def test_parts_that_describe_another_number_of_shards_than_the_commit_are_refused():
    store, _ = a_run()
    committed = opened(store).find(seq=3)
    fewer = replace(committed.commit, shards=replace(committed.commit.shards, count=2))
    with pytest.raises(IntegrityError):
        load_parts(store, replace(committed, commit=fewer))
