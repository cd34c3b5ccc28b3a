"""Drill 14: checkpoints are collected while they are read."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.told import FINE, Gone, Restored

SAVE, RESTORE = "ckptstore.drills.marked:save", "ckptstore.drills.marked:restore"
COLLECT = "ckptstore.drills.collector:collect"
MARKS = [1, 2, 3, 4]


def collected_while_read(place: Place) -> str:
    """Collect under two readers: the one with a pin gets all, the other one all or an error, and none a mixture."""
    with place.ranks(WORLD, SAVE, marks=MARKS) as ranks:
        ranks.results()
    place.opened().pin("step-1", holder="drill", reason="It is being read.")
    with (
        place.ranks(1, RESTORE, mark=1, shards=WORLD) as pinned,
        place.ranks(1, RESTORE, mark=2, shards=WORLD) as bare,
    ):
        for reader in (pinned, bare):
            reader.hear("reading")
        with place.ranks(1, COLLECT, last=2) as collector:
            gone: Gone = collector.results()[0]
        for reader in (pinned, bare):
            reader.tell(0, "go on")
        (with_pin,), (without,) = pinned.results(), bare.results()
    expect(with_pin.ended.kind == FINE, f"The reader with a pin ended as {with_pin.ended}")
    for mark, restored in ((1, with_pin), (2, without)):
        _expect_not_torn(mark, restored)
    expect(gone.retired == ["step-2"] and gone.deleted > 0, f"Collected were {gone.retired}, {gone.deleted} objects.")
    left = [each.checkpoint_id for each in place.opened().checkpoints()]
    expect(left == ["step-4", "step-3", "step-1"], f"Left are {left}.")
    return f"The reader with a pin got all of step-1; the one without ended as {without.ended}"


def _expect_not_torn(mark: int, restored: Restored) -> None:
    whole = restored.ended.kind == FINE and restored.marks == {mark}
    refused = restored.ended.kind == "ConflictError" and bool(restored.ended.hint)  # damage and absence mean others
    expect(whole or refused, f"A reader of step-{mark} ended as {restored.ended}, with {sorted(restored.marks)}.")
    then = restored.latest.kind == FINE and restored.latest_marks == {MARKS[-1]}
    expect(then, f"After that, the latest ended as {restored.latest}, with {sorted(restored.latest_marks)}.")
