"""Train with FSDP2 on as many ranks as there are today: every sample once per epoch, and the loss of one long run.

    torchrun --nproc-per-node 4 examples/train_elastic.py URL

Stop it, or let it be killed, and start it on another number of ranks: 3, then 5, then 4 again. The batch of a step is
the same on any number of ranks, and gradients are weighted by samples, so the loss of a step is too, up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.training import Checkpointer, Collate, ElasticSampler, Progress, ResumeReport, TrainingState

SAMPLES, BATCH, EPOCHS = 10_007, 60, 2
"""The last batch of an epoch has 47 samples, so that shares are unequal; of fewer than ranks, some would be empty."""


def say(step: int, loss: float, ids: list[int]) -> None:
    """Print a step, on rank 0."""
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step:3d}  loss {loss:.4f}  {len(ids)} samples on this rank", flush=True)


def train(url: str, *, on_step: Callable[[int, float, list[int]], None] = say) -> ResumeReport:
    """Train to the end, from the newest committed checkpoint if there is one.

    Args:
        url: Root of the run.
        on_step: Called after each step with its number, the loss of the whole batch, and the samples of this rank.
    """
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    labels = inputs.sum(1, keepdim=True).sin() + 0.1 * torch.randn(SAMPLES, 1)
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, labels)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = ElasticSampler(dataset, batch_size=BATCH, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate(dataset[0]))
    progress = Progress()

    state = TrainingState(model=model, optimizer=optimizer, sampler=sampler, progress=progress)
    with Checkpointer(url, state, every_steps=20) as checkpointer:
        report = checkpointer.resume()
        while progress.epoch < EPOCHS:
            for ids, rows, wanted in loader:
                loss = F.mse_loss(model(rows), wanted, reduction="sum") / sampler.batch_samples
                (loss * dist.get_world_size()).backward()  # FSDP takes the mean over ranks, whose shares are unequal
                optimizer.step()
                optimizer.zero_grad()
                sampler.advance(progress=progress)
                progress.global_step += 1
                dist.all_reduce(loss.detach_())
                on_step(progress.global_step, loss.item(), ids.tolist())
                checkpointer.observe(loss=loss, batch_ids=ids)
                if checkpointer.due():
                    checkpointer.save(metrics={"loss": loss.item()})
    return report


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1])
    dist.destroy_process_group()
