"""Small models, trained a few steps, saved by name and loaded into fresh ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.tensor import DTensor

import storage_writers as sw
from ckptstore.training import models, optimizers


class Net(nn.Module):
    """Two layers with buffers between them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Matrices(nn.Module):
    """Nothing but matrices."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self):
        super().__init__()
        self.token, self.mix, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x):
        return self.head(self.mix(self.token(x.argmax(1))))


def seeded(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


def backward(model, step):
    """Accumulate the gradients of a step, whose batch depends on its number alone."""
    generator = torch.Generator().manual_seed(step)
    loss = F.mse_loss(out := model(torch.randn(10, 6, generator=generator)), torch.ones_like(out))
    loss.backward()
    return loss


def train(model, optimizer, steps):
    """Take these steps."""
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            return backward(model, step)

        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
        optimizer.zero_grad()


def save(url: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Save both; return the optimizer's structure."""
    captured = optimizers.capture(optimizer, models.named_parameters(model))
    state = {f"model.{name}": tensor for name, tensor in models.named_state(model).items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in captured.tensors.items()}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    return captured.structure


def load(url: str, model: nn.Module, optimizer: Any, structure: dict[str, Any]) -> None:
    """Load both."""
    names = models.named_parameters(model)
    room = optimizers.targets(optimizer, names, structure)
    state = {f"model.{name}": tensor for name, tensor in models.named_state(model).items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in room.items()}
    sw.load(state, storage_reader=sw.CkptStoreReader(url))
    optimizers.apply(optimizer, names, structure, room)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return weights, buffers, moments and groups by name, whole and copied."""
    captured = optimizers.capture(optimizer, models.named_parameters(model))
    tensors = {f"model.{name}": tensor for name, tensor in models.named_state(model).items()} | captured.tensors
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }
    return {"tensors": whole, "groups": captured.structure["groups"]}
