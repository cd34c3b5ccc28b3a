"""A run with a very long history opens with as few requests as a short one; without hints it says the same (I10)."""

import pytest

from benchmarks.log import HINTS, NEWEST, asked, damage, open_and_list, write_history
from ckptstore.format.records import FOLD_EVERY
from ckptstore.objectstore.memory import MemoryStore

MOST_GETS = 75
"""Stated in PROTOCOL.md, section 8."""
LIVE = 100


def a_history(commits, others="collected"):
    store = MemoryStore("memory://long")
    return store, write_history(store, commits=commits, live=LIVE, others=others)


@pytest.mark.parametrize(
    ("commits", "others"),
    [
        (150, "collected"),
        (1000, "collected"),
        (1000, "retired"),
        (1000, "set aside"),
        pytest.param(100_000, "collected", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_opening_finding_and_listing_take_a_bounded_number_of_requests(commits, others):
    store, fold = a_history(commits, others)
    found = []
    counts = asked(store, lambda tapped: found.append(open_and_list(tapped)))
    assert found == [(fold.kept[-1].seq, [each.seq for each in fold.selectable][-NEWEST:])]
    assert len(fold.selectable) == LIVE
    assert set(counts.requests) == {"get", "list"}
    assert counts.requests["list"] == 1
    assert 5 <= counts.requests["get"] <= MOST_GETS


def test_at_no_length_of_the_log_are_more_slots_read_than_between_two_snapshots():
    store, fold = a_history(LIVE + 40)  # nothing is retired yet: each cut leaves a whole log
    assert fold.end > 2 * FOLD_EVERY
    gets = []
    while len(keys := [info.key for info in store.list("log/")]) > FOLD_EVERY:
        gets.append(asked(store, open_and_list).requests["get"])
        store.delete(keys[-1])
    assert max(gets) > min(gets)
    assert max(gets) <= MOST_GETS


@pytest.mark.parametrize("hints", HINTS[1:])
def test_without_a_hint_or_with_a_damaged_one_the_answer_is_the_same(hints):
    store, fold = a_history(1200)
    whole = open_and_list(store)
    damage(store, hints)
    assert open_and_list(store) == whole
    assert whole[0] == fold.kept[-1].seq


def test_a_snapshot_that_was_not_written_costs_no_more_than_the_slots_up_to_the_one_before():
    store, _ = a_history(1200)
    whole, newest = open_and_list(store), [info.key for info in store.list("state/")][-1]
    store.delete(newest)
    found = []
    counts = asked(store, lambda tapped: found.append(open_and_list(tapped)))
    assert found == [whole]
    assert counts.requests["get"] <= MOST_GETS + FOLD_EVERY
