"""Sizes and numbers, for code and for people."""

from __future__ import annotations

from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
MAX_NAMED = 8


def format_bytes(count: int) -> str:
    """Return `count` bytes for people: `0 B`, `1.5 KiB`, `3.2 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < KIB or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= KIB
    raise AssertionError("unreachable")


def counted(count: int, thing: str) -> str:
    """Return how many of a thing for people: `1 shard`, `3 shards`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def some(names: Sequence[str]) -> str:
    """Return names for people, and how many more there are: `a, b` or `a, …, h and 12 more`."""
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
