"""One rank of the job that `endurance` disturbs: it trains nothing, so that every value says of which step it is.

After a step all weights hold its number. A checkpoint whose weights are not all its own step's is torn, mixed or of
another one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.soak import measured
from ckptstore.events import Committed, Event
from ckptstore.training import Checkpointer, Keep, Progress, TrainingState

LAYERS, WIDTH = 8, 256
"""2 MiB of weights, and as much of momentum."""
STEP_SECONDS = 0.05
EVERY_SECONDS = 3.0
GROUP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job.

    Args:
        number: How many there were before.
        folder: Where its ranks meet, and write what they see.
        url: The run.
        options: How the store is reached.
        ranks: So many.
        keep: So many checkpoints are kept.
        grace_seconds: So long the bytes of those that are not stay.
    """

    number: int
    folder: Path
    url: str
    options: Mapping[str, object]
    ranks: int
    keep: int
    grace_seconds: float

    def told(self, rank: int) -> Path:
        """Return where this rank writes what it sees, one JSON object a line."""
        return self.folder / f"told.{self.number}.{rank}"

    def said(self, rank: int) -> Path:
        """Return where this rank's output goes."""
        return self.folder / f"said.{self.number}.{rank}"


def run(start: Start, rank: int) -> None:
    """Save every few seconds until somebody ends this process."""
    with start.said(rank).open("wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(start.ranks), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{start.folder}/meeting.{start.number}",
        rank=rank,
        world_size=start.ranks,
        timeout=dt.timedelta(seconds=GROUP_SECONDS),
    )
    with start.told(rank).open("a", buffering=1) as told:
        _train(start, told)


def _train(start: Start, told: Any) -> None:
    def tell(**facts: Any) -> None:
        told.write(json.dumps({"at": time.time(), **facts}) + "\n")

    def observe(event: Event) -> None:
        if isinstance(event, Committed):
            tell(committed=asdict(event))

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    progress = Progress()
    state = TrainingState(model=model, optimizer=optimizer, progress=progress)
    with Checkpointer(
        start.url,
        state,
        every_seconds=EVERY_SECONDS,
        keep=Keep(last=start.keep),
        keep_grace_seconds=start.grace_seconds,
        storage_options=start.options,
        busy_timeout_seconds=120.0,
        commit_timeout_seconds=120.0,
        agree_timeout_seconds=GROUP_SECONDS,
        observer=observe,
    ) as checkpointer:
        report = checkpointer.resume()
        tell(resumed=report.seq, step=report.global_step, right=is_of(model, progress.global_step))
        while True:
            _step(model, optimizer, progress)
            checkpointer.observe(loss=float(progress.global_step), batch_ids=[progress.global_step])
            if checkpointer.due():
                checkpointer.save()
                tell(held=measured("self"), step=progress.global_step)
            time.sleep(STEP_SECONDS)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    for weights in model.parameters():
        weights.grad = torch.ones_like(weights)
    optimizer.step()
    progress.global_step += 1
    with torch.no_grad():
        for weights in model.parameters():
            weights.fill_(progress.global_step)


def is_of(model: nn.Module, step: int) -> bool:
    """Say whether this rank's share of every weight holds this step's number."""
    shares = [weights.to_local() for weights in model.parameters() if isinstance(weights, DTensor)]
    return step == 0 or (len(shares) == LAYERS and all(bool((share == step).all()) for share in shares))
