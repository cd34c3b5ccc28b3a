"""The list of drills, and where one means nothing."""

from __future__ import annotations

from ckptstore.drills.scenarios.asked_to_stop import asked_to_stop
from ckptstore.drills.scenarios.between_micro_steps import between_micro_steps
from ckptstore.drills.scenarios.collected_while_read import collected_while_read
from ckptstore.drills.scenarios.deleted_shard import deleted_shard
from ckptstore.drills.scenarios.expired_credentials import expired_credentials
from ckptstore.drills.scenarios.killed_rank import killed_rank
from ckptstore.drills.scenarios.lost_latest import lost_latest
from ckptstore.drills.scenarios.lost_reply import lost_reply
from ckptstore.drills.scenarios.no_room import no_room
from ckptstore.drills.scenarios.other_world import other_world
from ckptstore.drills.scenarios.short_run import short_run
from ckptstore.drills.scenarios.silent_store import silent_store
from ckptstore.drills.scenarios.stepped_clock import stepped_clock
from ckptstore.drills.scenarios.tampered_bytes import tampered_bytes
from ckptstore.drills.scenarios.throttling import throttling
from ckptstore.drills.scenarios.two_jobs import two_jobs
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
    Drill(
        9,
        "two-jobs",
        "A second job is started on the run while the first one saves.",
        "The first is fenced on every rank, for good; the second goes on.",
        two_jobs,
    ),
    Drill(
        10,
        "lost-reply",
        "The reply to the commit is lost.",
        "It is committed once and told of once, also where it arrived twice or never.",
        lost_reply,
    ),
    Drill(
        11,
        "expired-credentials",
        "The credentials of one rank end in the middle of an upload.",
        "Every rank is told what to do, nothing is committed, and after a new login the next save is.",
        expired_credentials,
        not_on={"file": "Files have no credentials that end."},
    ),
    Drill(
        12,
        "no-room",
        "The disk or the quota is full, and the store says so, or does not.",
        "Nothing half-written is committed, and the next save is, once there is room.",
        no_room,
    ),
    Drill(
        13,
        "throttling",
        "The store refuses many requests, then all.",
        "Saves end well or fail in time, and nothing piles up.",
        throttling,
    ),
    Drill(
        14,
        "collected-while-read",
        "Checkpoints are collected while they are read.",
        "With a pin all is read; without one all, or an error that says so. Never a mixture.",
        collected_while_read,
    ),
    Drill(
        15,
        "asked-to-stop",
        "SIGTERM comes, half a minute before the end.",
        "The job saves once more and ends with 143 in time; the next one goes on from there.",
        asked_to_stop,
    ),
    Drill(
        16,
        "stepped-clock",
        "The clock of a host is a day ahead, or behind.",
        "What is newest, and what may be deleted, is not decided by it.",
        stepped_clock,
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
