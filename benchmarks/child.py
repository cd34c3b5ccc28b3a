"""One measurement in a process of its own, or in one for each rank: `python -m benchmarks.child JOB RESULT`.

The state is made, the peer's modules are imported and it has saved (and loaded) something little before the clock
starts; what was loaded is compared with what was saved after it has stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Cost
from ckptstore.units import MIB

LITTLE_BYTES = 2 * MIB
POLL_SECONDS = 0.02
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


def run(job: Job, *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600.0) -> Outcome:
    """Do a job in fresh processes.

    Args:
        job: What.
        environment: How the store is reached. What this process knows of other stores is not passed on.
        timeout_seconds: After this long the processes are killed.

    Raises:
        JobFailedError: One failed, or time was up.

    If killed: the processes see that their parent is gone only when they end.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_ENVIRONMENT_OF_CLIENTS)}
    inherited |= {"OMP_NUM_THREADS": "1", "AWS_EC2_METADATA_DISABLED": "true", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as folder:
        processes = []
        for rank in range(job.world_size):
            words = [sys.executable, "-m", "benchmarks.child", json.dumps(asdict(job)), folder]
            own = {"RANK": str(rank), "WORLD_SIZE": str(job.world_size)}
            with Path(folder, f"log.{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        words, env=inherited | dict(environment or {}) | own, stdout=log, stderr=log, cwd=_ROOT
                    )
                )
        try:
            _wait(processes, job, Path(folder), timeout_seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        told = [json.loads(Path(folder, f"result.{rank}").read_text()) for rank in range(job.world_size)]
    return _together(told)


_ROOT = Path(__file__).parents[1]


def _wait(processes: list[subprocess.Popen[bytes]], job: Job, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        late = time.monotonic() > deadline
        if late or any(code not in (None, 0) for code in codes):
            rank = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), 0)
            log = (folder / f"log.{rank}").read_text(errors="replace")[-1500:]
            what = "did not end in time" if late else "failed"
            raise JobFailedError(f"{job.act} of {job.peer}, rank {rank}, {what}.\n{log}")
        if all(code == 0 for code in codes):
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


def main(job: Job, folder: Path) -> None:
    """Do one rank's part and write down what it cost."""
    warnings.simplefilter("ignore")  # the peers' own
    import torch.distributed as dist  # noqa: PLC0415  (not in the parent)

    from benchmarks import acts  # noqa: PLC0415

    if job.world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=_RANK, world_size=job.world_size)
    outcome = acts.ACTS[job.act](job)
    (folder / f"result.{_RANK}").write_text(json.dumps(asdict(outcome)))
    if job.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


_RANK = int(os.environ.get("RANK", "0"))

if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
