"""`drill reshard`: from a change of topology to an entry of the matrix. torch is imported once it is asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ckptstore
from ckptstore.cli.documents import Document
from ckptstore.cli.render import print_note, print_text
from ckptstore.clock import SystemClock
from ckptstore.drills.degrees import Degrees, degrees_in
from ckptstore.drills.place import NotApplicable
from ckptstore.drills.runner import NO_TORCH, Report, check_installed
from ckptstore.drills.scenarios.reshard import Change, reshard
from ckptstore.drills.verdict import Drill
from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.wholefile import write_whole

NAME = "reshard"


def change_of(saved: str | None, now: str | None) -> Change:
    """Return the change that the options name.

    Raises:
        InvalidInputError: One is missing, or names no degrees.
    """
    if saved is None or now is None:
        raise InvalidInputError("reshard needs --from and --to.", hint="Write --from dp=8,tp=1 --to dp=6,tp=1, say.")
    return Change(degrees_in(saved, "--from"), degrees_in(now, "--to"))


def drill_of(change: Change) -> Drill:
    """Return the drill that tries a change."""
    return Drill(
        0,
        NAME,
        "The run goes on in another topology.",
        "Every whole tensor is the same bit by bit, and the losses after it are near.",
        partial(reshard, change=change),
    )


def check_matrix(matrix: Path | None, change: Change) -> None:
    """Check, before anything is tried, that the matrix may come to say what the drill shows.

    Raises:
        InvalidInputError: It forbids the change, or says something else of it.
        UnsupportedError: What is needed is not installed, or torch cannot be imported.
    """
    check_installed()
    try:
        from ckptstore.drills.evidence import check_open  # noqa: PLC0415  (it stands on torch)
    except Exception as error:
        raise UnsupportedError(
            f"Ranks cannot start: torch cannot be imported. {type(error).__name__}: {error}", hint=NO_TORCH
        ) from error

    try:
        Degrees.read(change.saved), Degrees.read(change.now)
    except NotApplicable:
        return  # the drill says so itself
    check_open(matrix, change)


def enter(matrix: Path | None, change: Change, report: Report, *, prints: bool) -> Document:
    """Enter what a drill has shown into the matrix, a file or printed; return it for JSON.

    Raises:
        InvalidInputError: The file cannot be read or written, or has changed meanwhile.
    """
    verdict = report.verdicts[NAME]
    if verdict.status != "passed":
        return {"matrix": None}
    from ckptstore.drills.evidence import Evidence, as_yaml, check_open, with_evidence  # noqa: PLC0415
    from storage_writers.saving import software  # noqa: PLC0415  (the same)

    versions = {**software(), "ckptstore": ckptstore.__version__}
    evidence = Evidence.of(change, verdict.seen, versions=versions, clock=SystemClock())
    entered = with_evidence(check_open(matrix, change), evidence)
    text = as_yaml(entered)
    if matrix is not None:
        write_whole(matrix, text.encode())
        if prints:
            print_note(f"Entered into {matrix} as verified.")
    elif prints:
        print_text(text)
    return {"matrix": text}
