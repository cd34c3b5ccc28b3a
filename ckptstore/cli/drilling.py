"""`drill`: what must hold when something breaks, tried with real processes in the user's own bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.access import said
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_line, print_note, print_table, print_warning, status_of
from ckptstore.cli.resharding import NAME as RESHARD
from ckptstore.cli.resharding import change_of, check_matrix, drill_of, enter
from ckptstore.drills.catalog import DRILLS, named
from ckptstore.drills.place import DRILL_SECONDS
from ckptstore.drills.report import document, junit
from ckptstore.drills.runner import Conduct, Report, run_drills
from ckptstore.drills.scenarios.reshard import Change
from ckptstore.drills.verdict import Drill
from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.urls import open_store
from ckptstore.options import check_seconds
from ckptstore.wholefile import check_writable, write_whole

NAMES = ", ".join(f"{drill.number} {drill.name}" for drill in DRILLS)


def drill(  # noqa: PLR0913  (an option each)
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"One, by its name or number, or all: {NAMES}; or reshard.")
    ],
    url: Url,
    *,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML to this file, too.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave what was written, for a day.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long one drill may take.")] = DRILL_SECONDS,
    saved: Annotated[
        str | None,
        typer.Option("--from", metavar="DEGREES", help="Of reshard: the topology that saves: dp=8,tp=1, say."),
    ] = None,
    now: Annotated[
        str | None, typer.Option("--to", metavar="DEGREES", help="Of reshard: the one that resumes.")
    ] = None,
    matrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of reshard: enter it into this matrix as verified.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Try what must hold when something breaks.

    Real processes train a small network in this very bucket, under drill/ of the run's root, and something is broken
    under them. The run itself is neither read nor changed. What was written is deleted afterwards, also after Ctrl-C;
    what a killed drill left, the next one deletes.

    reshard tries whether a run may go on in another topology (dp, tp, pp, zero, fsdp), and prints the matrix entry that
    says so, with what was compared. With --matrix it is written into that file; what the matrix forbids it never opens.

    It exits with 1 if something did not hold, with 6 if the store may not be written to at all, torch cannot be
    imported or reshard cannot build the topology, else with 0.
    """
    check_seconds(timeout=timeout)
    change = _change(name, saved, now, matrix)
    root = open_store(url, engine=said().engine, storage_options=said().storage_options).url
    for file in (matrix, junit_file):
        if file is not None:
            check_writable(file, outside=root)
    drills = named(name) if change is None else (drill_of(change),)
    if change is not None:
        check_matrix(matrix, change)
    conduct = Conduct(said().engine, said().storage_options, timeout, keep)
    with status_of("preparing", wanted=not as_json) as status:
        report = run_drills(url, drills, conduct=conduct, watch=lambda each, _: status(f"{each.number} {each.name}"))
    if junit_file is not None:
        write_whole(junit_file, junit(report, drills).encode())
    if not as_json:
        _print(report, drills)
    entered = {} if change is None else enter(matrix, change, report, prints=not as_json)
    if as_json:
        print_json({**document(report, drills), **entered})
    return _exit_of(report)


def _change(name: str, saved: str | None, now: str | None, matrix: Path | None) -> Change | None:
    if name == RESHARD:
        return change_of(saved, now)
    given = [option for option, value in (("--from", saved), ("--to", now), ("--matrix", matrix)) if value is not None]
    if given:
        raise InvalidInputError(f"{given[0]} belongs to the drill {RESHARD}.", hint="Leave it out.")
    return None


def _exit_of(report: Report) -> Exit:
    if report.refusal is not None:
        return Exit.UNSUPPORTED
    if report.failed:
        return Exit.BAD
    untried = RESHARD in report.verdicts and report.verdicts[RESHARD].status != "passed"
    return Exit.UNSUPPORTED if untried else Exit.FINE


def _print(report: Report, drills: tuple[Drill, ...]) -> None:
    rows = [
        (
            each.number or None,
            each.name,
            report.verdicts[each.name].status,
            f"{report.verdicts[each.name].seconds:.1f}",
            report.verdicts[each.name].seen,
        )
        for each in drills
    ]
    print_table(("NO", "DRILL", "VERDICT", "SECONDS", "WHAT"), rows, right=("NO", "SECONDS"))
    for place in report.removed:
        print_note(f"A killed drill had left {place}: it is gone now.")
    for key in report.left_behind:
        print_note(f"Left in {report.url}: {key}")
    if report.refusal is not None:
        print_warning(f"{report.refusal.message} {report.refusal.hint}")
    elif report.failed:
        print_line(f"NOT as promised: {', '.join(report.failed)}.", style="bold red")
    elif any(verdict.status == "passed" for verdict in report.verdicts.values()):
        print_line("As promised.")
    else:
        print_line("Nothing was tried.")
