"""`drill`: what must hold when something breaks, tried with real processes in the user's own bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.access import said
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_line, print_note, print_table, print_warning, status_of
from ckptstore.drills.catalog import DRILLS, named
from ckptstore.drills.place import DRILL_SECONDS
from ckptstore.drills.report import document, junit
from ckptstore.drills.runner import Conduct, Report, run_drills
from ckptstore.drills.verdict import Drill
from ckptstore.errors import InvalidInputError
from ckptstore.options import check_seconds

NAMES = ", ".join(f"{drill.number} {drill.name}" for drill in DRILLS)


def drill(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"Which one, by its name or number, or all: {NAMES}.")],
    url: Url,
    *,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML to this file, too.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave what was written, for a day.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long one drill may take.")] = DRILL_SECONDS,
    as_json: AsJson = False,
) -> int:
    """Try what must hold when something breaks.

    Real processes train a small network in this very bucket, under drill/ of the run's root, and something is broken
    under them. The run itself is neither read nor changed. What was written is deleted afterwards, also after Ctrl-C;
    what a killed drill left, the next one deletes.

    It exits with 1 if something did not hold, with 6 if the store may not be written to at all, else with 0.
    """
    drills = named(name)
    check_seconds(timeout=timeout)
    conduct = Conduct(said().engine, said().storage_options, timeout, keep)
    with status_of("preparing", wanted=not as_json) as status:
        report = run_drills(url, drills, conduct=conduct, watch=lambda each, _: status(f"{each.number} {each.name}"))
    if junit_file is not None:
        _write(junit_file, junit(report, drills))
    if as_json:
        print_json(document(report, drills))
    else:
        _print(report, drills)
    return Exit.UNSUPPORTED if report.refusal is not None else Exit.BAD if report.failed else Exit.FINE


def _print(report: Report, drills: tuple[Drill, ...]) -> None:
    rows = [
        (
            each.number,
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
    else:
        print_line("As promised.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error.strerror}", hint="Give another file.") from error
