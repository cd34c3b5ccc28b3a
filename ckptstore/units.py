"""Sizes and numbers, for code and for people."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB


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
