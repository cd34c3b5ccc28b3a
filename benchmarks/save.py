"""Save a state of large tensors, to a bucket and to files in memory."""

from __future__ import annotations

from typing import Any

from benchmarks import arguments, results
from benchmarks.counting import counted
from benchmarks.rounds import Bucket, Folder, Plan, chosen, interleaved

PEERS = {
    "s3": ("ours", "ours-unchecked", "raw", "raw-unchecked", "s3torchconnector", "FsspecWriter", "torch.save"),
    "file": ("ours", "raw-file", "FileSystemWriter", "torch_checkpointing", "torch.save"),
}


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    return measure_act("save", __doc__, argv)


def measure_act(act: str, description: str | None, argv: list[str]) -> int:
    """Measure one act of every peer in both kinds of places, and write what came of it."""
    parser = arguments.parser(act, description)
    parser.add_argument("--store", choices=("s3", "file"), help="only there. [both]")
    parser.add_argument("--folder", help="for files: a folder to measure in, on a disk, say. [/dev/shm]")
    given = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for scheme in (given.store,) if given.store else ("s3", "file"):
        plan = Plan(
            act=act,
            kind="dense",
            size=given.size,
            peers=chosen(given.peers, PEERS[scheme], scheme),
            rounds=given.rounds,
            timeout_seconds=given.timeout,
        )
        with Bucket() if scheme == "s3" else Folder(given.folder) as place:
            found = interleaved(plan, place, loads=act == "load")
            if isinstance(place, Bucket):
                wire = counted(plan, place, loads=act == "load")
                found = [row | wire.get(row["peer"], {}) for row in found]
        rows += found
    name = act if given.folder is None else f"{act}-on-disk"
    print(results.write(name, rows, about={"rounds": given.rounds, "folder": given.folder}, folder=given.results))
    return 0 if all("failed" not in row for row in rows) else 1
