"""The list of drills, and where one means nothing."""

from __future__ import annotations

from ckptstore.drills.scenarios.between_micro_steps import between_micro_steps
from ckptstore.drills.scenarios.deleted_shard import deleted_shard
from ckptstore.drills.scenarios.killed_rank import killed_rank
from ckptstore.drills.scenarios.lost_latest import lost_latest
from ckptstore.drills.scenarios.other_world import other_world
from ckptstore.drills.scenarios.short_run import short_run
from ckptstore.drills.scenarios.silent_store import silent_store
from ckptstore.drills.scenarios.tampered_bytes import tampered_bytes
from ckptstore.drills.verdict import Drill
from ckptstore.errors import InvalidInputError
from ckptstore.nearest import meant

ALL = "all"

DRILLS = (
    Drill(
        1,
        "killed-rank",
        "A rank is killed while it writes.",
        "What is selected is whole at every moment, and the next job goes on.",
        killed_rank,
    ),
    Drill(
        2,
        "deleted-shard",
        "A shard of the newest checkpoint is deleted.",
        "It is refused, and the one before is resumed, bit by bit.",
        deleted_shard,
    ),
    Drill(
        3,
        "tampered-bytes",
        "A bit of a tensor in the newest checkpoint is flipped.",
        "The hash refuses it, in a verification, a read and a resume, which takes the one before.",
        tampered_bytes,
    ),
    Drill(
        4,
        "lost-latest",
        "`latest.json` names a checkpoint that is not there, or is gone.",
        "The newest checkpoint is found by the log.",
        lost_latest,
    ),
    Drill(
        5,
        "other-world",
        "The run goes on with another number of ranks.",
        "Every value is right, losses go on, and what the matrix forbids is refused.",
        other_world,
    ),
    Drill(
        6,
        "between-micro-steps",
        "The run is killed after a save between two micro-steps.",
        "No batch is lost or counted twice, bit by bit.",
        between_micro_steps,
    ),
    Drill(
        7,
        "silent-store",
        "The store does not answer one rank any more.",
        "Saves do not pile up, each fails in time, and once it answers the next is committed.",
        silent_store,
    ),
    Drill(
        8,
        "short-run",
        "The run is killed some steps after a save.",
        "The steps after it are done again with the same losses, weights and samples.",
        short_run,
    ),
)


def named(name: str) -> tuple[Drill, ...]:
    """Return the drill that is called so, by its name or its number, or all.

    Raises:
        InvalidInputError: There is none.
    """
    found = tuple(drill for drill in DRILLS if name in (ALL, drill.name, str(drill.number)))
    if not found:
        names = [drill.name for drill in DRILLS]
        raise InvalidInputError(
            f"{name!r:.80} is no drill.{meant(name, names)}", hint=f"Use {ALL}, or one of: {', '.join(names)}."
        )
    return found


def table() -> str:
    """Return the list of drills as Markdown, as it stands in the README beside this file."""
    lines = ["| | drill | what goes wrong | what must hold | not applicable |", "|--:|---|---|---|---|"]
    for drill in DRILLS:
        nowhere = "; ".join(f"`{scheme}://`: {reason}" for scheme, reason in sorted(drill.not_on.items()))
        lines.append(f"| {drill.number} | `{drill.name}` | {drill.breaks} | {drill.promise} | {nowhere} |")
    return "\n".join(lines) + "\n"
