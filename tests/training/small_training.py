"""A training with all that a resume can forget, small enough to be run again and again."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ckptstore.training.batches import batch_digest
from ckptstore.training.trace import Conditions, Observation, Trace
from ckptstore.training.update_norm import UpdateNorm

BATCH, MICRO = 8, 2
SAMPLES = 64
HERE = Conditions.here()


def dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def warm_then_cosine(step):
    return min(1.0, (step + 1) / 8) * (0.6 + 0.4 * torch.tensor(step / 20).cos().item())


class Training:
    """Dropout, AdamW, warm-up and cosine, a gradient scaler, accumulation over two micro-batches, a cursor."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_then_cosine)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.progress = {"global_step": 0, "micro_step": 0, "cursor": 0, "epoch": 0}
        self.loss, self.digest, self.samples = 0.0, 0, 0
        self.norm = UpdateNorm(dict(self.model.named_parameters()))

    def micro_step(self):
        """Add the gradients of half a batch."""
        inputs, targets = dataset()
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.progress["epoch"]))
        ids = order[self.progress["cursor"] :][: BATCH // MICRO]
        loss = nn.functional.mse_loss(self.model(inputs[ids]), targets[ids]) / MICRO
        self.scaler.scale(loss).backward()
        self.loss += loss.item()
        self.digest += batch_digest(ids)
        self.samples += len(ids)
        self.progress["cursor"] += len(ids)
        self.progress["micro_step"] += 1
        if self.progress["cursor"] == SAMPLES:
            self.progress["epoch"], self.progress["cursor"] = self.progress["epoch"] + 1, 0

    def step(self):
        """Finish a step and return what was observed since the last one, or since a resume."""
        self.norm.start()
        while self.progress["micro_step"] < MICRO:
            self.micro_step()
        self.scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        lr = tuple(group["lr"] for group in self.optimizer.param_groups)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.progress["micro_step"] = 0
        self.progress["global_step"] += 1
        seen = Observation(
            global_step=self.progress["global_step"],
            loss=self.loss,
            grad_norm=grad_norm,
            lr=lr,
            scale=scale,
            batch_digest=self.digest & (2**63 - 1),
            samples=self.samples,
            update_norm=self.norm.advance() ** 0.5,
        )
        self.forget_observed()
        return seen

    def forget_observed(self):
        self.loss, self.digest, self.samples = 0.0, 0, 0

    def trace(self, steps):
        start = self.progress["global_step"]
        self.forget_observed()  # as after a resume: what was seen before the save is not seen again
        return Trace(start, tuple(self.step() for _ in range(steps)), HERE, self.norm.of)

    def state(self):
        """Return all of it, as another process would find it."""
        grads = [each.grad for each in self.model.parameters()]
        return copy.deepcopy(
            {
                "weights": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "gradients": grads,
                "progress": self.progress,
                "random": torch.get_rng_state(),
            }
        )


def resumed(state, *, fault=None):
    """Return a training in a new process, so to speak, that went on from `state` but for one fault."""
    state = copy.deepcopy(state)
    torch.manual_seed(12345)
    training = Training()
    training.model.load_state_dict(state["weights"])
    training.optimizer.load_state_dict(state["optimizer"])
    if fault == "moments dropped":
        training.optimizer.state.clear()
    if fault != "scheduler not restored":
        training.scheduler.load_state_dict(state["scheduler"])
    if fault != "scaler reset":
        training.scaler.load_state_dict(state["scaler"])
    else:
        training.scaler.scale(torch.zeros(()))  # made as late as its first use
    for parameter, grad in zip(training.model.parameters(), state["gradients"], strict=True):
        parameter.grad = None if fault == "gradients lost" else grad
    training.progress = state["progress"]
    if fault == "cursor at epoch start":
        training.progress["cursor"] = 0
    if fault == "micro-step lost":
        training.progress["micro_step"] = 0
    if fault != "rng not restored":
        torch.set_rng_state(state["random"])
    return training
