"""The same answer with any hints, and never one over a hole or a damaged slot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from blake3 import blake3
from run_samples import Job, a_run, append_raw, body_of, next_record, opened, sealed

from ckptstore.errors import AccessDeniedError, IntegrityError, NotFoundError, UnavailableError, UnsupportedError
from ckptstore.events import HintFailed, RecordIgnored, RecoveryPoints, TailLost
from ckptstore.format.layout import slot_key, state_key
from ckptstore.format.records import LatestHint, encode_latest
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol import log
from ckptstore.protocol.log import RunLog
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.simulated import ManualClock
from ckptstore.testing.tapped import TappedStore


@pytest.fixture(scope="module")
def long_run():
    """200 commits: slots 0 to 200, and states at 64, 128 and 192."""
    return a_run(saves=200)[0]


def copy_of(store):
    copy = MemoryStore(clock=ManualClock())
    for info in store.list(""):
        copy.put(info.key, body_of(store, info.key))
    return copy


def test_a_log_of_200_commits_opens_with_a_bounded_number_of_requests(long_run):
    counted = FaultyStore(long_run, lambda _: None)
    catalog = opened(counted)
    assert catalog.log.fold.end == 201
    assert len(counted.calls) <= 6 + (200 - 192) + 2
    assert catalog.latest().commit.checkpoint_id == "step-200"


def test_without_hints_the_whole_log_is_read_and_says_the_same(long_run):
    """I10."""
    bare = copy_of(long_run)
    for key in [*(info.key for info in bare.list("state/")), "latest.json"]:
        bare.delete(key)
    assert opened(bare).log.fold.encode() == opened(long_run).log.fold.encode()


def hint_bodies():
    """Return what may stand in a hint: damaged, wrong, stale, absurd, or far beyond the end."""
    right = {"seq": 3, "record_blake3": "0" * 64, "checkpoint_id": "x", "global_step": None, "committed_at": ""}
    values = [
        {**right, "seq": seq} for seq in (0, 1, 63, 64, 150, 199, 200, 201, 202, 5000, 2**62, -1, 2**80, "7", None)
    ]
    bodies = [json.dumps(values[-1]).encode(), *(sealed(value) for value in values)]
    return [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b"x" * 100_000, *bodies]


@pytest.mark.parametrize("body", hint_bodies(), ids=lambda body: repr(body[:30]))
def test_no_content_of_latest_changes_an_answer(long_run, body):
    """I10."""
    store = copy_of(long_run)
    store.put("latest.json", body)
    catalog = opened(store)
    assert catalog.latest() == opened(long_run).latest()
    assert catalog.log.fold.encode() == opened(long_run).log.fold.encode()


def wrong_states(store):
    """Return what may stand in a state: nothing, garbage, another slot's, or one that lies."""
    right = body_of(store, state_key(192))
    lying = json.loads(right)
    lying["commits"] = lying["commits"][:3]
    return [b"", b"{}", right[:-5], right.replace(b"step-7", b"step-8"), body_of(store, state_key(128)),
            json.dumps(lying).encode()]  # fmt: skip


@pytest.mark.parametrize("which", range(6))
def test_no_content_of_a_state_changes_an_answer(long_run, which):
    """I10: it counts only with the hash that the record above it carries."""
    store = copy_of(long_run)
    for seq in (64, 128, 192):
        store.put(state_key(seq), wrong_states(long_run)[which])
    assert opened(store).log.fold.encode() == opened(long_run).log.fold.encode()


def test_hints_that_cannot_be_read_are_done_without(long_run):
    def plan(call):
        return Fault.DENIED if call.operation == "get" and call.key.startswith(("latest", "state/")) else None

    assert opened(FaultyStore(long_run, plan)).latest() == opened(long_run).latest()


