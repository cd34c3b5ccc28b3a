"""What drills say, for programs: JSON, and JUnit XML for whoever runs them in CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from ckptstore.drills.runner import Report
from ckptstore.drills.verdict import Drill


def document(report: Report, drills: Sequence[Drill]) -> dict[str, Any]:
    """Return a report as plain values. The keys are stable."""
    return {
        "url": report.url,
        "engine": report.engine,
        "passed": not report.failed and report.refusal is None,
        "seconds": report.seconds,
        "scratch": report.scratch,
        "left_behind": list(report.left_behind),
        "removed": list(report.removed),
        "refusal": None if report.refusal is None else report.refusal.message,
        "drills": [_line(report, drill) for drill in drills],
    }


def junit(report: Report, drills: Sequence[Drill]) -> str:
    """Return a report as JUnit XML: a test case per drill; one that is refused has failed."""
    lines = [_line(report, drill) for drill in drills]
    counts = {
        "tests": len(lines),
        "failures": sum(each["status"] in ("failed", "refused") for each in lines),
        "skipped": sum(each["status"] == "not applicable" for each in lines),
        "errors": 0,
        "time": report.seconds,
    }
    suite = ET.Element("testsuite", {"name": f"ckptstore drill {report.url}", **_texts(counts)})
    for each in lines:
        case = {"classname": f"ckptstore.drills.{report.engine}", "name": each["name"], "time": each["seconds"]}
        element = ET.SubElement(suite, "testcase", _texts(case))
        if each["status"] in ("failed", "refused"):
            ET.SubElement(element, "failure", {"message": _plain(each["seen"]), "type": each["status"]})
        elif each["status"] == "not applicable":
            ET.SubElement(element, "skipped", {"message": _plain(each["seen"])})
        else:
            ET.SubElement(element, "system-out").text = _plain(each["seen"])
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _line(report: Report, drill: Drill) -> dict[str, Any]:
    verdict = report.verdicts[drill.name]
    return {
        "number": drill.number,
        "name": drill.name,
        "status": verdict.status,
        "seen": verdict.seen,
        "seconds": verdict.seconds,
        "breaks": drill.breaks,
        "promise": drill.promise,
    }


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _plain(text: str) -> str:
    """Return text without what XML cannot hold."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
