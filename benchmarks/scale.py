"""What the coordinator pays for planning, gathering and committing a save of very many ranks; one process plays all.

Nothing is uploaded: the shards are announced to a store in memory. What every rank does for itself is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import results
from benchmarks.measure import Cost, measured, settle
from ckptstore.format.checksum import DIGEST_BYTES
from ckptstore.format.shard import Shard
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import ObjectInfo
from ckptstore.units import MIB
from storage_writers import CkptStoreWriter, SavePlanner
from storage_writers.packed import PackedItems, PackedPaths, index_of, rows_of
from storage_writers.planning import Ticket
from storage_writers.receipts import Receipt

ITEMS = 300
REPLICATED = 10
HEADER_BYTES = 30_000
DCP_RANKS = 1000
"""Above, DCP's own global plan is not measured: it takes minutes and gigabytes."""

T = TypeVar("T")


class Announced(MemoryStore):
    """A store in memory that believes that an object is there."""

    def announce(self, shard: Shard) -> None:
        """Remember the size of a shard that was never sent."""
        self._objects[shard.path] = b"", ObjectInfo(shard.path, shard.size, shard.etag, 0.0)


def local_plan(rank: int, ranks: int, *, items: int = ITEMS) -> SavePlan:
    """Return what a rank of an FSDP job plans, once pickled: a row of every matrix, a few tensors that all hold.

    Made as columns at once: of 10,000 ranks the making would take longer than all that is measured.
    """
    keys = _keys(items)
    width, properties = 4, TensorProperties(torch.float32)
    origin, row = torch.Size([0, 0]), torch.Size([1, width])
    own, whole = torch.Size([rank, 0]), torch.Size([ranks, width])
    few, many = REPLICATED, items - REPLICATED
    columns = (
        keys,
        (WriteItemType.TENSOR,) * few + (WriteItemType.SHARD,) * many,
        (origin,) * few + (own,) * many,
        (row,) * items,
        (row,) * few + (whole,) * many,
        (properties,) * items,
    )
    planned: Any = PackedItems(*columns)
    return SavePlan(planned, planner_data=PackedPaths(keys, {}))


