"""Run the conformance suite on every engine and write what came of it into the room's README.

python tests/conformance/table.py        (or: make table)
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from ckptstore.testing import conformance

HERE = Path(__file__).parent
README = HERE.parents[1] / "ckptstore" / "objectstore" / "README.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NODE = re.compile(r".*::Test(\w+)::(test_\w+)(\[.*)?")
ORDER = ("Memory", "Local", "Obstore", "S3fs", "Gcsfs", "Fsspec")
CLASS = re.compile(r"^class Test(\w+)\((?:\w+\.)?(?:\w*Conformance|OnMemory|OnJuiceFS)\)", re.MULTILINE)


def rows() -> dict[str, str]:
    """Return the promises: the tests of the suite, as sentences, by name."""
    suite = [*reversed(conformance.StoreConformance.__mro__), conformance.RefusedConformance]
    names = [name for part in suite for name in vars(part) if name.startswith("test_")]
    return {name: name.removeprefix("test_").replace("_", " ") for name in names}


def columns() -> list[str]:
    """Return the engines: the classes of this folder, by name; the wrappers last."""
    names = [name for path in sorted(HERE.glob("test_*.py")) for name in CLASS.findall(path.read_text())]
    return sorted(names, key=lambda name: [not name.startswith(engine) for engine in ORDER])


class Collected:
    """A plugin that keeps every result by test and class."""

    def __init__(self) -> None:
        self.results: dict[tuple[str, str], set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the result of a test, also of its set-up."""
        match = NODE.fullmatch(report.nodeid)
        if match and (report.when == "call" or report.outcome != "passed"):
            self.results[match[2], match[1]].add(report.outcome)


def cell(outcomes: set[str]) -> str:
    """Return what stands in the table for the results of one promise on one engine."""
    if "failed" in outcomes:
        return "**no**"
    return "yes" if "passed" in outcomes else "-" if outcomes else ""


def written(results: dict[tuple[str, str], set[str]]) -> str:
    """Return the table in Markdown."""
    heads = columns()
    lines = ["| promise | " + " | ".join(label(head) for head in heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for test, sentence in rows().items():
        cells = [cell(results.get((test, head), set())) for head in heads]
        lines.append(f"| {sentence} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def label(name: str) -> str:
    """Return the heading of a column: `S3fsOnMoto` becomes `s3fs on Moto`."""
    engine, _, server = name.partition("On")
    return f"{engine.lower()} on {server}" if server else engine.lower()


def main() -> int:
    """Run, write, and return pytest's exit code."""
    os.chdir(HERE.parents[1])
    collected = Collected()
    code = pytest.main(["-q", "-n", "2", "--dist", "loadscope", str(HERE), "-k", "Test"], plugins=[collected])
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + written(collected.results) + END + rest.partition(END)[2])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
