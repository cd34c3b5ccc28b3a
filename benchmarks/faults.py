"""One table of what holds each invariant: drawn histories, every fault at every call, the bounded model, the mutants.

It joins what `simulate` and `model` have written. What is not there is called missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.simulate import INVARIANTS

REPORT = "FAULTS.md"
MISSING = "missing"


def main(argv: list[str]) -> int:
    """Write the table; return 1 if an input is missing or says that something is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    folder = parser.parse_args(argv).results or results.FOLDER
    simulated, model = results.read("simulation", folder=folder), results.read("model", folder=folder)
    path = folder / REPORT
    path.write_text("\n".join(report(simulated, model)) + "\n")
    print(path)
    broken = simulated is not None and bool(simulated["about"]["broken"])
    return 1 if broken or simulated is None or model is None else 0


def report(simulated: Mapping[str, Any] | None, model: Mapping[str, Any] | None) -> list[str]:
    """Return the lines of the table from what was written; None is missing."""
    rows = {row["invariant"]: row for row in simulated["rows"]} if simulated else {}
    subjects = model["about"]["states_with_something_to_break"] if model else {}
    not_modelled = model["about"]["not_modelled"] if model else {}
    mutants = simulated["about"]["mutants"] if simulated else []
    lines = ["# What was done to each invariant", "", *_sources(simulated, model), ""]
    lines += [
        "| | looks in drawn histories | seeds | killed in them | states of the model | mutants caught | broken |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for name in INVARIANTS:
        row = rows.get(name)
        counts = [f"{row[key]:,}" for key in ("states", "seeds", "kills")] if row else [MISSING] * 3
        states = f"{subjects[name]:,}" if name in subjects else "not modelled" if name in not_modelled else MISSING
        own = sorted({mutant["name"] for mutant in mutants if mutant["invariant"] == name and mutant["caught"]})
        modelled = _of_the_model(model, name)
        named = ", ".join([*own, *([f"{modelled} of the model"] if modelled else [])]) or "none"
        broken = f"{row['violations']}" if row else MISSING
        lines.append(f"| {name} | {' | '.join(counts)} | {states} | {named} | {broken} |")
    return lines + _details(simulated)


def _of_the_model(model: Mapping[str, Any] | None, invariant: str) -> int:
    rows = model["rows"] if model else []
    return sum(row["finds"] == invariant and row["as_expected"] for row in rows)


def _sources(simulated: Mapping[str, Any] | None, model: Mapping[str, Any] | None) -> list[str]:
    if simulated is None:
        said = [f"Drawn histories: {MISSING} (`make simulate`)."]
    else:
        about = simulated["about"]
        counted = f"{about['seeds']:,} seeds from {about['first_seed']}, {about['steps']:,} store calls"
        rate = f"{len(about['broken'])} broken, {about['simulations_per_cpu_second']} a second on one core"
        written = f"by `make simulate` at {simulated['written_at']}, commit {simulated['commit']}"
        said = [f"Drawn histories: {counted}, {rate}; written {written}."]
    if model is None:
        return [*said, "", f"Bounded model: {MISSING} (`make model`)."]
    written = f"by `make model` at {model['written_at']}, commit {model['commit']}"
    return [*said, "", f"Bounded model: {model['about']['states']:,} states; written {written}."]


def _details(simulated: Mapping[str, Any] | None) -> list[str]:
    if simulated is None:
        return []
    about = simulated["about"]
    lines = ["", "## Faults in the drawn histories", "", "| what went wrong | how often |", "|---|---:|"]
    lines += [f"| {kind} | {often:,} |" for kind, often in about["faults"].items()]
    lines += ["", "## Where processes were killed", "", "| call, key, how | how often |", "|---|---:|"]
    lines += [f"| {place} | {often:,} |" for place, often in about["kills"].items()]
    lines += ["", "## Every fault at every call", "", "| enumeration | plays | broken |", "|---|---:|---:|"]
    lines += [f"| {name} | {each['plays']:,} | {len(each['broken'])} |" for name, each in about["enumerations"].items()]
    lines += ["", "## Weakened protocols", "", "| what | breaks | found by |", "|---|---|---|"]
    for mutant in about["mutants"]:
        where = (
            mutant["caught"].partition(":")[0] if mutant["caught"] and mutant["by"] == "simulation" else mutant["by"]
        )
        found = where if mutant["caught"] else "NOTHING"
        lines.append(f"| {mutant['name']}: {mutant['why']} | {mutant['invariant']} | {found} |")
    return lines
