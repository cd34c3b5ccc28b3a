"""The training that drills run: small, deterministic, the same on any number of ranks but for rounding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.drills.place import Place
from ckptstore.drills.worker import Voice
from ckptstore.events import Event
from ckptstore.training import Checkpointer, Collate, ElasticSampler, Progress, ResumeReport, TrainingState

SAMPLES, BATCH, WIDTH = 240, 12, 8
EVERY = 2


class Job:
    """A network under FSDP2, AdamW, a schedule and a sampler, on all ranks of the group, or alone.

    Args:
        seed: Of the first weights: they must not matter after a resume.
    """

    def __init__(self, seed: int) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
        if self.ranks > 1:
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
        self.losses: dict[int, float] = {}
        self.samples: dict[int, list[int]] = {}
        """Of all ranks, by step."""

    def train(self, until: int, voice: Voice, checkpointer: Checkpointer) -> None:
        """Train until a step, and save when it is due."""
        loader = DataLoader(self.dataset, batch_sampler=self.sampler, collate_fn=Collate(self.dataset[0]))
        while self.progress.global_step < until:
            for ids, rows, wanted in loader:
                loss = self._step(rows, wanted)
                self.losses[self.progress.global_step] = loss.item()
                self.samples[self.progress.global_step] = _of_all(ids.tolist())
                voice.say("step", self.progress.global_step)
                checkpointer.observe(loss=loss, batch_ids=ids)
                if checkpointer.due():
                    voice.say("save", self.progress.global_step)
                    checkpointer.save()
                if self.progress.global_step >= until:
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

    def _step(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.model(rows), wanted, reduction="sum") / self.sampler.batch_samples
        (loss * self.ranks).backward()  # type: ignore[no-untyped-call]  # FSDP takes the mean
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.sampler.advance(progress=self.progress)
        self.progress.global_step += 1
        loss = loss.detach()
        if self.ranks > 1:
            dist.all_reduce(loss)
        return loss


def train(voice: Voice, place: Place, *, until: int, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Resume what is there, train until a step, save every other step in the foreground, and tell of all of it.

    Args:
        voice: Told `resumed` with what `told_of` returns, each `step`, each `save`, and every event by its name.
        place: The run.
        until: The last step.
        seed: See `Job`.
        options: Of the checkpointer.

    Returns:
        The losses and samples by step, the digest at the end, and what was resumed.
    """
    job = Job(seed)

    def observe(event: Event) -> None:
        voice.say(type(event).__name__, str(event))

    settings = {"every_steps": EVERY, "background": False, "proof_steps": 0, **place.access, **options}
    with Checkpointer(place.url, job.state, observer=observe, **settings) as checkpointer:
        report = checkpointer.resume()
        resumed = {**told_of(report), "digest": job.digest() if not report.is_fresh else None}
        voice.say("resumed", resumed)
        job.train(until, voice, checkpointer)
    return {"losses": job.losses, "samples": job.samples, "digest": job.digest(), "resumed": resumed}


def told_of(report: ResumeReport) -> Mapping[str, Any]:
    """Return what a drill asks of a resume."""
    return {
        "step": report.global_step,
        "checkpoint_id": report.checkpoint_id,
        "passed_over": [(each.checkpoint_id, each.reason) for each in report.passed_over],
        "saved_world_size": report.saved_world_size,
    }


def _of_all(ids: list[int]) -> list[int]:
    if not dist.is_initialized():
        return sorted(ids)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ids)
    return sorted(each for share in found for each in share)
