"""The training that drills run: small, deterministic, the same on any number of ranks but for rounding."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.drills.place import Place
from ckptstore.drills.rows import Row
from ckptstore.drills.worker import Voice
from ckptstore.events import Event
from ckptstore.training import Checkpointer, Collate, ElasticSampler, Matrix, Progress, ResumeReport, TrainingState

SAMPLES, BATCH, WIDTH = 240, 12, 8
EVERY = 2
WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job is like.

    Args:
        seed: Of its first weights: they must not matter after a resume.
        dropout: With some, random numbers matter.
        micro_steps: Batches whose gradients make one step.
    """

    seed: int = 0
    dropout: float = 0.0
    micro_steps: int = 1


class Job:
    """A network under FSDP2, AdamW, a schedule and a sampler, on all ranks of the group."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.ranks = dist.get_world_size()
        torch.manual_seed(shape.seed)
        self.model: Any = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(shape.dropout), nn.Linear(64, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        self.dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True).sin())
        self.sampler = ElasticSampler(self.dataset, batch_size=BATCH, seed=2)
        self.progress = Progress()
        self.state = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            progress=self.progress,
        )

    def train(self, until: int, checkpointer: Checkpointer) -> Iterator[Row]:
        """Train until a step, and yield what each batch was like, before it is asked whether to save."""
        loader = DataLoader(self.dataset, batch_sampler=self.sampler, collate_fn=Collate(self.dataset[0]))
        while self.progress.global_step < until:
            for ids, rows, wanted in loader:
                loss, stepped = self._batch(rows, wanted)
                if stepped:
                    checkpointer.observe(loss=loss, batch_ids=ids)
                progress = self.progress
                samples = tuple(_of_all(ids.tolist()))
                yield Row(progress.global_step, progress.micro_step, loss.item(), samples, self.digest())
                if progress.global_step >= until:
                    break

    def digest(self) -> str:
        """Return what tells weights and moments apart, bit by bit, whoever holds which share. Collective."""
        whole: dict[str, Any] = dict(self.model.state_dict())
        for number, moments in enumerate(self.optimizer.state.values()):
            whole.update({f"{number}.{name}": each for name, each in moments.items()})
        found = hashlib.sha256()
        for name, value in whole.items():
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(name.encode() + tensor.detach().numpy().tobytes())
        return found.hexdigest()

    def _batch(self, rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Add the gradients of a batch, and take a step if it was the last of one; return its loss over all ranks."""
        parts = self._shape.micro_steps
        loss = F.mse_loss(self.model(rows), wanted, reduction="sum") / (self.sampler.batch_samples * parts)
        (loss * self.ranks).backward()  # type: ignore[no-untyped-call]  # FSDP takes the mean
        self.sampler.advance(progress=self.progress)
        steps = self.progress.micro_step + 1 == parts
        self.progress.micro_step = 0 if steps else self.progress.micro_step + 1
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.progress.global_step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss, steps


def train(  # noqa: PLR0913  (what the drills vary)
    voice: Voice,
    place: Place,
    *,
    until: int,
    shape: Mapping[str, Any] | None = None,
    save_at: Sequence[int] = (),
    matrix: Sequence[Any] | None = None,
    waits: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Resume what is there, train until a step, save every other step in the foreground, and tell of all of it.

    Args:
        voice: Told `resumed` with what `told_of` returns, `batch` with each row, `saved` after each save, and every
            event by its name.
        place: The run.
        until: The last step.
        shape: See `Shape`.
        save_at: Step and micro-step after which it saves, too.
        matrix: Entries.
        waits: At the end it says `waits`, and waits to be killed.
        options: Of the checkpointer.

    Returns:
        What was resumed, and the digest at the end.
    """
    job = Job(Shape(**(shape or {})))

    def observe(event: Event) -> None:
        voice.say(type(event).__name__, str(event))

    settings = {"every_steps": EVERY, "background": False, "proof_steps": 0, **place.access, **options}
    if matrix is not None:
        settings["matrix"] = Matrix.read(matrix)
    with Checkpointer(place.url, job.state, observer=observe, **settings) as checkpointer:
        report = checkpointer.resume()
        resumed = {**told_of(report), "micro_step": job.progress.micro_step}
        resumed["digest"] = None if report.is_fresh else job.digest()
        voice.say("resumed", resumed)
        for row in job.train(until, checkpointer):
            voice.say("batch", row)
            if checkpointer.due() or (row.step, row.micro_step) == tuple(save_at):
                checkpointer.save()
                voice.say("saved", row)
        if waits:
            voice.say("waits")
            time.sleep(WAIT_SECONDS)
    proof = report.proof
    return {"digest": job.digest(), "resumed": resumed, "proof": None if proof is None else str(proof.verdict)}


def told_of(report: ResumeReport) -> dict[str, Any]:
    """Return what a drill asks of a resume."""
    return {
        "step": report.global_step,
        "checkpoint_id": report.checkpoint_id,
        "passed_over": [(each.checkpoint_id, each.reason) for each in report.passed_over],
        "saved_world_size": report.saved_world_size,
        "decision": report.decision,
    }


def _of_all(ids: list[int]) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ids)
    return sorted(each for share in found for each in share)