@functools.cache
def _keys(items: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{index // 10}.block.{index % 10}.weight" for index in range(items))


def result_of(plan: SavePlan, store: Announced) -> list[WriteResult]:
    """Return what a rank hands in after it has written its plan, and make the store believe it."""
    ticket: Ticket = plan.storage_data
    rows = [*rows_of(plan.items)]
    sizes = [16] * len(rows)  # four numbers each
    columns = (
        tuple(row.key for row in rows),
        ("float32",) * len(rows),
        tuple(tuple(row.size or ()) for row in rows),
        tuple(tuple(row.offset or ()) for row in rows),
        tuple(tuple(row.lengths or ()) for row in rows),
        tuple(sizes),
    )
    header_bytes, end = HEADER_BYTES, HEADER_BYTES + sum(sizes)
    size = end + len(rows) * DIGEST_BYTES
    key = ticket.stem.shard_key(ticket.rank)
    shard = Shard(ticket.rank, key, size, None, "0" * 64, header_bytes, "0" * 64, end, "0" * 64)
    store.announce(shard)
    return [WriteResult(index_of(rows[0].key, rows[0].offset), size, Receipt(shard, columns, {}))]


class Coordinator:
    """Goes through a save of `ranks` ranks and keeps what each phase cost."""

    def __init__(self, ranks: int, *, items: int = ITEMS) -> None:
        self.ranks, self.items = ranks, items
        self.phases: dict[str, Cost] = {}
        self.bytes_sent: dict[str, int] = {}

    def save(self, *, with_dcp: bool) -> None:
        """Do all of it."""
        store = Announced("memory://scale")
        writer = cast("Any", CkptStoreWriter)(store)  # AsyncStager is a protocol; mypy takes this for abstract
        writer.reset("step-1")
        save = writer._session.save  # noqa: SLF001  (this process plays all ranks)
        save.peers = dataclasses.replace(save.peers, world_size=self.ranks)
        plans = self.gathered("plans", (local_plan(rank, self.ranks, items=self.items) for rank in range(self.ranks)))
        if with_dcp:
            usual = [_usual(plan) for plan in plans]
            self.phase("DCP's global plan", lambda: DefaultSavePlanner().create_global_plan(usual))
            del usual
        planned, metadata = self.phase("global plan", lambda: SavePlanner().create_global_plan(plans))
        plans.clear()
        ticketed = self.phase("prepare_global_plan", lambda: writer.prepare_global_plan(planned))
        planned.clear()
        sent = self.phase("scatter plans", lambda: [pickle.dumps(plan) for plan in ticketed])
        self.bytes_sent["scattered"] = sum(map(len, sent))
        ticketed.clear()
        written = self.gathered("results", (result_of(_loaded(body), store) for body in sent))
        self.phase("finish", lambda: writer.finish(metadata, written))
        told = self.phase("broadcast metadata", lambda: pickle.dumps(metadata))
        self.bytes_sent["metadata, to each rank"] = len(told)

    def gathered(self, what: str, of_ranks: Iterator[T]) -> list[T]:
        """Return what all ranks say, as it comes out of DCP's gather."""
        bodies = [pickle.dumps(each) for each in of_ranks]
        self.bytes_sent[what] = sum(map(len, bodies))
        gc.collect()
        return self.phase(f"gather {what}", lambda: [_loaded(body) for body in bodies])

    def phase(self, name: str, work: Callable[[], T]) -> T:
        """Do a part and keep what it cost."""
        found: list[T] = []
        self.phases[name] = measured(lambda: found.append(work()))
        return found[0]

    def rows(self, peak_bytes: int) -> dict[str, Any]:
        """Return what was measured."""
        items = self.ranks * self.items
        ours = [name for name in self.phases if not name.startswith("DCP")]
        seconds = sum(self.phases[name].cpu_seconds for name in ours)
        return {
            "ranks": self.ranks,
            "items": items,
            "seconds": round(seconds, 3),
            "microseconds_per_item": round(seconds / items * 1e6, 2),
            "peak_mib": round(peak_bytes / MIB, 1),
            "bytes_per_item": {name: round(size / items, 1) for name, size in self.bytes_sent.items()},
            "phases": {
                name: {"seconds": round(cost.cpu_seconds, 3), "extra_mib": round(cost.peak_extra_bytes / MIB, 1)}
                for name, cost in self.phases.items()
            },
        }


def _usual(plan: SavePlan) -> SavePlan:
    """Return a plan as DCP's own planner hands it in."""
    paths: dict[str, Any] = {}
    plan.planner_data.add_to(paths)
    return SavePlan([*plan.items], planner_data=paths)


def _loaded(body: bytes) -> Any:
    return pickle.loads(body)  # noqa: S301  (made here)


def one(ranks: int, *, items: int, with_dcp: bool) -> dict[str, Any]:
    """Return what a save of `ranks` ranks costs, in this process."""
    warnings.simplefilter("ignore")
    coordinator = Coordinator(ranks, items=items)
    Coordinator(2).save(with_dcp=with_dcp)  # what is imported and made once
    settle()
    cost = measured(lambda: coordinator.save(with_dcp=with_dcp))
    return coordinator.rows(cost.peak_extra_bytes)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--ranks", default="10,100,1000", help="joined by commas. [10,100,1000]")
    parser.add_argument("--items", type=int, default=ITEMS, help="of each rank. [300]")
    parser.add_argument("--no-dcp", action="store_true", help="leave DCP's own global plan out")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    given = parser.parse_args(argv)
    counts = [int(each) for each in given.ranks.split(",")]
    if given.one:
        print(json.dumps(one(counts[0], items=given.items, with_dcp=not given.no_dcp)))
        return 0
    rows = []
    for ranks in counts:
        words = [sys.executable, "-m", "benchmarks", "scale", "--one", f"--ranks={ranks}", f"--items={given.items}"]
        words += ["--no-dcp"] if given.no_dcp or ranks > DCP_RANKS else []
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
        print(json.dumps(rows[-1], indent=1))
    print(results.write("scale", rows, about={"items": given.items}, folder=given.results))
    return 0
