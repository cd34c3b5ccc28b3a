"""Explore a bounded model of the commit protocol: every state within the bounds, every invariant in each of them.

The model is in `benchmarks/commit_model`, written from PROTOCOL.md. The protocol as it is must break nothing; each
weakened one must be found out, with a shortest trace. It is evidence, not proof: what needs more of anything than the
bounds allow is not found. `tests/protocol/test_model_and_code.py` holds the model against the code.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.arguments import count
from benchmarks.commit_model.explore import LIMIT, Explored, explore
from benchmarks.commit_model.invariants import CHECKED, NOT_MODELLED
from benchmarks.commit_model.runs import LARGE, MUTANTS, SMALL
from benchmarks.commit_model.state import Setting

REPORT = "MODEL.md"


def main(argv: list[str]) -> int:
    """Explore, and write the report; return 1 if the protocol breaks something or a weakened one does not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks model", description=__doc__)
    parser.add_argument("--small", action="store_true", help="the bounds of the tests: some seconds")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of a configuration or a mutant. [all]")
    parser.add_argument("--limit", type=count, default=LIMIT, help=f"states of one exploration. [{LIMIT}]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    given = parser.parse_args(argv)
    only = given.only or [*SMALL, *LARGE, *MUTANTS]
    settings = SMALL if given.small else LARGE
    rows: list[dict[str, Any]] = []
    for name, setting in settings.items():
        if name in only:
            rows.append(_row(name, "", setting, explore(setting, limit=given.limit)))
            _print(rows[-1])
    for name, mutant in MUTANTS.items():
        if name in only:
            found = explore(mutant.setting, limit=given.limit)
            rows.append(_row(name, mutant.finds, mutant.setting, found) | {"why": mutant.why})
            _print(rows[-1])
    about = _about(rows)
    path = results.write("model", rows, about=about, folder=given.results)
    (path.parent / REPORT).write_text(_report(results.read("model", folder=path.parent) or {}))
    print(path, about["states"], "states;", "all as it should be" if about["as_expected"] else "NOT as it should be")
    return 0 if about["as_expected"] else 1


def _row(name: str, finds: str, setting: Setting, found: Explored) -> dict[str, Any]:
    """Return one row of the report; `finds` is the invariant that a mutant must break, "" for the protocol as it is."""
    return {
        "name": name,
        "finds": finds,
        "as_expected": found.broken.startswith(f"{finds}:") if finds else found.complete and not found.broken,
        "bounds": _bounds(setting),
        **asdict(found),
        "seconds": round(found.seconds, 1),
    }


def _bounds(setting: Setting) -> dict[str, Any]:
    """Return what of a setting is not as usual, and the three that say how large it is."""
    always = {name: getattr(setting, name) for name in ("writers", "saves", "slots")}
    usual = {each.name: each.default for each in fields(Setting)}
    rest = {name: getattr(setting, name) for name in ("collectors", "reader", "door", "loads_any", "again")}
    spent = {name: often for name, often in setting.budget._asdict().items() if often}
    return always | {name: value for name, value in rest.items() if value != usual[name]} | spent


def _about(rows: list[dict[str, Any]]) -> dict[str, Any]:
    right = [row for row in rows if not row["finds"]]
    subjects = {name: sum(row["subjects"].get(name, 0) for row in right) for name in CHECKED}
    return {
        "states": sum(row["states"] for row in right),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "configurations": len(right),
        "mutants": len(rows) - len(right),
        "as_expected": all(row["as_expected"] for row in rows),
        "invariants_asked_in_each_state": CHECKED,
        "states_with_something_to_break": subjects,
        "not_modelled": NOT_MODELLED,
    }


def _print(row: Mapping[str, Any]) -> None:
    verdict = row["broken"] or ("nothing is broken" if row["complete"] else "the limit was reached")
    mark = "" if row["as_expected"] else "   <<< NOT AS IT SHOULD BE"
    print(f"{row['name']:40} {row['states']:9,} states {row['seconds']:6.1f} s  {verdict[:100]}{mark}", flush=True)
    for line in row["trace"] if mark else ():
        print("   ", line)


def _report(document: Mapping[str, Any]) -> str:
    """Return the short report, from what was written."""
    about, rows = document["about"], document["rows"]
    right = [row for row in rows if not row["finds"]]
    cpu, verdict = document["machine"], "All is" if about["as_expected"] else "NOT ALL IS"
    lines = [
        "# A bounded model of the commit protocol",
        "",
        (
            f"Written by `python -m benchmarks model` at {document['written_at']}, commit {document['commit']}, in "
            f"{about['seconds']:.0f} s of CPU, on {cpu['cores']} cores of {cpu['cpu']}."
        ),
        "",
        (
            f"{about['states']:,} distinct states in {about['configurations']} configurations; {about['mutants']} "
            f"weakened protocols. {verdict} as it should be. Evidence, not proof: what needs more than the bounds "
            "allow is not found."
        ),
        "",
        "| configuration | bounds | states | steps | deepest | logs | nothing left out |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in right:
        bounds = ", ".join(f"{name} {value}" for name, value in row["bounds"].items())
        whole = "yes" if row["complete"] else "no"
        lines.append(
            f"| {row['name']} | {bounds} | {row['states']:,} | {row['steps']:,} | {row['depth']} | {row['logs']:,} | "
            f"{whole} |"
        )
    lines += ["", "Every invariant is asked in every state. This many of them hold something that could break it:", ""]
    lines += ["| invariant | states |", "|---|---:|"]
    lines += [f"| {name} | {states:,} |" for name, states in about["states_with_something_to_break"].items()]
    lines += ["", "Not modelled: " + "; ".join(f"{name}, {why}" for name, why in about["not_modelled"].items()) + "."]
    lines += ["", "| weakened protocol | breaks | after steps | states seen |", "|---|---|---:|---:|"]
    lines += [
        f"| {row['name']}: {row['why']} | {row['broken'].partition(':')[0] or 'NOTHING'} | {len(row['trace'])} | "
        f"{row['states']:,} |"
        for row in rows
        if row["finds"]
    ]
    return "\n".join(lines) + "\n"
