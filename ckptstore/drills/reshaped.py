"""A training that is spread over its ranks in whatever way is asked for: data, tensor and pipeline parallelism."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptstore.drills.degrees import BATCH, BLOCKS, HIDDEN, Degrees
from ckptstore.drills.place import Place
from ckptstore.drills.worker import Voice
from ckptstore.training import Checkpointer, ElasticSampler, Matrix, Progress, TrainingState

WIDTH, SAMPLES = 8, 480
RESHARDS = 3
"""With `zero` 3, parameters are sharded again after each forward pass; with 2 they are not."""


class Block(nn.Module):
    """A layer up, a layer down, and what came in beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what goes on."""
        down: torch.Tensor = self.down(torch.tanh(self.up(rows)))
        return rows + down


class Stage(nn.Module):
    """The blocks of one stage of the pipeline, called as in the whole model; the last one has the head.

    Args:
        number, stages: Which of how many.
    """

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        blocks = {f"block{index}": Block() for index in range(BLOCKS)}  # all of them: random numbers are drawn alike
        head = nn.Linear(WIDTH, 1)
        for index in range(BLOCKS * number // stages, BLOCKS * (number + 1) // stages):
            self.add_module(f"block{index}", blocks[f"block{index}"])
        if number == stages - 1:
            self.add_module("head", head)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the next stage takes, or what was learnt."""
        for layer in self.children():
            rows = layer(rows)
        return rows


class Reshaped:
    """One rank of it.

    Args:
        degrees: How it is spread.
        seed: Of the first weights.
    """

    def __init__(self, degrees: Degrees, seed: int) -> None:
        self.degrees = degrees
        shape = (degrees.pp, degrees.dp // degrees.fsdp, degrees.fsdp, degrees.tp)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        self.stage = self._at("pp")
        torch.manual_seed(seed)
        self.model = Stage(self.stage, degrees.pp)
        self._spread()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        share = self._at("dp_replicate") * degrees.fsdp + self._at("dp_shard")
        self.sampler = ElasticSampler(SAMPLES, batch_size=BATCH, seed=2, rank=share, world_size=degrees.dp)
        self.progress = Progress()
        self.state = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            progress=self.progress,
            parallelism=degrees.as_table(),
        )

    def train(self, until: int) -> Iterator[float]:
        """Train until a step, and yield the loss of each over all ranks."""
        while self.progress.global_step < until:
            for ids in self.sampler:
                yield self._step(self.inputs[ids])
                if self.progress.global_step >= until:
                    break

    def hashes(self) -> dict[str, str]:
        """Return the hash of every whole tensor of this rank's stage, by name. Collective."""
        found = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            for key, value in {"weight": parameter, **moments}.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name}/{key}"] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
        return found

    def _spread(self) -> None:
        degrees, blocks = self.degrees, [each for each in self.model.children() if isinstance(each, Block)]
        if degrees.tp > 1:
            for block in blocks:
                parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if degrees.zero:
            replicated = degrees.dp > degrees.fsdp
            mesh: DeviceMesh = self.mesh["dp_replicate", "dp_shard"] if replicated else self.mesh["dp_shard"]
            for module in (*blocks, self.model):
                fully_shard(module, mesh=mesh, reshard_after_forward=degrees.zero == RESHARDS)

    def _step(self, rows: torch.Tensor) -> float:
        """Take a step through all stages, of which each has its turn."""
        taken = self._receive(len(rows), self.stage - 1) if self.stage else rows
        out = self.model(taken.requires_grad_(bool(self.stage)))
        loss = torch.zeros(())
        if self.stage == self.degrees.pp - 1:
            loss = F.mse_loss(out, rows.sum(1, keepdim=True).sin(), reduction="sum") / self.sampler.batch_samples
            (loss * self.degrees.dp).backward()  # type: ignore[no-untyped-call]  # ranks take the mean
        else:
            self._send(out.detach(), self.stage + 1)
            out.backward(self._receive(len(rows), self.stage + 1))
        if self.stage and taken.grad is not None:
            self._send(taken.grad, self.stage - 1)
        if not self.degrees.zero:
            self._average()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sampler.advance(progress=self.progress)
        self.progress.global_step += 1
        whole = loss.detach() / self.degrees.tp  # each of its ranks has the same
        dist.all_reduce(whole)
        return float(whole)

    def _average(self) -> None:
        group = self.mesh.get_group("dp_replicate")
        for parameter in self.model.parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if grad is not None:
                dist.all_reduce(grad, group=group)
                grad /= self.degrees.dp

    def _send(self, rows: torch.Tensor, stage: int) -> None:
        if len(rows):
            dist.send(rows.contiguous(), self._rank_of(stage))

    def _receive(self, count: int, stage: int) -> torch.Tensor:
        rows = torch.empty(count, WIDTH)
        if count:
            dist.recv(rows, self._rank_of(stage))
        return rows

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.mesh.get_group("pp"), stage)

    def _at(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension)


def save_and_go_on(voice: Voice, place: Place, *, degrees: Degrees, at: int, until: int) -> dict[str, Any]:  # noqa: ARG001
    """Train, save at a step, and go on; return the hashes at that step and the losses after it."""
    job = Reshaped(degrees, 0)
    with Checkpointer(place.url, job.state, background=False, proof_steps=0, **place.access) as checkpointer:
        list(job.train(at))
        hashes = job.hashes()
        checkpointer.save()
        losses = list(job.train(until))
    return {"hashes": hashes, "losses": losses}


def resume_and_go_on(voice: Voice, place: Place, *, degrees: Degrees, saved: Mapping[str, int], until: int) -> Any:  # noqa: ARG001
    """Resume what another topology saved, and go on; return the hashes after the resume and the losses after it."""
    job = Reshaped(degrees, 1)
    entry = {"from": saved, "to": degrees.as_table(), "status": "verified", "evidence": "the drill under way"}
    settings = {"background": False, "proof_steps": 0, "matrix": Matrix.read([entry]), **place.access}
    with Checkpointer(place.url, job.state, **settings) as checkpointer:
        report = checkpointer.resume()
        hashes = job.hashes()
        losses = list(job.train(until))
    return {"hashes": hashes, "losses": losses, "decision": report.decision}
