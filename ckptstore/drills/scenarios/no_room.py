"""Drill 12: the disk or the quota is full."""

from __future__ import annotations

from ckptstore.drills.place import Place
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.scenarios.whole import expect_kinds, expect_whole
from ckptstore.drills.told import FINE

SAVE = "ckptstore.drills.trouble:save_without_room"


def no_room(place: Place) -> str:
    """Leave one rank without room, once told and once not: both saves fail on all ranks, and the next one goes on."""
    with place.ranks(WORLD, SAVE, rank=1) as ranks:
        told = ranks.results()
    expect_kinds(told, [FINE, "UnavailableError", "IntegrityError", FINE])
    expect_whole(place, [4, 1], after="there was no room")
    _, full, cut, _ = told[0]
    return f"Refused were a shard that had no room ({full.message}) and one that was cut ({cut.message})"
