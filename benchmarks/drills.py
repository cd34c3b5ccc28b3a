"""Run every drill on every place by the command that users have, and write which of them passed where.

`results/drills.json` has what was seen; `results/DRILLS.md` is the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from ckptstore.drills.catalog import DRILLS
from localstack.fake_gcs import FakeGcs
from localstack.moto import Moto
from localstack.seaweedfs import SeaweedFS
from localstack.server import Server

ROOT = Path(__file__).parents[1]
PLACES: dict[str, tuple[type[Server] | None, str | None]] = {
    "file": (None, None),
    "SeaweedFS, obstore": (SeaweedFS, "obstore"),
    "SeaweedFS, s3fs": (SeaweedFS, "s3fs"),
    "moto, obstore": (Moto, "obstore"),
    "fake-gcs, gcsfs": (FakeGcs, "gcsfs"),
}
"""The server and the engine of each."""
LIMIT_SECONDS = 3600.0


@dataclass(frozen=True)
class Ran:
    """What a command left.

    Args:
        place: Where.
        code: Its exit code.
        report: What it printed.
        seconds: How long it took, its start included.
    """

    place: str
    code: int
    report: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; exit with 1 if something did not hold somewhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks drills", description=__doc__.splitlines()[0])
    parser.add_argument("--place", action="append", choices=PLACES, help="Only here; as often as needed.")
    parser.add_argument("--drill", default="all", help="Only this one.")
    parser.add_argument("--results", type=Path, default=None, help="Folder to write to, instead of benchmarks/results.")
    given = parser.parse_args(arguments)
    ran = []
    for place in given.place or PLACES:
        ran.append(_run(place, given.drill))
        print(f"{place}: exit code {ran[-1].code} after {ran[-1].seconds:.0f} s", flush=True)
    path = results.write("drills", [_row(each) for each in ran], folder=given.results)
    table = table_of([_row(each) for each in ran])
    path.with_name("DRILLS.md").write_text(_page(table, json.loads(path.read_text())), encoding="utf-8")
    print(table)
    return max(each.code != 0 for each in ran)


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return drill by place as Markdown; what failed or means nothing somewhere stands below."""
    lines = [f"| | drill | {' | '.join(row['place'] for row in rows)} |", f"|--:|---|{'---|' * len(rows)}"]
    notes: dict[str, None] = {}
    for drill in DRILLS:
        cells = []
        for row in rows:
            told = row["drills"].get(drill.name)
            cells.append("" if told is None else f"{told['status']}, {told['seconds']:.0f} s")
            if told is not None and told["status"] == "not applicable":
                cells[-1] = "n.a."
            if told is not None and told["status"] != "passed":
                notes[f"- `{drill.name}` on {row['place']}, {told['status']}: {told['seen']}"] = None
        if any(cells):
            lines.append(f"| {drill.number} | `{drill.name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *notes]) + "\n"


def _page(table: str, document: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    return (
        f"# Drills\n\nWritten by `make drills` on {document['written_at']}, commit {document['commit']}, "
        f"with {versions}. Each "
        "column is one `ckptstore drill all URL` on a server of this machine; its first drill imports torch.\n\n"
        f"{table}"
    )


def _row(ran: Ran) -> dict[str, Any]:
    told = {each["name"]: each for each in ran.report.get("drills", ())}
    return {"place": ran.place, "exit_code": ran.code, "seconds": round(ran.seconds, 1), "drills": told}


def _run(place: str, drill: str) -> Ran:
    with _at(place) as (url, engine, environment):
        command = [sys.executable, "-m", "ckptstore.cli", "drill", drill, url, "--json"]
        command += [f"--engine={engine}"] if engine else []
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        began = time.monotonic()
        ended = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False
        )
    return Ran(place, ended.returncode, json.loads(ended.stdout), time.monotonic() - began)


@contextlib.contextmanager
def _at(place: str) -> Iterator[tuple[str, str | None, Mapping[str, str]]]:
    server, engine = PLACES[place]
    if server is None:
        with tempfile.TemporaryDirectory(prefix="ckptstore-drills-") as folder:
            yield f"{folder}/run", engine, {}
        return
    with server() as running:
        yield running.url("drills/run"), engine, running.environment


if __name__ == "__main__":
    sys.exit(main())