def test_a_slot_that_cannot_be_read_is_never_the_end():
    store, _ = a_run()

    def plan(call):
        return Fault.DENIED if call.key == slot_key(2) else None

    with pytest.raises(AccessDeniedError):
        opened(FaultyStore(store, plan))
    with pytest.raises(UnavailableError):
        opened(FaultyStore(store, lambda call: Fault.REFUSED if call.key == slot_key(4) else None))


def test_a_hint_beyond_the_end_is_reported_and_not_obeyed():
    store, _ = a_run(saves=5)
    store.delete(slot_key(5))
    store.delete(slot_key(4))
    events = []
    catalog = opened(store, observer=events.append)
    assert catalog.latest().commit.checkpoint_id == "step-3"
    assert catalog.log.lost_from == 5
    assert TailLost(hinted_seq=5, log_end=4) in events


def test_a_hint_that_was_altered_to_name_a_later_slot_is_no_lost_tail():  # I10
    store, _ = a_run(saves=5)
    store.put("latest.json", body_of(store, "latest.json").replace(b'"seq":5', b'"seq":7'))
    events = []
    catalog = opened(store, observer=events.append)
    assert (catalog.latest().seq, catalog.log.lost_from) == (5, None)
    assert [type(event) for event in events] == [RecoveryPoints]


@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("missing", [0, 2, 4])
def test_a_hole_is_damage_and_nothing_is_written_over_it(missing, hinted):
    """I2: with hints and without."""
    store, _ = a_run(saves=5)
    store.delete(slot_key(missing))
    if not hinted:
        store.delete("latest.json")
    before = [info.key for info in store.list("")]
    with pytest.raises(IntegrityError) as caught:
        Job(store)
    assert caught.value.facts["key"] == slot_key(missing)
    assert [info.key for info in store.list("")] == before


def test_a_slot_that_is_listed_and_cannot_be_found_is_a_hole():
    """I2: also the last one."""
    store, _ = a_run()

    def gone(call, act):
        if call.operation == "get" and call.key == slot_key(3):
            raise NotFoundError("gone", key=call.key)
        return act()

    with pytest.raises(IntegrityError) as caught:
        opened(TappedStore(store, gone))
    assert caught.value.facts["key"] == slot_key(3)


def test_a_run_file_that_is_not_the_logs_own_is_damage_for_a_reader_with_hints_too(long_run):
    """I13."""
    store = copy_of(long_run)
    store.put("run.json", body_of(store, "run.json").replace(b"2026", b"2027"))
    with pytest.raises(IntegrityError) as caught:
        opened(store)
    assert "run.json" in caught.value.message


def test_a_slot_that_comes_in_between_two_looks_is_no_hole():
    """I2: slot 3 is absent at the first look, slot 4 is there; at the second look slot 3 is there too."""
    store, job = a_run(saves=1)
    looks = []

    def late(call, act):
        if call.key == slot_key(3):
            looks.append(call)
            if len(looks) == 1:
                raise NotFoundError("not yet there", key=call.key)
        return act()

    reader = RunLog.open(TappedStore(store, late), clock=ManualClock())
    for number in range(2, 6):
        job.save(f"step-{number}")
    assert reader.refresh().end == 6
    assert len(looks) == 2


def test_a_log_without_its_run_is_damage_and_never_a_new_run():
    store, _ = a_run()
    store.delete("run.json")
    for use in (opened, Job):
        with pytest.raises(IntegrityError) as caught:
            use(store)
        assert caught.value.facts["key"] == "run.json"


def test_a_run_that_begins_while_it_is_looked_for_is_no_damage():
    """I11: run.json is looked for before another job begins the run, the log is listed after it."""
    store, begun = MemoryStore(clock=ManualClock()), []

    def late(call, act):
        if call.operation == "list" and not begun:
            begun.append(Job(store).save("step-1"))
        return act()

    catalog = opened(TappedStore(store, late))
    assert catalog.latest() == begun[0]


