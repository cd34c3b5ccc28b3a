"""Drill 7: the store does not answer any more."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import WORLD
from ckptstore.drills.told import FINE

SAVE = "ckptstore.drills.saves:save_into_silence"
LATE_SECONDS = 8.0
"""How much later than its time a save that hangs may be known to have failed."""
MOST_HUNG = 2


def silent_store(place: Place) -> str:
    """Let the store hang under one rank: saves are refused, not queued, each fails in time, and later ones go on."""
    with place.ranks(WORLD, SAVE, silent_rank=1) as ranks:
        told = ranks.results()
    for rank, each in enumerate(told):
        expect(each["beside"].kind == "BusyError", f"Rank {rank}: a save beside the one that hangs: {each['beside']}.")
        for late in each["ended"]:
            expect(
                late.kind == "StalledError" and late.seconds < each["limit"] + LATE_SECONDS,
                f"Rank {rank}: a save that hangs ended as {late} after {late.seconds:.1f} s, "
                f"allowed {each['limit']:.1f}.",
            )
        expect(each["hung"] <= MOST_HUNG, f"Rank {rank}: {each['hung']} uploads hang.")
        expect(each["last"].kind == FINE, f"Rank {rank}: once the store answered, a save ended: {each['last']}.")
    found = [checkpoint.checkpoint_id for checkpoint in place.opened().checkpoints()]
    expect(found == ["step-5", "step-1"], f"Committed are {found}, not step-5 and step-1.")
    longest = max(late.seconds for each in told for late in each["ended"])
    return f"A save beside the one that hung was refused; each failed within {longest:.1f} s; then one was committed."
