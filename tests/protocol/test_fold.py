"""What each record does at its slot, and when it is not valid there."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3

from ckptstore.format.canonical import canonical_json
from ckptstore.format.codec import PartRef
from ckptstore.format.layout import Stem
from ckptstore.format.records import (
    FOLD_EVERY,
    Claim,
    Collected,
    Commit,
    Envelope,
    Pin,
    Proved,
    Restore,
    Retire,
    SetAside,
    ShardTotals,
    Unpin,
    Verified,
    decode_record,
    encode_record,
    record_fields,
)
from ckptstore.protocol import fold as fold_module
from ckptstore.protocol.fold import MAX_IGNORED, Fold, apply, fold_blake3
from ckptstore.protocol.snapshot import fold_from_state

RUN, RUN_HASH = "a" * 32, "b" * 64


def folded(*records, fold=None):
    """Return the fold of these records, in order."""
    fold = fold or Fold(run=RUN, run_blake3=RUN_HASH, last=RUN_HASH)
    for record in records:
        envelope = Envelope(
            format=1,
            run=RUN,
            seq=fold.end,
            writer="c" * 32,
            written_at="2026-01-02T00:00:00.000Z",
            prev=fold.last,
            fold=fold_blake3(fold) if fold.end % FOLD_EVERY == 0 else None,
        )
        fold = apply(fold, *decode_record(encode_record(record, envelope), seq=fold.end, run=RUN))
    return fold


def claim(term, incarnation="d"):
    return Claim(term, incarnation * 32, "job", "host")


def commit(attempt, term=1, **given):
    stem = Stem(given.pop("name", "x"), term, attempt, f"{attempt:032x}")
    part = PartRef(stem.part_key(0), 1, "0" * 64, 1, (0, 0))
    fields = {
        "checkpoint_id": stem.name,
        "global_step": 1,
        "term": term,
        "attempt": attempt,
        "parent": None,
        "prefix": str(stem),
        "saved_world_size": 1,
        "parallelism": {},
        "training_state": {},
        "fingerprints": {},
        "metrics": {},
        "tags": (),
        "shards": ShardTotals(1, 1),
        "parts": (part,),
        "documents": None,
        "software": {},
    }
    return Commit(**{**fields, **given})


def run_of(commits):
    """A claim in slot 0 and commits in slots 1 to `commits`."""
    return folded(claim(1), *(commit(number) for number in range(1, commits + 1)))


def ignored(fold):
    return [(each.seq, each.kind) for each in fold.ignored]


def seqs(committed):
    return [each.seq for each in committed]


@pytest.mark.parametrize("term", [0, 1])
def test_terms_of_claims_strictly_increase(term):
    """I3."""
    fold = folded(claim(1), claim(term, "e"))
    assert ignored(fold) == [(1, "CLAIM")]
    assert fold.claim.incarnation == "d" * 32
    assert folded(claim(1), claim(7, "e")).term == 7


@pytest.mark.parametrize(
    "late",
    [
        commit(5, term=1),  # fenced: I3
        commit(5, term=3),  # never claimed
        commit(1, term=2),  # twice: I16
        commit(2, term=2, parent=9),  # its parent is not before it
    ],
)
def test_a_commit_that_is_not_valid_at_its_slot_changes_nothing(late):
    fold = folded(claim(1), claim(2, "e"), commit(1, term=2), late)
    assert ignored(fold) == [(3, "COMMIT")]
    assert seqs(fold.kept) == [2]


def test_a_lower_attempt_after_a_higher_one_is_an_orphan():
    """I7: it may have been collected."""
    fold = folded(claim(1), commit(2), commit(1))
    assert ignored(fold) == [(2, "COMMIT")]
    assert fold.supersedes(2)
    assert not fold.supersedes(3)


def test_a_new_claim_begins_a_new_count_of_attempts():
    fold = folded(claim(1), commit(7), claim(2, "e"))
    assert fold.tip is None
    assert seqs(folded(commit(1, term=2), fold=fold).kept) == [1, 3]
    assert dict(fold.reigns) == {"d" * 32: 1, "e" * 32: 2}


def test_set_aside_and_restore_change_what_is_selectable_and_nothing_else():
    fold = folded(SetAside((2, 3), "abandoned"), fold=run_of(3))
    assert (seqs(fold.kept), seqs(fold.selectable), fold.newest.seq) == ([1, 2, 3], [1], 1)
    fold = folded(Restore((3,)), fold=fold)
    assert (seqs(fold.selectable), fold.newest.seq) == ([1, 3], 3)


def test_what_is_damaged_stays_so_when_the_run_goes_back():
    fold = folded(SetAside((2,), "quarantined"), SetAside((2, 3), "abandoned"), fold=run_of(3))
    assert [fold.commits[seq].set_aside for seq in (1, 2, 3)] == [None, "quarantined", "abandoned"]


@pytest.mark.parametrize(
    "record",
    [
        SetAside((1, 9), "abandoned"),
        Restore((0,)),
        Pin(9, "x", "y"),
        Unpin(0, "x"),
        Verified(9, "full"),
        Proved(9, "same"),
        Collected((1,)),
        Retire((1, 9), "old"),
    ],
    ids=lambda record: record.KIND,
)
def test_a_record_about_what_is_no_kept_checkpoint_is_passed_over_whole(record):
    fold = folded(record, fold=run_of(4))
    assert ignored(fold) == [(5, record.KIND)]
    assert (fold.end, fold.commits) == (6, run_of(4).commits)


def test_retired_checkpoints_are_not_kept_and_vanish_when_they_are_collected():
    fold = folded(Retire((1, 2), "old"), fold=run_of(4))
    assert seqs(fold.kept) == [3, 4]
    assert fold.retired == {1: commit(1).prefix, 2: commit(2).prefix}
    assert fold.committed_at(commit(1).prefix) == 1
    fold = folded(Collected((1,)), fold=fold)
    assert list(fold.retired) == [2]
    assert ignored(folded(Collected((1,)), fold=fold)) == [(7, "COLLECTED")]
    assert ignored(folded(Retire((2,), "again"), fold=fold)) == [(7, "RETIRE")]


@pytest.mark.parametrize(
    ("before", "retire"),
    [
        ([], Retire((4,), "the newest")),
        ([Pin(1, "eval", "r")], Retire((1,), "pinned")),
        ([Verified(2, "full")], Retire((1, 2), "the newest verified")),
        ([], Retire((1, 2, 3), "fewer than two would be left")),
        ([SetAside((3, 4), "abandoned")], Retire((1,), "fewer than two would be left")),
        ([SetAside((3, 4), "abandoned")], Retire((2,), "the newest that may be selected")),
        ([claim(2, "e")], Retire((1,), "a fenced trainer's", term=1)),
        ([], Retire((1,), "of a term that never was", term=2)),
    ],
    ids=lambda value: value.reason if isinstance(value, Retire) else "",
)
def test_nothing_is_retired_that_somebody_relies_on(before, retire):
    """I3, I8, I14."""
    fold = folded(*before, fold=run_of(4))
    assert ignored(folded(retire, fold=fold)) == [(fold.end, "RETIRE")]


@pytest.mark.parametrize(
    ("before", "retire"),
    [
        ([], Retire((1, 2), "two are left")),
        ([], Retire((1,), "a trainer's", term=1)),
        ([Pin(1, "eval", "r"), Unpin(1, "eval")], Retire((1,), "unpinned")),
        ([Verified(1, "full"), Verified(3, "full")], Retire((1,), "verified, a newer one too")),
        ([Verified(1, "etag")], Retire((1,), "not every byte was verified")),
        ([SetAside((1, 2, 3), "abandoned")], Retire((1, 2, 3), "set aside, and one is left")),
        ([SetAside((4,), "quarantined")], Retire((4,), "damaged, though the newest")),
    ],
    ids=lambda value: value.reason if isinstance(value, Retire) else "",
)
def test_what_nobody_relies_on_may_be_retired(before, retire):
    """I14."""
    fold = folded(*before, retire, fold=run_of(4))
    assert ignored(fold) == []
    assert not set(retire.seqs) & set(fold.commits)


def test_the_strongest_level_of_verification_is_remembered():
    fold = folded(Verified(1, "full"), Verified(1, "etag"), Verified(2, "exists"), Proved(2, "same"), fold=run_of(2))
    assert [(each.verified, each.proved) for each in fold.kept] == [("full", None), ("exists", "same")]


def test_a_parent_may_have_been_retired():
    fold = folded(Retire((1,), "old"), commit(9, parent=1), fold=run_of(3))
    assert fold.newest.commit.parent == 1


def test_a_fold_and_its_state_are_the_same_whatever_was_in_it():
    """I10."""
    fold = folded(
        claim(2, "e"),
        commit(1, term=2, name="ñ/*", parent=3, metrics={"loss": float("nan")}),
        Pin(2, "eval", "r"),
        Verified(2, "full"),
        Proved(3, "same"),
        SetAside((3,), "quarantined", "seen twice"),
        Retire((1,), "old"),
        claim(1, "f"),
        fold=run_of(4),
    )
    assert len(fold.ignored) == 1
    above = Envelope(1, RUN, fold.end, "c" * 32, "", fold.last, fold_blake3(fold))
    read = fold_from_state(fold.encode(), above)
    assert read.encode() == fold.encode()
    assert read.ignored == ()  # for people only
    other = Envelope(1, RUN, fold.end, "c" * 32, "", fold.last, blake3(b"x").hexdigest())
    assert fold_from_state(fold.encode(), other) is None


EVERY_KIND = [
    claim(2, "e"),
    commit(9),
    SetAside((1,), "abandoned"),
    Restore((2,)),
    Pin(1, "eval", "r"),
    Unpin(2, "eval"),
    Verified(1, "full"),
    Proved(1, "same"),
    Retire((1,), "old"),
    Collected((3,)),
]


@pytest.mark.parametrize("record", EVERY_KIND, ids=lambda record: record.KIND)
def test_a_fold_is_left_as_it_was_by_the_next_record(record):
    before = folded(Pin(2, "eval", "r"), SetAside((2,), "abandoned"), Retire((3,), "old"), fold=run_of(6))
    bytes_before = before.encode()
    after = folded(record, fold=before)
    assert ignored(after) == []
    assert before.encode() == bytes_before
    assert after.encode() != bytes_before


def test_a_fold_is_the_canonical_json_of_what_it_says():
    fold = folded(Pin(2, "eval", "r"), commit(9, name="ñ/*", metrics={"loss": float("nan")}), fold=run_of(3))
    value = json.loads(fold.encode())
    assert [each["commit"]["checkpoint_id"] for each in value["commits"]] == ["x", "x", "x", "ñ/*"]
    assert fold.encode() == canonical_json(value) + b"\n"


def test_a_commit_that_did_not_change_is_encoded_once_however_long_the_log_grows(monkeypatch):
    """The hash in every 64th record covers all commits: without this a log costs the square of its length."""
    encoded = []

    def counted(record):
        encoded.append(record)
        return record_fields(record)

    monkeypatch.setattr(fold_module, "record_fields", counted)
    run_of(5 * FOLD_EVERY).encode()
    assert len(encoded) == 5 * FOLD_EVERY


def test_what_is_reported_is_bounded():
    fold = folded(*(claim(1) for _ in range(MAX_IGNORED + 20)))
    assert len(fold.ignored) == MAX_IGNORED
    assert fold.ignored[-1].seq == fold.end - 1
