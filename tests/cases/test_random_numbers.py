"""All generators go on exactly where they were: whatever the default device is, and whatever a loader draws."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainings import seed_all

from ckptstore import CheckpointStore
from ckptstore.training import Checkpointer, ElasticSampler, TrainingState, value_types

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),  # newer Pythons, of any threads
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 on torch 2.13
]

_runs = itertools.count()
SAMPLES = list(range(40))


@pytest.fixture
def url():
    return f"memory://random-{next(_runs)}"


class Job:
    """Draws from every kind of generator."""

    def __init__(self, seed, **parts):
        seed_all(seed)
        self.named = {
            "torch": torch.Generator("cpu").manual_seed(seed),
            "numpy": np.random.default_rng(seed),
            "philox": np.random.Generator(np.random.Philox(seed)),
            "legacy": np.random.RandomState(seed),
            "python": random.Random(seed),  # noqa: S311  (no secret)
        }
        self.state = TrainingState(model=nn.Linear(1, 1, device="cpu"), generators=self.named, **parts)

    def draws(self):
        return {
            "python": [random.random() for _ in range(5)],  # noqa: S311  (no secret)
            "normal": [random.gauss(0, 1) for _ in range(5)],
            "numpy": np.random.rand(5).tolist(),  # noqa: NPY002
            "numpy normal": np.random.randn(5).tolist(),  # noqa: NPY002
            "torch": torch.rand(5, device="cpu").tolist(),
            "named torch": torch.rand(5, generator=self.named["torch"], device="cpu").tolist(),
            "named numpy": self.named["numpy"].random(5).tolist(),
            "named philox": self.named["philox"].integers(100, size=5).tolist(),
            "named legacy": self.named["legacy"].randn(5).tolist(),
            "named python": [self.named["python"].random() for _ in range(5)],
        }


def resumed(url, seed=2, **parts):
    job = Job(seed, **parts)
    with Checkpointer(url, job.state) as checkpointer:
        return job, checkpointer.resume()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("where", ["saved", "resumed"])
def test_five_numbers_of_each_generator_are_those_of_the_unbroken_run(url, device, where):
    job = Job(1)
    job.draws()
    with torch.device(device if where == "saved" else "cpu"), Checkpointer(url, job.state) as checkpointer:
        checkpointer.save()
    expected = job.draws()
    with torch.device(device if where == "resumed" else "cpu"):
        other, report = resumed(url)
    assert other.draws() == expected
    names = ", ".join(f"named:{name}" for name in job.named)
    assert report.random == (f"restored: python, numpy, torch, {names}",)


def test_states_come_back_as_bytes_on_the_cpu_whatever_the_default_device_is(url):
    with Checkpointer(url, Job(1).state) as checkpointer:
        checkpointer.save()
    with torch.device("meta"):
        saved = CheckpointStore.open(url).latest().value("ranks/00000/rng", types=value_types())
    states = {name: each["state"] for name, each in saved.items() if isinstance(each["state"], torch.Tensor)}
    assert states.keys() == {"torch", "named:torch"}
    assert {(each.device.type, each.dtype) for each in states.values()} == {("cpu", torch.uint8)}


def test_saving_and_resuming_draw_nothing(url):
    first = Job(1).draws()
    saving = Job(1)
    with Checkpointer(url, saving.state) as checkpointer:
        checkpointer.save()
        assert saving.draws() == first
    other, _ = resumed(url)
    assert other.draws() == first


def test_generators_that_are_gone_or_new_are_told(url):
    with Checkpointer(url, Job(1).state) as checkpointer:
        checkpointer.save()
    job = Job(2)
    job.state.generators = {"numpy": job.named["philox"], "new": torch.Generator()}
    with Checkpointer(url, job.state) as checkpointer:
        told = checkpointer.resume().random
    assert "named:torch: left, because no generator of this name is here" in told
    assert "named:new: seeded, because no state of it was saved" in told
    kinds = "it was numpy.random.Generator PCG64 when it was saved and is numpy.random.Generator Philox"
    assert f"named:numpy: seeded, because {kinds}" in told


class Epochs:
    """A loop that draws from all generators for each batch, as dropout does from one.

    Args:
        kind: Of the loader; each draws when an iteration begins, which it does not again in the unbroken run.
        workers: Of the loader.
        seed: Of the process.
        url: Of the run.
    """

    def __init__(self, kind, workers, seed, url):
        if kind == "elastic":
            sampler = ElasticSampler(SAMPLES, batch_size=4, seed=3)
            self.loader = DataLoader(SAMPLES, batch_sampler=sampler, num_workers=workers)
            self.job, self.trained = Job(seed, sampler=sampler), sampler.advance
        else:
            self.loader = StatefulDataLoader(SAMPLES, batch_size=4, shuffle=True, num_workers=workers)
            self.job, self.trained = Job(seed, loader=self.loader), lambda: None
        self.url = url

    def train(self, batches, *, save=None):
        """Return the ids of so many batches and what was drawn for each."""
        seen = []
        while len(seen) < batches:
            for ids in self.loader:
                seen.append((ids.tolist(), self.job.draws()))
                self.trained()
                if len(seen) == save:
                    with Checkpointer(self.url, self.job.state) as checkpointer:
                        checkpointer.save()
                if len(seen) == batches:
                    break
        return seen


@pytest.mark.parametrize(("kind", "workers"), [("elastic", 0), ("elastic", 2), ("stateful", 0), ("stateful", 2)])
@pytest.mark.parametrize("at", [4, 10, 13], ids=["in an epoch", "at its end", "in the next"])
def test_what_a_loader_draws_when_it_begins_again_changes_nothing(tmp_path, kind, workers, at):
    unbroken = Epochs(kind, workers, 1, tmp_path / "run").train(16, save=at)
    fresh = Epochs(kind, workers, 2, tmp_path / "run")
    with Checkpointer(tmp_path / "run", fresh.job.state) as checkpointer:
        checkpointer.resume()
    found = fresh.train(16 - at)
    assert [ids for ids, _ in found] == [ids for ids, _ in unbroken[at:]]
    assert found == unbroken[at:]
