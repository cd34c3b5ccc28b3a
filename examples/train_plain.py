"""Train a small network in one process, and go on where it was whenever it is started again.

    python examples/train_plain.py ./runs/plain

Stop it by Ctrl-C or SIGTERM, or kill it, at any moment, and start it again: it goes on from the newest commit, and ends
with the weights that it would have had. `--seed` may be another one then; what was drawn is part of the state.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import MutableMapping

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

from ckptstore import CheckpointStore
from ckptstore.training import Checkpointer, ElasticSampler, Keep, Progress, TrainingState

SAMPLES, FEATURES, PATIENCE = 2048, 4, 5


class Waves(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Sums of sines of their features, some noise added; the same each time for the same seed."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.rand(samples, FEATURES, generator=generator) * 2 - 1
        waves = torch.sin(3 * self.inputs).sum(1, keepdim=True)
        self.targets = waves + 0.1 * torch.randn(samples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.targets[index]


def network() -> nn.Module:
    """Return what is trained."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="root of the run, e.g. ./runs/plain or s3://bucket/runs/plain")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=25, help="validate and save every so many steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="processes that fetch samples in advance")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of dropout")
    parser.add_argument("--keep-last", type=int, help="keep so many, and delete others at once: nobody else reads them")
    parser.add_argument("--final", help="write the last weights to this file")
    return parser.parse_args()


def validate(model: nn.Module, rows: Waves, extras: MutableMapping[str, float]) -> dict[str, float]:
    """Measure the loss on other samples, without a draw or a step, and note whether it is the best so far."""
    model.eval()
    with torch.no_grad():
        loss = functional.mse_loss(model(rows.inputs), rows.targets).item()
    model.train()
    better = loss < extras["best"]
    extras.update(best=min(loss, extras["best"]), patience=PATIENCE if better else extras["patience"] - 1)
    return {"val_loss": loss}


def train(args: argparse.Namespace, model: nn.Module) -> None:
    """Train `model` until the last step, or until it has not become better for long."""
    rows, others = Waves(SAMPLES, seed=1), Waves(256, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    warm, rest = max(1, args.steps // 10), args.steps - args.steps // 10
    phases = [LinearLR(optimizer, 0.1, total_iters=warm), CosineAnnealingLR(optimizer, rest)]
    scheduler = SequentialLR(optimizer, phases, milestones=[warm])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sampler = ElasticSampler(rows, batch_size=args.batch, seed=7)
    loader = DataLoader(rows, batch_sampler=sampler, num_workers=args.workers)
    progress = Progress()
    extras = {"best": math.inf, "patience": PATIENCE}
    state = TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        sampler=sampler,
        progress=progress,
        extras=extras,
        precision={"autocast": torch.float16},
    )

    def is_over() -> bool:
        return progress.global_step >= args.steps or extras["patience"] <= 0

    keep, grace = Keep(last=2, best=("val_loss", "min", 1)), 3600.0
    if args.keep_last:  # without a grace, since this run may be over long before an hour is
        keep, grace = Keep(last=args.keep_last), 0.0
    options = {"every_steps": args.every, "keep": keep, "keep_grace_seconds": grace}
    with Checkpointer(args.url, state, **options) as checkpointer:
        report = checkpointer.resume()
        print("a fresh start" if report.is_fresh else f"resumed from seq {report.seq}, step {report.global_step}")
        while not is_over():
            for ids, inputs, targets in loader:
                with torch.autocast("cpu", dtype=torch.float16):
                    outputs = model(inputs)
                loss = functional.mse_loss(outputs.float(), targets)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                sampler.advance(progress=progress)  # these samples count from here on
                progress.global_step += 1
                checkpointer.observe(loss=loss, grad_norm=norm, batch_ids=ids)

                metrics = None
                if progress.global_step % args.every == 0:
                    metrics = validate(model, others, extras)
                    print(f"step {progress.global_step:4d}  loss {loss:.4f}  val_loss {metrics['val_loss']:.4f}")
                if checkpointer.due():
                    checkpointer.save(metrics=metrics)  # goes on in the background
                if is_over():
                    break


def show(url: str) -> None:
    """Print what is there to go on from."""
    found = CheckpointStore.open(url).checkpoints()  # the newest first
    print(f"{len(found)} checkpoints in {url}")
    if found:
        print(f"latest: seq {found[0].seq}, {found[0].checkpoint_id}")
    if measured := [each for each in found if "val_loss" in each.metrics]:
        best = min(measured, key=lambda each: each.metrics["val_loss"])
        print(f"best: seq {best.seq}, {best.checkpoint_id}, val_loss {best.metrics['val_loss']:.4f}")


def main() -> None:
    """Train, and say what there is, however it ends."""
    args = parse()
    torch.manual_seed(args.seed)
    model = network()
    try:
        train(args, model)
    finally:
        show(args.url)
    if args.final:
        torch.save(model.state_dict(), args.final)


if __name__ == "__main__":
    main()
