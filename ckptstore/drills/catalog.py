"""The list of drills, and where one means nothing."""

from __future__ import annotations

from ckptstore.drills.scenarios.deleted_shard import deleted_shard
from ckptstore.drills.scenarios.lost_latest import lost_latest
from ckptstore.drills.scenarios.tampered_bytes import tampered_bytes
from ckptstore.drills.verdict import Drill
from ckptstore.errors import InvalidInputError
from ckptstore.nearest import meant

ALL = "all"

DRILLS = (
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
