"""A small language training with all that a careless program can forget."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from ckptstore.training import Checkpointer, Collate, ElasticSampler, PerRank, Progress, TrainingState

SAMPLES, BATCH, MICRO_STEPS, PROOF_STEPS = 96, 4, 2, 4
WORDS = [f"word{number}" for number in range(11)]
TEXTS = {"name": "small", "files": {"a.txt": "blake3:aa", "b.txt": "blake3:bb"}}


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


class Pairs(Dataset):
    """A token and the one that follows it; another `text` has others."""

    def __init__(self, length=SAMPLES, text=0):
        self.length, self.text = length, text

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.text + index)
        token = int(torch.randint(len(WORDS), (), generator=generator))
        return index, token, (token * 3 + self.text) % len(WORDS)


class Words:
    """A tokenizer."""

    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]


class Model(nn.Module):
    def __init__(self, vocabulary, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, vocabulary)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(self.drop(hidden))


def warm_then_slower(step):
    return min(1.0, (step + 1) / 6) * 0.97**step


class Callback:
    """What a loop hangs in to get ready for more; its state is each rank's own."""

    def __init__(self):
        self.resumes = 0
        self.when_resumed = lambda: None

    def state_dict(self):
        return {"resumes": self.resumes}

    def load_state_dict(self, state):
        self.resumes = state["resumes"] + 1
        self.when_resumed()


@dataclass
class Program:
    """One process's program; what it is not told is done with care.

    Args:
        seed: Of the process.
        vocabulary, layers, optimizer, dataset, texts, words: What it trains, and on what.
        scaled: Whether the scaler is enabled.
        without: Components that it forgets to hand over.
        counts: Whether the loop's micro-steps are those of the state's progress.
        options: Further arguments of the state.
    """

    seed: int = 1
    vocabulary: int = len(WORDS)
    layers: int = 1
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    dataset: Dataset = field(default_factory=Pairs)
    texts: Any = field(default_factory=lambda: TEXTS)
    words: list[str] = field(default_factory=lambda: WORDS)
    scaled: bool = True
    without: tuple[str, ...] = ()
    counts: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        seed_all(self.seed)
        self.model = Model(self.vocabulary, self.layers)
        self.opt = self.make_optimizer()
        self.scheduler = self.make_scheduler()
        self.scaler = self.make_scaler()
        self.sampler = ElasticSampler(self.dataset, batch_size=BATCH, seed=5)
        self.progress, self.callback = Progress(), Callback()
        self.micro_step = 0
        self.seen = {"loss": 0.0, "ids": []}
        given = {
            "model": self.model,
            "optimizer": self.opt,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "sampler": self.sampler,
            "loader": {"callback": PerRank(self.callback)},
            "progress": self.progress,
            "extras": self.seen,
            "fingerprints": {"dataset": self.texts, "tokenizer": Words(self.words)},
        }
        kept = {name: value for name, value in given.items() if name not in self.without}
        self.state = TrainingState(**{**kept, **self.options})

    def make_optimizer(self):
        return self.optimizer(self.model.parameters(), lr=0.02)

    def make_scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.opt, warm_then_slower)

    def make_scaler(self):
        return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=self.scaled)

    def loader(self):
        return DataLoader(self.dataset, batch_sampler=self.sampler, collate_fn=Collate(self.dataset[0]))

    def micro(self, batch):
        """Train on one batch; return whether it ended a step."""
        ids, tokens, following = batch
        loss = cross_entropy(self.model(tokens), following) / MICRO_STEPS
        self.scaler.scale(loss).backward()
        self.seen["loss"] += loss.item()
        self.seen["ids"] += ids.tolist()
        self.sampler.advance(progress=self.progress)
        self.micro_step += 1
        if self.counts:
            self.progress.micro_step = self.micro_step
        return self.micro_step == MICRO_STEPS

    def step(self):
        """End a step; return what is to be observed of it."""
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        self.scheduler.step()
        self.micro_step = self.progress.micro_step = 0
        self.progress.global_step += 1
        seen = {"loss": self.seen["loss"], "grad_norm": norm, "batch_ids": self.seen["ids"]}
        self.seen["loss"], self.seen["ids"] = 0.0, []
        return seen

    def train(self, until, checkpointer, *, save_at=(), after_first_batch=None):
        """Train to a global step; save at these steps and micro-steps, inside of an epoch's loop."""
        while self.progress.global_step < until:
            for batch in self.loader():
                if after_first_batch is not None:
                    after_first_batch()
                    after_first_batch = None
                if self.micro(batch):
                    checkpointer.observe(**self.step())
                if (self.progress.global_step, self.micro_step) in save_at:
                    checkpointer.save()
                if self.progress.global_step == until:
                    break

    def resume(self, checkpointer, **asked):
        """Resume as a careful program does: its own counter follows."""
        report = checkpointer.resume(**asked)
        self.micro_step = self.progress.micro_step
        return report


def save_in_the_middle(url, **how):
    """Save between two micro-steps, in the middle of an epoch, and go on until its trace is whole."""
    program = Program(**how)
    with Checkpointer(url, program.state, proof_steps=PROOF_STEPS) as checkpointer:
        program.train(5 + PROOF_STEPS, checkpointer, save_at=[(5, 1)])
    return program
