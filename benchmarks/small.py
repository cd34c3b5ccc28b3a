"""Save and load many small tensors, 1 KiB each, to files in memory: what each tensor costs."""

from __future__ import annotations

from benchmarks import arguments, results
from benchmarks.rounds import Folder, Plan, chosen, interleaved

PEERS = ("ours", "FileSystemWriter")


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    parser = arguments.parser("small", __doc__, sized=False)
    parser.add_argument("--tensors", type=int, default=50_000, help="so many. [50000]")
    given = parser.parse_args(argv)
    peers = chosen(given.peers, PEERS, "file")
    rows = []
    for act in ("save", "load"):
        plan = Plan(act, "small", given.tensors, peers, given.rounds, timeout_seconds=given.timeout)
        with Folder() as place:
            rows += interleaved(plan, place, loads=act == "load")
    print(results.write("small", rows, about={"rounds": given.rounds}, folder=given.results))
    return 0 if all("failed" not in row for row in rows) else 1
