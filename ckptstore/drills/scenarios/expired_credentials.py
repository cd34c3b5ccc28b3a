"""Drill 11: credentials end in the middle of an upload."""

from __future__ import annotations

from ckptstore.drills.place import Place
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.scenarios.whole import expect_kinds, expect_whole
from ckptstore.drills.told import FINE

SAVE = "ckptstore.drills.trouble:save_as_credentials_end"


def expired_credentials(place: Place) -> str:
    """Refuse one rank from the first bytes of its shard on: every rank is told what to do, and nothing is committed."""
    with place.ranks(WORLD, SAVE, rank=1) as ranks:
        told = ranks.results()
    expect_kinds(told, [FINE, "AccessDeniedError", FINE])
    expect_whole(place, [3, 1], after="credentials ended in a save")
    return f"Every rank was told: {told[0][1].message} {told[0][1].hint} After a new login the next save was committed."