@pytest.mark.parametrize("key", ["run.json", *(slot_key(seq) for seq in range(4))])
def test_every_flipped_bit_of_a_record_is_found_in_the_newest_one_too(key):
    """I13: every byte in turn, one bit of it."""
    store, _ = a_run(saves=3)
    body = body_of(store, key)
    for at in range(len(body)):
        flipped = bytearray(body)
        flipped[at] ^= 1 << at % 8
        store.put(key, bytes(flipped))
        with pytest.raises(IntegrityError):
            opened(store)
    store.put(key, body)
    assert opened(store).latest().seq == 3


def test_a_damaged_slot_names_itself_with_expected_and_found():
    store, _ = a_run()
    store.put(slot_key(2), body_of(store, slot_key(2)).replace(b"step-2", b"step-9"))
    with pytest.raises(IntegrityError) as caught:
        opened(store)
    facts = caught.value.facts
    assert facts["key"] == slot_key(2)
    assert len(facts["expected"]) == len(facts["found"]) == 64
    assert facts["expected"] != facts["found"]


def test_a_record_that_was_replaced_by_another_valid_one_does_not_link():
    """I1."""
    store, _ = a_run()
    value = json.loads(body_of(store, slot_key(2)))
    store.put(slot_key(2), sealed({**value, "written_at": "later"}))
    with pytest.raises(IntegrityError) as caught:
        opened(store)
    assert caught.value.facts["key"] == slot_key(3)


@pytest.mark.parametrize("later", [{"format": 2, "kind": "COMMIT"}, {"format": 1, "kind": "MERGE", "what": 1}])
def test_a_record_of_a_later_release_stops_answers_and_appends(later):
    store, job = a_run()
    seq = append_raw(store, **later)
    catalog = opened(store)
    for ask in (catalog.latest, lambda: catalog.find("step-1"), catalog.checkpoints, lambda: job.save("x")):
        with pytest.raises(UnsupportedError) as caught:
            ask()
        assert caught.value.facts["key"] == slot_key(seq)
        assert "pip install" in caught.value.hint
    assert catalog.find("step-2@2").seq == 2  # stands below it
    assert not any(info.key == slot_key(seq + 1) for info in store.list("log/"))


def test_an_optional_record_of_a_later_release_is_passed_over():
    store, job = a_run()
    append_raw(store, format=2, kind="NOTE", optional=True)
    assert opened(store).latest().seq == 3
    assert job.save("x").seq == 5


def test_a_run_of_a_later_release_is_refused():
    store, _ = a_run(saves=0)
    store.put("run.json", body_of(store, "run.json").replace(b'"format":1', b'"format":2'))
    with pytest.raises(UnsupportedError):
        opened(store)


@pytest.mark.parametrize("digit", [b"3", b"5", b"9", b"0", b"q"])
def test_a_bit_of_run_json_that_makes_it_look_like_a_later_release_is_damage(digit):  # I13
    store, _ = a_run()
    store.put("run.json", body_of(store, "run.json").replace(b'"format":1', b'"format":' + digit))
    with pytest.raises(IntegrityError) as caught:
        opened(store)
    assert caught.value.facts["key"] in ("run.json", slot_key(0))


def test_a_commit_that_borrows_is_refused():
    store, _ = a_run()
    value = json.loads(body_of(store, slot_key(3)))
    for key in ("seq", "prev", "self"):
        del value[key]
    append_raw(store, **value | {"borrows": [1], "attempt": 4})
    with pytest.raises(UnsupportedError):
        opened(store).latest()


def test_foreign_objects_are_left_alone_and_change_nothing():
    store, job = a_run()
    foreign = ["log/README", "log/000000000002.json.bak", "log/7.json", "state/notes.txt", "mine.txt"]
    foreign += ["data/x", "data/0/strange/rank-00000.safetensors"]
    for key in foreign:
        store.put(key, b"foreign")
    assert opened(store).latest().seq == 3
    assert opened(store).in_progress() == []
    job.save("x")
    assert all(body_of(store, key) == b"foreign" for key in foreign)


