"""What is explored: the protocol as it is, small and large, and each weakening of it that must be found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.commit_model.state import Budget, Setting

ONE = Setting(writers=1, saves=3, slots=7, collectors=1)

SMALL: Mapping[str, Setting] = {
    "two jobs": Setting(slots=6, again=True, budget=Budget(unknowns=1, refusals=1)),
    "three starts": Setting(writers=3, saves=1, slots=6, budget=Budget(unknowns=1)),
    "load first": Setting(slots=5, door="load first", again=True, budget=Budget(unknowns=1, refusals=1)),
    "from any": Setting(saves=1, slots=6, loads_any=True, budget=Budget(unknowns=1)),
    "going back": Setting(slots=7, budget=Budget(rollbacks=1)),
    "a collection": replace(ONE, budget=Budget(unknowns=1, late_puts=1, torn=1, failed_deletes=1)),
    "a collection beside an unknown outcome": replace(ONE, slots=6, again=True, budget=Budget(unknowns=1)),
    "a collection beside a claim": Setting(slots=6, collectors=1, budget=Budget(torn=1)),
    "two collections": replace(ONE, saves=4, slots=7, collectors=2),
    "set aside": replace(ONE, slots=7, budget=Budget(quarantines=1, restores=1)),
    "verified": replace(ONE, slots=7, budget=Budget(verifications=1, trainer_retires=1)),
    "a reader": replace(ONE, reader="plain", budget=Budget(late_puts=1)),
    "a pinned reader": replace(ONE, slots=7, reader="pinned", budget=Budget(unknowns=1)),
    "a trainer retires": Setting(slots=7, saves=3, budget=Budget(trainer_retires=1)),
}
"""Some seconds each: what every change is tested with."""


LARGE: Mapping[str, Setting] = {
    "two jobs": Setting(saves=3, slots=9, again=True, budget=Budget(unknowns=2, refusals=1)),
    "three starts": Setting(writers=3, saves=2, slots=8, budget=Budget(unknowns=1)),
    "load first": Setting(writers=3, saves=2, slots=7, door="load first", again=True, budget=Budget(unknowns=1)),
    "from any": Setting(saves=2, slots=9, loads_any=True, again=True, budget=Budget(unknowns=1, refusals=1)),
    "going back": Setting(saves=3, slots=9, budget=Budget(unknowns=1, rollbacks=1)),
    "a collection": replace(
        ONE, saves=4, slots=9, budget=Budget(unknowns=1, refusals=1, torn=1, late_puts=1, failed_deletes=1)
    ),
    "a collection beside an unknown outcome": replace(ONE, saves=4, slots=9, again=True, budget=Budget(unknowns=2)),
    "a collection beside a claim": Setting(saves=3, slots=9, collectors=1, budget=Budget(torn=1, unknowns=1)),
    "two collections": replace(ONE, saves=4, slots=9, collectors=2, budget=Budget(torn=1)),
    "set aside": replace(ONE, saves=4, slots=9, budget=Budget(quarantines=1, restores=1)),
    "verified": replace(ONE, saves=4, slots=9, budget=Budget(verifications=2, trainer_retires=1)),
    "a reader": replace(ONE, saves=4, slots=9, reader="plain", budget=Budget(late_puts=1, torn=1, unknowns=1)),
    "a pinned reader": replace(ONE, saves=4, slots=9, reader="pinned", budget=Budget(unknowns=1)),
    "a trainer retires": Setting(slots=9, saves=4, collectors=1, budget=Budget(trainer_retires=1)),
    "all at once": Setting(
        slots=7, saves=2, collectors=1, reader="plain", again=True, budget=Budget(unknowns=1, torn=1, rollbacks=1)
    ),
}
"""Minutes: `make model`."""


@dataclass(frozen=True)
class Mutant:
    """A weakened protocol.

    Args:
        why: What it forgets.
        wrong: The same in a word, for the code.
        finds: The invariant that it must break first.
        setting: Bounds within which it does.
    """

    why: str
    finds: str
    setting: Setting
    wrong: str = ""


def _mutants() -> dict[str, Mutant]:
    two = Setting(slots=6)
    unknown = replace(two, writers=1, again=True, budget=Budget(unknowns=1))
    found = {
        "no read-back": Mutant("'already exists' is taken for a lost race", "I5", two),
        "clean-up on time-out": Mutant("an unknown outcome is cleaned up after", "I7", unknown),
        "refusal believed": Mutant(
            "a refusal is believed though a try before it was ambiguous", "I5", replace(two, budget=Budget(refusals=1))
        ),
        "no fence": Mutant("a commit of an older term counts", "I3", two),
        "no superseding": Mutant("an attempt may commit after a later one", "I7", replace(unknown, saves=3)),
        "no re-validation": Mutant(
            "after OTHER the same record goes to the next slot, whatever stands there", "I5", two
        ),
        "no re-validation of RETIRE": Mutant(
            "the same for what a collection retires", "I8", replace(ONE, reader="pinned"), wrong="no re-validation"
        ),
        "a claim per writer object": Mutant("each save claims anew", "I15", unknown),
        "claims last": Mutant("a resume selects before it claims", "I15", two),
        "log records deleted": Mutant("records of collected checkpoints are deleted", "I1", ONE),
        "hash-named": Mutant("a data key is named by what it holds, and used again", "I7", ONE),
        "live orphans": Mutant(
            "an attempt of the newest term without a commit is an orphan", "I7", replace(ONE, saves=1)
        ),
        "latest by step": Mutant("the latest is the highest step", "I11", replace(two, loads_any=True, slots=7)),
        "pins not checked": Mutant("a RETIRE does not look at pins", "I14", replace(ONE, reader="pinned")),
        "newest not protected": Mutant("the newest may be retired", "I14", ONE),
        "verified not protected": Mutant(
            "the newest verified may be retired", "I14", replace(ONE, budget=Budget(verifications=1))
        ),
        "min_keep ignored": Mutant("fewer than two may be left", "I14", ONE),
        "trainers' RETIRE not fenced": Mutant(
            "a fenced trainer retires", "I3", replace(two, saves=3, slots=7, budget=Budget(trainer_retires=1))
        ),
        "RETIRE after deletion": Mutant("the bytes go first", "I8", ONE),
        "COLLECTED unseen": Mutant(
            "COLLECTED is said although a deletion failed", "COLLECTED", replace(ONE, budget=Budget(failed_deletes=1))
        ),
        "COLLECTED early": Mutant("COLLECTED is said before the bytes are deleted", "COLLECTED", ONE),
        "plan not quoted": Mutant(
            "the plan is made anew and applied, whatever was shown", "I17", replace(ONE, collectors=2)
        ),
        "bytes remade": Mutant("a record is made anew for each try, and known by its bytes", "I5", two),
        "ranks fall back alone": Mutant(
            "a rank that misses an object selects by itself", "I12", replace(ONE, reader="plain")
        ),
        "hints believed": Mutant("the log is taken to end where latest.json says", "I10", two),
        "states believed": Mutant("a snapshot is believed without its hash", "I10", two),
    }
    return {
        name: replace(mutant, setting=replace(mutant.setting, wrong=frozenset({mutant.wrong or name})))
        for name, mutant in found.items()
    }


MUTANTS: Mapping[str, Mutant] = _mutants()
