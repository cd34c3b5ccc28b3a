"""Save in the background: how long the caller stands still, and what three saves in a row hold. Files in memory."""

from __future__ import annotations

from benchmarks import arguments, results
from benchmarks.rounds import Folder, Plan, chosen, interleaved
from benchmarks.workloads import shape_of

PEERS = ("ours", "FileSystemWriter")
BUDGETS = {"whole": 1.0, "half": 0.5}
"""How much of the state may be staged at once. Only ours has such a limit."""


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    given = arguments.parser("stall", __doc__, size="512M").parse_args(argv)
    peers = chosen(given.peers, PEERS, "file")
    nbytes = shape_of("dense", given.size).nbytes
    rows = []
    for act in ("stall", "pile_up"):
        for budget, share in BUDGETS.items():
            limited = [peer for peer in peers if budget == "whole" or peer == "ours"]
            options = {"staging_bytes": int(nbytes * share)}
            plan = Plan(act, "dense", given.size, limited, given.rounds, options=options, timeout_seconds=given.timeout)
            with Folder() as place:
                rows += [row | {"budget": budget} for row in interleaved(plan, place)]
    print(results.write("stall", rows, about={"rounds": given.rounds}, folder=given.results))
    return 0 if all("failed" not in row for row in rows) else 1