def test_a_record_that_was_not_valid_at_its_slot_is_passed_over_and_reported():
    """I3: a faulty tool is harmless."""
    store, job = a_run()
    seq = append_raw(store, kind="CLAIM", term=1, incarnation="f" * 32, job="faulty", host="tool")
    events = []
    catalog = opened(store, observer=events.append)
    assert [(event.seq, event.kind) for event in events if isinstance(event, RecordIgnored)] == [(seq, "CLAIM")]
    assert catalog.log.fold.ignored[0].seq == seq
    assert catalog.latest().seq == 3
    assert job.save("x").seq == seq + 1


def test_a_record_with_the_hash_of_another_fold_is_damage():
    store, _ = a_run(saves=63)
    assert opened(store).log.fold.end == 64
    key, body = next_record(store, kind="RESTORE", seqs=[1], fold=blake3(b"another").hexdigest())
    store.put(key, body)
    with pytest.raises(IntegrityError):
        opened(store)


def test_a_state_of_another_slot_counts_for_nothing_even_if_a_faulty_record_vouches_for_it():
    """I10."""
    store, job = a_run(saves=63)
    absurd = replace(job.log.fold, end=1000).encode()
    key, body = next_record(store, kind="RESTORE", seqs=[1], fold=blake3(absurd).hexdigest())
    store.put(key, body)
    store.put(state_key(64), absurd)
    with pytest.raises(IntegrityError) as caught:
        opened(store)
    assert caught.value.facts["key"] == slot_key(64)


def test_what_was_read_stays_as_it_was_where_a_refresh_finds_damage():
    """I1: two good records above it, and then one that is none."""
    store, job = a_run()
    catalog = opened(store)
    before, bytes_before = catalog.log.fold, catalog.log.fold.encode()
    job.catalog.pin(2, holder="eval", reason="x")
    job.save("step-4")
    store.put(slot_key(6), b"no record")
    with pytest.raises(IntegrityError):
        catalog.log.refresh()
    assert catalog.log.fold is before
    assert before.encode() == bytes_before


def test_a_state_that_no_reader_would_take_is_not_written(monkeypatch):
    """I10: the observer hears of it."""
    store, job = a_run(saves=63)
    size = len(job.log.fold.encode())
    events = []
    writer = opened(store, observer=events.append)
    monkeypatch.setattr(log, "MAX_STATE_BYTES", size - 1)
    writer.pin(2, holder="eval", reason="x")
    assert list(store.list("state/")) == []
    assert [event.key for event in events if isinstance(event, HintFailed)] == [state_key(64)]
    monkeypatch.setattr(log, "MAX_STATE_BYTES", size)
    store, job = a_run(saves=63)
    opened(store).pin(2, holder="eval", reason="x")
    assert [info.key for info in store.list("state/")] == [state_key(64)]


def test_a_refresh_of_an_up_to_date_log_is_one_get():
    store, _ = a_run()
    counted = FaultyStore(store, lambda _: None)
    log = RunLog.open(counted, clock=ManualClock())
    before = len(counted.calls)
    log.refresh()
    assert [(call.operation, call.key) for call in counted.calls[before:]] == [("get", slot_key(4))]


def test_another_process_sees_a_commit_at_once():
    store, job = a_run(saves=1)
    reader = opened(store)
    assert reader.latest().seq == 1
    job.save("step-2")
    assert reader.latest().seq == 2


def test_a_hint_says_where_the_newest_commit_is():
    store, job = a_run()
    committed = job.save("x", step=7)
    right = LatestHint(committed.seq, committed.blake3, "x", 7, committed.written_at)
    assert body_of(store, "latest.json") == encode_latest(right)
    assert body_of(store, committed.commit.stem.committed_key) == body_of(store, slot_key(committed.seq))
