"""Train with DDP on any number of ranks. Start it again, on another number if you like: it goes on where it was.

torchrun --nproc-per-node 2 examples/train_ddp.py URL
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.training import Checkpointer, Collate, ElasticSampler, Progress, ResumeReport, TrainingState

SAMPLES, BATCH, EPOCHS = 961, 64, 2
"""An epoch's last batch is one sample: one rank trains on it, and the others join with nothing."""


def say(step: int, loss: float) -> None:
    """Print a step, on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step:2d}  loss {loss:.4f}", flush=True)


def train(url: str, *, on_step: Callable[[int, float], None] = say) -> ResumeReport:
    """Train to the end, from the newest committed checkpoint if there is one.

    Args:
        url: Root of the run.
        on_step: Called after each step with its number and the loss of the whole batch.
    """
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True).sin())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate(dataset[0]))
    progress = Progress()

    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, progress=progress)
    with Checkpointer(url, state, every_steps=5) as checkpointer:
        report = checkpointer.resume()
        while progress.epoch < EPOCHS:
            for ids, rows, labels in loader:
                loss = F.mse_loss(model(rows), labels, reduction="sum") / sampler.batch_samples
                (loss * dist.get_world_size()).backward()  # DDP takes the mean over ranks, whose shares may be unequal
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                sampler.advance(progress=progress)
                progress.global_step += 1
                dist.all_reduce(loss.detach_())
                checkpointer.observe(loss=loss, grad_norm=norm, batch_ids=ids)
                if checkpointer.due():
                    checkpointer.save(metrics={"loss": loss.item()})
                on_step(progress.global_step, loss.item())
    return report


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1])
    dist.destroy_process_group()
