"""Accumulate gradients over several batches, and lose none of them when the run is stopped between two.

    python examples/train_accumulating.py URL
    torchrun --nproc-per-node 2 examples/train_accumulating.py URL ddp          (or fsdp2)

Press Ctrl-C, or send SIGTERM: it is saved after the next optimizer step, if that comes in time; else the batches since
the last one are saved with their gradients.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.training import Checkpointer, Collate, ElasticSampler, Progress, ResumeReport, TrainingState

SAMPLES, BATCH, MICRO_STEPS, STEPS = 500, 24, 4, 12


def train(
    url: str,
    wrap: str = "none",
    *,
    reduction: Literal["mean", "sum"] | None = "mean",
    on_batch: Callable[[Progress, float], object] = print,
) -> ResumeReport:
    """Train to the end, from the newest committed checkpoint if there is one.

    Args:
        url: Root of the run.
        wrap: `none`, `ddp` or `fsdp2`.
        reduction: How ranks reduce gradients: with it, what they have accumulated goes on on another number of ranks.
        on_batch: Called after each batch with the counters and its loss; if it returns something, this is saved.
    """
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True).sin())
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = {"none": lambda it: it, "ddp": DistributedDataParallel, "fsdp2": fully_shard}[wrap](model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate(dataset[0]))
    progress = Progress()

    state = TrainingState(
        model=model, optimizer=optimizer, sampler=sampler, progress=progress, gradient_reduction=reduction
    )
    with Checkpointer(url, state, every_steps=5) as checkpointer:
        report = checkpointer.resume()
        while progress.global_step < STEPS:
            for ids, rows, labels in loader:
                steps_now = progress.micro_step + 1 == MICRO_STEPS
                with contextlib.nullcontext() if steps_now or wrap != "ddp" else model.no_sync():
                    loss = F.mse_loss(model(rows), labels, reduction="sum") / (BATCH * MICRO_STEPS)
                    (loss * ranks).backward()  # ranks take the mean
                sampler.advance(progress=progress)  # the batch is in the gradients
                progress.micro_step += 1
                if steps_now:
                    optimizer.step()
                    optimizer.zero_grad()
                    progress.micro_step = 0
                    progress.global_step += 1
                    checkpointer.observe(loss=loss, batch_ids=ids)  # of the last batch: a resume knows no others
                if on_batch(progress, loss.item()) or checkpointer.due():  # at multiples of 5 steps, and to stop
                    checkpointer.save()
                if progress.global_step == STEPS:
                    break
    return report


if __name__ == "__main__":
    if len(sys.argv) > 2:  # noqa: PLR2004  (a URL and what to wrap the model in)
        dist.init_process_group("gloo")
    train(*sys.argv[1:3])
    if dist.is_initialized():
        dist.destroy_process_group()
