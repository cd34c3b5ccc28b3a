"""The shape of MLPerf Storage's checkpoint workload: 8 ranks, model and optimizer, several saves and then loads.

It is not that benchmark: the sizes are scaled, and processes on one machine share its cores. Reported is what it
reports: the longest save and load, and the throughput of the slowest.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any

from benchmarks import arguments, results
from benchmarks.rounds import Bucket, Plan, chosen, interleaved
from ckptstore.units import MIB

PEERS = ("ours", "raw", "s3torchconnector", "FsspecWriter", "torch.save")
PROFILES = {"8b": "llama-8b"}


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    parser = arguments.parser("mlperf", __doc__, sized=False, rounds=1)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--profile", choices=PROFILES, default="8b", help="the model. [8b]")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 64), help="a share of its 105 GiB. [1/64]")
    parser.add_argument("--ranks", type=int, default=8, help="so many processes. [8]")
    parser.add_argument("--checkpoints", type=int, default=3, help="saved, then loaded; MLPerf: 10. [3]")
    given = parser.parse_args(argv)
    plan = Plan(
        act="rounds",
        kind=PROFILES[given.profile],
        size=float(given.scale),
        peers=chosen(given.peers, PEERS, "s3"),
        rounds=given.rounds,
        world_size=given.ranks,
        options={"checkpoints": given.checkpoints},
        timeout_seconds=given.timeout,
    )
    with Bucket() as place:
        rows = [_as_they_report(row) for row in interleaved(plan, place)]
    about = {"rounds": given.rounds, "checkpoints": given.checkpoints, "scale": str(given.scale)}
    print(results.write("mlperf", rows, about=about, folder=given.results))
    return 0 if all("failed" not in row for row in rows) else 1


def _as_they_report(row: dict[str, Any]) -> dict[str, Any]:
    for what in ("save", "load") if "bytes" in row else ():
        longest = row[f"{what}_wall_seconds"]["max"]
        row[f"{what}_max_duration_seconds"] = longest
        row[f"{what}_min_throughput_mib_per_second"] = round(row["bytes"] / MIB / longest, 1)
        print(f"{row['peer']:20} {what}: at most {longest:.2f} s, at least {row['bytes'] / MIB / longest:.0f} MiB/s")
    return row
