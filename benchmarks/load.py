"""Load a state of large tensors, from a bucket and from files in memory, and check what came."""

from __future__ import annotations

from benchmarks.save import measure_act


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    return measure_act("load", __doc__, argv)
