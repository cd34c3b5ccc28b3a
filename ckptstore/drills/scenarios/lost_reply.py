"""Drill 10: the reply to the commit is lost."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.scenarios.whole import expect_kinds, expect_whole
from ckptstore.drills.told import FINE
from ckptstore.format.records import Commit

SAVE = "ckptstore.drills.trouble:save_without_replies"


def lost_reply(place: Place) -> str:
    """Lose the reply to each record, in three ways: each save ends well, is committed once and told of once."""
    with place.ranks(WORLD, SAVE) as ranks:
        told = ranks.results()
    expect_kinds([done for done, _ in told], [FINE] * 3)
    wanted = ["step-1", "step-2", "step-3"]
    expect(told[0][1] == wanted, f"The first rank told of {told[0][1]} as committed.")
    records = [entry.record for entry in place.opened().records()]
    commits = [record.checkpoint_id for record in records if isinstance(record, Commit)]
    expect(commits == wanted, f"The log has commits of {commits}.")
    expect_whole(place, [3, 2, 1], after="replies were lost")
    return "With a record that arrived, one that arrived twice and one that never did, each save was committed once."
