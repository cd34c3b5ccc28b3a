"""The table of aims, a table of every benchmark, and a chart, from what is in the folder of results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.aims import Aim, aims_of
from benchmarks.chart import draw

MEASURED = ("save", "load", "save-on-disk", "load-on-disk", "small", "stall", "reshard", "mlperf")
REPORT, CHART = "REPORT.md", "chart.png"
_COLUMNS = {
    "wall_seconds": "wall, s",
    "cpu_seconds_per_gib": "CPU s per GiB",
    "peak_extra_mib": "peak extra, MiB",
    "blocked_seconds": "blocked, s",
    "copy_seconds": "one copy, s",
    "save_wall_seconds": "a save, s",
    "load_wall_seconds": "a load, s",
}
_PLAIN = {
    "requests": "requests",
    "wire_bytes": "bytes on the wire",
    "save_max_duration_seconds": "longest save, s",
    "save_min_throughput_mib_per_second": "slowest save, MiB/s",
    "load_max_duration_seconds": "longest load, s",
    "load_min_throughput_mib_per_second": "slowest load, MiB/s",
}
_WHERE = ("act", "store", "ranks", "budget", "peer")


def main(argv: list[str]) -> int:
    """Write the report; return 1 if an aim is not met, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=results.FOLDER)
    folder: Path = parser.parse_args(argv).results
    documents = {name: results.read(name, folder=folder) for name in MEASURED}
    aims = aims_of(documents)
    drawn = draw(documents, folder / CHART)
    if not drawn:
        print("There is no chart: matplotlib is not installed (pip install 'ckptstore[bench]').")
    text = "\n".join(_report(documents, aims, drawn=drawn)) + "\n"
    (folder / REPORT).write_text(text)
    print(text)
    return 1 if any(aim.is_met is False for aim in aims) else 0


def _report(documents: Mapping[str, dict[str, Any] | None], aims: list[Aim], *, drawn: bool) -> Iterator[str]:
    yield "# What was measured"
    yield ""
    yield "Made by `python -m benchmarks report` from the JSON files beside it. How it was measured: ../README.md."
    yield ""
    yield "| aim | at most | median | min to max | rounds | met | others |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(_aim_line, aims)
    if drawn:
        yield ""
        yield f"![Medians with their ranges]({CHART})"
    for name, document in documents.items():
        if document is not None:
            yield ""
            yield from _section(name, document)


def _aim_line(aim: Aim) -> str:
    peers = ", ".join(f"{name} {value:g}" for name, value in aim.peers.items())
    found = aim.found
    measured = (
        "| | | |" if found is None else f"| {found.median:.2f} | {_range(found.least, found.most)} | {found.rounds} |"
    )
    met = {None: "not measured", True: "yes", False: "**no**"}[aim.is_met]
    return f"| {aim.what} | {aim.limit:g} {measured} {met} | {peers} |"


def _section(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    rows = document["rows"]
    where = [key for key in _WHERE if any(key in row for row in rows)]
    spreads = [key for key in _COLUMNS if any(key in row for row in rows)]
    plain = [key for key in _PLAIN if any(key in row for row in rows)]
    machine, versions = document["machine"], document["versions"]
    known = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    yield f"## {name}"
    yield ""
    yield f"{document['written_at']}, commit {str(document['commit'])[:12]}; {_about(document)}."
    yield f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {machine['system']};"
    yield f"Python {machine['python']}, {known}."
    yield ""
    heads = [*where, *(_COLUMNS[key] for key in spreads), *(_PLAIN[key] for key in plain)]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        cells = [str(row.get(key, "")) for key in where]
        cells += [_cell(row[key]) if key in row else "" for key in spreads]
        cells += [str(row.get(key, "")) for key in plain]
        yield f"| {' | '.join(cells)} |{' failed' if 'failed' in row else ''}"


def _about(document: Mapping[str, Any]) -> str:
    sizes = sorted({row["bytes"] for row in document["rows"] if "bytes" in row})
    about = {name: value for name, value in document["about"].items() if value is not None}
    return "; ".join([*(f"{name} {value}" for name, value in about.items()), *(f"{size} bytes" for size in sizes)])


def _cell(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.3g} ({_range(spread['min'], spread['max'])})"


def _range(least: float, most: float) -> str:
    return f"{least:.3g} to {most:.3g}"
