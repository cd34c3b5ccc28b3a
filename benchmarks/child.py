"""One measurement in a process of its own, or in one for each rank.

The state is made, the peer's modules are imported and it has saved (and loaded) something little before the clock
starts; what was loaded is compared with what was saved after it has stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.measure import Cost
from ckptstore.units import MIB

LITTLE_BYTES = 2 * MIB
POLL_SECONDS = 0.02
SAID_CHARACTERS = 1500
BEGIN = "CKPTSTORE_BENCHMARK_BEGINS"
"""In the environment: a URL that is asked for when the clock starts, so that who counts knows."""
_ENVIRONMENT_OF_CLIENTS = ("AWS_", "FSSPEC_")


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured.

    Args:
        act: A function of `benchmarks.acts`.
        peer: A name in `PEERS`.
        root: Where it saves.
        kind, size: Of the state: see `shape_of`.
        world_size: So many processes do it together.
        options: For the act.
    """

    act: str
    peer: str
    root: str
    kind: str
    size: float
    world_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Args:
        cost: Of all ranks: the longest time, the CPU seconds of all together, the memory of the one with the most.
        nbytes: How many bytes the state has.
        facts: What else the act found: numbers, or lists of them. Of several ranks the largest.
    """

    cost: Cost
    nbytes: int
    facts: dict[str, Any] = field(default_factory=dict)


class JobFailedError(Exception):
    """A process of a job failed, or did not end in time. The end of what it said is in the message."""


def warm_up_root(root: str) -> str:
    """Return where a peer warms up that will load what was saved at `root`."""
    return f"{root}-warm-up"


def run(job: Job, *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600.0) -> Outcome:
    """Do a job in fresh processes, forked from one that has imported torch and done nothing else.

    Args:
        job: What.
        environment: How the store is reached. What this process knows of other stores is not passed on.
        timeout_seconds: After this long the processes are killed.

    Raises:
        JobFailedError: One failed, or time was up.

    If killed: the processes end with what they do now.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["benchmarks.acts"])
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as name:
        folder = Path(name)
        processes = [
            forks.Process(target=_do, args=(job, folder, rank, dict(environment or {})), daemon=True)
            for rank in range(job.world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, job, folder, timeout_seconds)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        told = [json.loads((folder / f"result.{rank}").read_text()) for rank in range(job.world_size)]
    return _together(told)


def _wait(processes: Sequence[BaseProcess], job: Job, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.exitcode for process in processes]
        late = time.monotonic() > deadline
        if late or any(codes):
            rank = next((rank for rank, code in enumerate(codes) if code), 0)
            log = folder / f"log.{rank}"
            said = log.read_text(errors="replace")[-SAID_CHARACTERS:] if log.exists() else ""
            what = "did not end in time" if late else "failed"
            raise JobFailedError(f"{job.act} of {job.peer}, rank {rank}, {what}.\n{said}")
        if None not in codes:
            return
        time.sleep(POLL_SECONDS)


def _together(told: list[dict[str, Any]]) -> Outcome:
    costs = [Cost(**each["cost"]) for each in told]
    blocked = [cost.blocked_seconds for cost in costs if cost.blocked_seconds is not None]
    cost = Cost(
        max(cost.wall_seconds for cost in costs),
        sum(cost.cpu_seconds for cost in costs),
        max(cost.peak_extra_bytes for cost in costs),
        max(blocked) if blocked else None,
    )
    facts = {name: _largest([each["facts"][name] for each in told]) for name in told[0]["facts"]}
    return Outcome(cost, told[0]["nbytes"], facts)


def _largest(values: list[Any]) -> Any:
    """Return the largest of what the ranks say; of lists, for each place."""
    return [max(each) for each in zip(*values, strict=True)] if isinstance(values[0], list) else max(values)


def _do(job: Job, folder: Path, rank: int, environment: Mapping[str, str]) -> None:
    """Do one rank's part and write down what it cost. What it says goes into a file."""
    with (folder / f"log.{rank}").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in [name for name in os.environ if name.startswith(_ENVIRONMENT_OF_CLIENTS)]:
        del os.environ[name]
    os.environ.update({"AWS_EC2_METADATA_DISABLED": "true", "GLOO_SOCKET_IFNAME": "lo"}, **environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.world_size))
    warnings.simplefilter("ignore")  # the peers' own
    import torch.distributed as dist  # noqa: PLC0415  (not in the parent)

    from benchmarks import acts  # noqa: PLC0415

    grouped = job.world_size > 1 or acts.is_sharded(job)
    if grouped:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=job.world_size)
    outcome = acts.ACTS[job.act](job)
    (folder / f"result.{rank}").write_text(json.dumps(asdict(outcome)))
    if grouped:
        dist.barrier()
        dist.destroy_process_group()
