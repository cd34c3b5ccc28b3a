"""Small trainings, each made anew as a new process would make it: other seeds, nothing stepped."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ckptstore.training import Checkpointer, Collate, ElasticSampler, Progress, TrainingState

SAMPLES, FEATURES = 98, 6


class Rows(Dataset):
    """Numbers that can be made again; with `noise`, each is disturbed by the process's own random numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        row = torch.randn(FEATURES + 1, generator=generator)
        return index, row[:FEATURES], row[FEATURES:]


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@dataclass
class Training:
    """One process's training."""

    seed: int = 1
    optimizer: str = "adamw"
    workers: int = 0
    batch_size: int = 12
    scaled: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        seed_all(self.seed)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        parameters = self.model.parameters()
        self.opt = (
            torch.optim.AdamW(parameters, lr=0.01)
            if self.optimizer == "adamw"
            else torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        )
        warm = torch.optim.lr_scheduler.LinearLR(self.opt, 0.1, 1.0, total_iters=5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=40)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.opt, [warm, cosine], milestones=[5])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7, enabled=self.scaled)
        self.sampler = ElasticSampler(SAMPLES, batch_size=self.batch_size, seed=5)
        self.progress = Progress()
        self.extras = {"best": float("inf"), "history": []}
        rows = Rows()
        self.loader = DataLoader(
            rows,
            batch_sampler=self.sampler,
            num_workers=self.workers,
            prefetch_factor=4 if self.workers else None,
            collate_fn=Collate(rows[0]),
        )
        given = {
            "model": self.model,
            "optimizer": self.opt,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "sampler": self.sampler,
            "progress": self.progress,
            "extras": self.extras,
        }
        self.state = TrainingState(**{**given, **self.options})

    def step(self, batch):
        ids, inputs, labels = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = self.model(inputs)
        loss = functional.mse_loss(outputs.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        self.scheduler.step()
        self.sampler.advance(progress=self.progress)
        self.progress.global_step += 1
        self.extras["history"].append(loss.item())
        self.extras["best"] = min(self.extras["best"], loss.item())
        return loss, norm, ids

    def train(self, until, checkpointer: Checkpointer | None = None):
        """Train until a global step, saving when it is due; return the losses."""
        losses = []
        while self.progress.global_step < until:
            for batch in self.loader:
                loss, norm, ids = self.step(batch)
                losses.append(loss.item())
                if checkpointer is not None:
                    checkpointer.observe(loss=loss, grad_norm=norm, batch_ids=ids)
                    if checkpointer.due():
                        checkpointer.save(metrics={"loss": loss.item()})
                if self.progress.global_step >= until:
                    break
        return losses


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
