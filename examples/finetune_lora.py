"""Fine-tune with low-rank adapters: the base comes from another run, and stays as it is.

    python examples/train_plain.py ./runs/plain
    python examples/finetune_lora.py ./runs/plain ./runs/lora

The first time the model's weights are taken from the other run. Started again, it goes on from its own newest commit,
with adapters, moments and the place in the data. The other run is only read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.training import AddedParameters, Checkpointer, ElasticSampler, Progress, ResumeReport, TrainingState

RANK, SAMPLES, BATCH, STEPS = 4, 640, 32, 40


class LowRank(nn.Linear):
    """A layer that is frozen, and the product of two small matrices that is trained. The layer's names stay."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer says, and what was learned since."""
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


def adapted() -> nn.Module:
    """Return the network of `train_plain.py`, frozen, with adapters that say nothing yet."""
    base = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).requires_grad_(False)  # noqa: FBT003  (torch's own)
    return nn.Sequential(*(LowRank(each) if isinstance(each, nn.Linear) else each for each in base))


def tune(source: str, url: str, *, on_step: Callable[[int, float], None] = print) -> tuple[ResumeReport, nn.Module]:
    """Train the adapters to the end.

    Args:
        source: The run that the base comes from.
        url: Root of this run.
        on_step: Called after each step with its number and loss.
    """
    torch.manual_seed(0)
    inputs = torch.rand(SAMPLES, 4) * 2 - 1
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, torch.cos(3 * inputs).sum(1, keepdim=True))
    model = adapted()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler)
    progress = Progress()

    state = TrainingState(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        progress=progress,
        migrators=[AddedParameters(("lora_a", "lora_b"))],
    )
    with Checkpointer(url, state, every_steps=10) as checkpointer:
        report = checkpointer.resume(source=source, only=("model",))
        while progress.global_step < STEPS:
            for ids, rows, labels in loader:
                loss = F.mse_loss(model(rows), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                sampler.advance(progress=progress)
                progress.global_step += 1
                checkpointer.observe(loss=loss, batch_ids=ids)
                if checkpointer.due():
                    checkpointer.save(metrics={"loss": loss.item()})
                on_step(progress.global_step, loss.item())
                if progress.global_step == STEPS:
                    break
    return report, model


if __name__ == "__main__":
    tune(sys.argv[1], sys.argv[2])
