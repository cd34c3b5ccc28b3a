"""A small training on real ranks whose metrics are scraped over HTTP, as Prometheus does it."""

from __future__ import annotations

import threading
import time
import urllib.request
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ckptstore.objectstore.urls import open_store
from ckptstore.telemetry import Metrics
from ckptstore.testing.faults import Fault
from ckptstore.testing.tapped import TappedStore
from ckptstore.training import Checkpointer, ElasticSampler, Progress, TrainingState
from storage_writers import roots

RUN = "story"
SAMPLES, BATCH = 96, 12


def parsed(text):
    """Return the samples of an exposition: values by name and by the labels beside `run`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "run"))
            assert sample.labels["run"] == RUN
            found[(sample.name, *labels)] = sample.value
    return found


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())


class Store(TappedStore):
    """A store that can be told to refuse, or to wait with, what is called so."""

    refused, waiting = "", ""
    going = threading.Event()

    def __init__(self, inner):
        super().__init__(inner, self._meet)

    @classmethod
    def _meet(cls, call, act):
        if cls.refused and cls.refused in call.key and call.writes:
            from ckptstore.errors import AccessDeniedError  # noqa: PLC0415  (of this fault alone)

            raise AccessDeniedError(f"{Fault.DENIED.value}: {call.key}")
        if cls.waiting and cls.waiting in call.key:
            assert cls.going.wait(30)
        return act()

    @classmethod
    @contextmanager
    def refusing(cls, name):
        cls.refused = name
        try:
            yield
        finally:
            cls.refused = ""

    @classmethod
    @contextmanager
    def holding(cls, name):
        """Let requests for what is called so wait within; yield what lets them go."""
        cls.waiting, cls.going = name, threading.Event()
        try:
            yield cls.going.set
        finally:
            cls.going.set()
            cls.waiting = ""


class Story:
    """A training under FSDP2; its metrics are served on a port of its own."""

    def __init__(self, url, *, seed=1, metrics=None, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.sampler = ElasticSampler(SAMPLES, batch_size=BATCH, seed=5)
        self.progress = Progress()
        self.state = TrainingState(
            model=self.model, optimizer=self.optimizer, sampler=self.sampler, progress=self.progress
        )
        self.metrics = metrics or Metrics(run=RUN)
        self.port = self.metrics.serve(port=0)
        with mock.patch.object(roots, "open_store", lambda *given, **more: Store(open_store(*given, **more))):
            self.checkpointer = Checkpointer(
                url, self.state, **{"background": False, "proof_steps": 2, "observer": self.metrics, **options}
            )
        self.shares = iter(())

    def steps(self, count):
        for _ in range(count):
            ids = next(self.shares, None)
            if ids is None:
                self.shares = iter(self.sampler)
                ids = next(self.shares)
            rows = torch.tensor([[index, index % 7, index % 3, 1.0] for index in ids]).reshape(-1, 4) / 10
            total = self.sampler.batch_samples
            loss = functional.mse_loss(self.model(rows), rows[:, :1], reduction="sum") / total
            (loss * dist.get_world_size()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.sampler.advance(progress=self.progress)
            self.progress.global_step += 1
            dist.all_reduce(loss.detach_())
            self.checkpointer.observe(loss=loss, batch_ids=ids)
            self.checkpointer.due()

    def scrape(self):
        dist.barrier()
        return scraped(self.port)

    def close(self):
        self.checkpointer.close()
        self.metrics.close()


def until(true, seconds=20):
    """Wait for something that is to become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
