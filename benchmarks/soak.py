"""Many background saves, one after the other: memory, descriptors and threads must stay flat, by the system's account.

Three ways to save take turns in one process, to files in memory. What is saved is deleted as it goes. Flat means: from
the second tenth to the last fifth, the most that was seen grew by no more than the allowance of each measure.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

import storage_writers as sw
from benchmarks import results
from benchmarks.arguments import nbytes
from ckptstore.objectstore.urls import open_store
from ckptstore.units import MIB

ALLOWED = {"resident_mib": 24.0, "descriptors": 2, "threads": 2, "worker_resident_mib": 24.0, "worker_descriptors": 2}
"""How much each may grow. Memory: what the allocator keeps and the log of 200 saves; 1 MiB a save would be 180."""

Begin = Callable[..., Future[Any]]


def by_dcp(kind: AsyncCheckpointerType) -> Begin:
    """Return DCP's own call, with the writer's group."""

    def begin(state: dict[str, Any], *, checkpoint_id: str, storage_writer: sw.CkptStoreWriter) -> Future[Any]:
        future = async_save(
            state,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            process_group=storage_writer.process_group,
            async_checkpointer_type=kind,
        )
        assert isinstance(future, Future)  # noqa: S101  (the writer stages: there is no second future for that)
        return future

    return begin


WAYS: dict[str, Begin] = {
    "sw.async_save": sw.async_save,
    "dcp.async_save": by_dcp(AsyncCheckpointerType.THREAD),
    "dcp.async_save by process": by_dcp(AsyncCheckpointerType.PROCESS),
}


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code: 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--saves", type=int, default=200, help="so many. [200]")
    parser.add_argument("--size", type=nbytes, default=nbytes("8M"), help="of the state. [8M]")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="joined by commas. [all]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    given = parser.parse_args(argv)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  (files in memory, in a folder of ours)
    folder = tempfile.mkdtemp(prefix="ckptstore-soak-", dir=memory)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        began = time.monotonic()
        seen = soak(f"{folder}/run", [WAYS[way] for way in given.ways], saves=given.saves, size=given.size)
        seconds = time.monotonic() - began
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)
    rows = [judged(measure, [each[measure] for each in seen if measure in each]) for measure in ALLOWED]
    rows = [row for row in rows if row]
    for row in rows:
        print(f"{row['measure']:22} {row['early']:9} {row['late']:9}  {'flat' if row['flat'] else 'GROWS'}")
    about = {"saves": given.saves, "size": given.size, "ways": given.ways, "seconds": round(seconds, 1)}
    print(results.write("soak", rows, about=about, folder=given.results))
    return 0 if all(row["flat"] for row in rows) else 1


def soak(root: str, ways: list[Begin], *, saves: int, size: int) -> list[dict[str, float]]:
    """Save so often, and return what the process and the one that saves for it held after each save."""
    state = {f"w{index}": torch.ones(size // 4 // 8) for index in range(8)} | {"step": 0, "history": [0]}
    store, seen = open_store(root), []
    with sw.CkptStoreWriter(root) as writer:
        for step in range(saves):
            begin = ways[step % len(ways)]
            begin(state, checkpoint_id=f"step-{step}", storage_writer=writer).result(120)
            seen.append(held())
            for info in list(store.list("data/")):
                store.delete(info.key)
    return seen


def held() -> dict[str, float]:
    """Return what the operating system says that is held now."""
    gc.collect()
    here = measured("self")
    worker = getattr(executor._CHECKPOINT_PROCESS, "_save_process", None)  # noqa: SLF001  (it has no other name)
    if worker is not None:
        there = measured(str(worker.pid))
        here |= {f"worker_{name}": there[name] for name in ("resident_mib", "descriptors")}
    return here


def measured(process: str) -> dict[str, float]:
    """Return the memory, descriptors and threads of a process."""
    folder = Path("/proc") / process
    return {
        "resident_mib": round(int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB, 1),
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


def judged(measure: str, values: list[float]) -> dict[str, Any]:
    """Compare the most of the first fifth, without the warm-up in it, with the most of the last."""
    fifth = len(values) // 5
    if not fifth:
        return {}
    early, late = max(values[fifth // 2 : fifth]), max(values[-fifth:])
    return {
        "measure": measure,
        "early": early,
        "late": late,
        "max": max(values),
        "allowed": ALLOWED[measure],
        "flat": late - early <= ALLOWED[measure],
    }
