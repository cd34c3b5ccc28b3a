"""What `doctor` prints for people."""

from __future__ import annotations

from typing import get_args

from ckptstore.cli.access import pointed
from ckptstore.cli.render import print_line, print_table, print_warning
from ckptstore.maintenance.report import Check, Group, Report
from ckptstore.units import counted, format_bytes

SHOWN_KEYS = 5


def print_report(report: Report) -> None:
    """Print a report: a line for each check, then what is to be done, then the answer."""
    checks = sorted(report.checks, key=lambda check: get_args(Group).index(check.group))
    print_line(f"{report.url}  (engine {report.engine})")
    print_line()
    rows = [(_loud(check), f"{check.group}: {check.name}", _value(check), check.message) for check in checks]
    print_table(("VERDICT", "WHAT", "VALUE", "WHY"), rows, right=("VALUE",))
    todo: dict[str, list[str]] = {}
    for check in checks:
        if check.hint and check.verdict != "ok":
            todo.setdefault(check.hint, []).append(f"{check.group}: {check.name}")
    if todo:
        print_line()
        print_line("To do:")
        for hint, names in todo.items():
            print_line(f"  {'; '.join(names)}")
            print_line(f"      {pointed(hint)}")
    print_line()
    print_line(_verdict(report))
    print_line(f"Others: {'; '.join(_fit(role, each) for role, each in report.roles.items() if role != report.role)}.")
    sent, received = format_bytes(report.bytes_sent), format_bytes(report.bytes_received)
    print_line(f"{report.seconds:.1f} s; {sent} sent, {received} received.")
    if report.left_behind:
        shown = ", ".join(report.left_behind[:SHOWN_KEYS])
        more = len(report.left_behind) - SHOWN_KEYS
        print_warning(
            f"{counted(len(report.left_behind), 'object')} of this examination could not be deleted: {shown}"
            f"{f' and {more} more' if more > 0 else ''}. Nobody reads them; delete them with other credentials."
        )


def _loud(check: Check) -> str:
    return check.verdict.upper() if check.verdict == "failed" else check.verdict


def _value(check: Check) -> str | None:
    if check.value is None:
        return None
    return f"{check.value} {check.unit}" if check.unit else str(check.value)


def _verdict(report: Report) -> str:
    if report.failed:
        return f"NOT FIT for a {report.role}: {len(report.failed)} failed."
    if report.untried:
        return f"Fit for a {report.role}, as far as was tried; not tried: {', '.join(report.untried)}."
    return f"Fit for a {report.role}."


def _fit(role: str, known: bool | None) -> str:  # noqa: FBT001  (the value itself)
    return f"{'perhaps fit' if known is None else 'fit' if known else 'NOT FIT'} for a {role}"
