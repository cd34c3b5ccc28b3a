"""The chart of what was measured on a bucket, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("save", "cpu_seconds_per_gib", "save: client CPU seconds per GiB"),
    ("load", "cpu_seconds_per_gib", "load: client CPU seconds per GiB"),
    ("save", "wall_seconds", "save: seconds"),
    ("load", "wall_seconds", "load: seconds"),
    ("save", "peak_extra_mib", "save: peak extra MiB"),
    ("load", "peak_extra_mib", "load: peak extra MiB"),
)
OURS, LIMIT, OTHER = "#0b6e4f", "#9aa5b1", "#c9793a"


def draw(documents: Mapping[str, Mapping[str, Any] | None], path: Path) -> bool:
    """Draw what `documents` say into `path`; return False where matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  (not everybody has it)
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(3, 2, figsize=(10, 8), constrained_layout=True)
    for axis, (name, field, title) in zip(axes.flat, PANELS, strict=True):
        document = documents.get(name)
        rows = [row for row in (document["rows"] if document else ()) if row["store"] == "s3" and field in row]
        _bars(axis, rows, field)
        axis.set_title(title, fontsize=9, loc="left")
    figure.suptitle("One process and a local S3 server: medians, with the range of all rounds", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], field: str) -> None:
    names = [row["peer"] for row in rows]
    medians = [row[field]["median"] for row in rows]
    below = [row[field]["median"] - row[field]["min"] for row in rows]
    above = [row[field]["max"] - row[field]["median"] for row in rows]
    colors = [OURS if name.startswith("ours") else LIMIT if name.startswith("raw") else OTHER for name in names]
    axis.barh(names, medians, xerr=(below, above), color=colors, error_kw={"lw": 0.8, "capsize": 2})
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for at, row in enumerate(rows):
        axis.annotate(f"  {medians[at]:.3g}", (row[field]["max"], at), fontsize=8, va="center")
    axis.margins(x=0.15)
    axis.set_xlim(left=0)
