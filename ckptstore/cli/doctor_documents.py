"""What `doctor --json` prints, as plain values. The keys are stable: README.md beside this file lists them."""

from __future__ import annotations

from ckptstore.cli.access import pointed
from ckptstore.cli.documents import Document
from ckptstore.maintenance.report import Check, Report


def report_document(report: Report) -> Document:
    """Return a report as it is printed."""
    return {
        "url": report.url,
        "engine": report.engine,
        "role": report.role,
        "ok": not report.failed,
        "roles": dict(report.roles),
        "checks": [check_document(check) for check in report.checks],
        "left_behind": list(report.left_behind),
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "seconds": report.seconds,
    }


def check_document(check: Check) -> Document:
    """Return one check."""
    return {
        "group": check.group,
        "name": check.name,
        "verdict": check.verdict,
        "value": check.value,
        "unit": check.unit,
        "message": check.message,
        "hint": pointed(check.hint),
        "error": check.error.code if check.error is not None else None,
        "facts": dict(check.facts),
    }
