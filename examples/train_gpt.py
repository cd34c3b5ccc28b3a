"""Train a small GPT on the text of Python's own help pages, saving through `ckptstore` every few steps.

    torchrun --nproc-per-node 4 examples/train_gpt.py URL --steps 40 --save-every 5

Start it again, with another number of ranks if you like: it goes on from the newest committed checkpoint.
The batch of a step depends on the step alone, so the loss of a step is the same on any number of ranks, up to rounding.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import storage_writers as sw
from ckptstore import NotFoundError
from ckptstore.events import Event, UploadBegan

CONTEXT, WIDTH, HEADS, BLOCKS, GLOBAL_BATCH = 96, 192, 4, 4, 12


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            piece.view(batch, length, HEADS, -1).transpose(1, 2) for piece in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level language model of about two million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map byte values (batch, time) to logits (batch, time, 256)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(text: torch.Tensor, step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the step's batch: inputs and targets, (share, CONTEXT) bytes each."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (GLOBAL_BATCH,), generator=generator)[rank::world_size]
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1].long(), rows[:, 1:].long()


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="root of the run, e.g. ./runs/gpt or s3://bucket/runs/gpt")
    parser.add_argument("--engine", help="what moves the bytes, where a URL has several: s3fs, e.g.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--kill-rank", type=int, help="this rank kills itself (SIGKILL) as its upload begins")
    parser.add_argument("--kill-step", type=int, help="in the save of this step")
    return parser.parse_args()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    """Return what a checkpoint of this job holds."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "progress": {"step": torch.tensor(step)}}


def resume(reader: sw.CkptStoreReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest committed checkpoint; return its step, or 0 for a fresh start.

    Every rank calls `sw.load`, which lets all of them load the same checkpoint or raise the same error.
    """
    state = state_of(model, optimizer, 0)
    try:
        sw.load(state, storage_reader=reader)
    except NotFoundError:
        optimizer.state.clear()  # torch filled it, to give the checkpoint something to load into
        say(f"nothing committed yet: a fresh start on {dist.get_world_size()} ranks")
        return 0
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = int(state["progress"]["step"])
    say(f"resumed from seq {reader.report.seq}, step {step}, on {dist.get_world_size()} ranks")
    return step


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Train, save and resume."""
    args = parse()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)

    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = resume(sw.CkptStoreReader(args.url, engine=args.engine), model, optimizer)

    def die_in_the_middle(event: Event) -> None:
        if isinstance(event, UploadBegan) and (rank, step) == (args.kill_rank, args.kill_step):
            os.kill(os.getpid(), signal.SIGKILL)

    writer = sw.CkptStoreWriter(args.url, engine=args.engine, observer=die_in_the_middle)
    while step < args.steps:
        inputs, targets = batch_of(text, step, rank, world_size)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dist.all_reduce(total := loss.detach().clone())
        mean = float(total) / world_size
        say(f"step {step:3d}  loss {mean:.4f}")
        if step % args.save_every == 0:
            began = time.monotonic()
            writer.describe(global_step=step, metrics={"loss": mean}, parallelism={"dp": world_size})
            sw.save(state_of(model, optimizer, step), checkpoint_id=f"step-{step}", storage_writer=writer)
            say(f"saved step-{step} in {time.monotonic() - began:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
