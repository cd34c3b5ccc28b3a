"""Save with some ranks, load with others: a state that is sharded by rows over all of them, as FSDP does it."""

from __future__ import annotations

from benchmarks import arguments, results
from benchmarks.counting import counted
from benchmarks.rounds import Bucket, Plan, chosen, interleaved

PEERS = ("ours", "s3torchconnector", "FsspecWriter")


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    parser = arguments.parser("reshard", __doc__, size="256M")
    parser.add_argument("--save-ranks", type=int, default=4, help="so many save. [4]")
    parser.add_argument("--load-ranks", type=int, default=2, help="so many load. [2]")
    given = parser.parse_args(argv)
    plan = Plan(
        act="load",
        kind="sharded",
        size=given.size,
        peers=chosen(given.peers, PEERS, "s3"),
        rounds=given.rounds,
        world_size=given.load_ranks,
        saved_by=given.save_ranks,
        timeout_seconds=given.timeout,
    )
    with Bucket() as place:
        rows = interleaved(plan, place, loads=True)
        wire = counted(plan, place, loads=True)
    rows = [row | {"saved_by": given.save_ranks} | wire.get(row["peer"], {}) for row in rows]
    print(results.write("reshard", rows, about={"rounds": given.rounds}, folder=given.results))
    return 0 if all("failed" not in row for row in rows) else 1
