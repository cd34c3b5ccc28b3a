"""A product that breaks its promises, one each: called in the processes of a drill's ranks, before anything else.

A drill that passes with one of these is worth nothing.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from ckptstore.format.layout import Stem
from ckptstore.training import gradients, order, resuming, rng
from ckptstore.training.compat import Decision
from ckptstore.transfer import download
from storage_writers.gates import Gate


def no_fallback(_):
    """Only the newest checkpoint is tried."""
    candidates = resuming._candidates
    resuming._candidates = lambda store, asked: candidates(store, asked)[:1]


def no_hashes(_):
    """Whatever bytes come are taken."""

    def fetch(store, span, table, fetching):
        with fetching:
            return download._range(store, span.shard, span.start, span.length)

    download.fetch_verified = fetch


def in_place(place):
    """Shards are written over those of the first save."""
    there = [info.key.split("/")[2] for info in place.store().list("data/")]
    own = Stem.shard_key
    if there:
        Stem.shard_key = lambda self, rank: own(Stem.parse(there[0]), rank)  # noqa: ARG005


def no_matrix(_):
    """Whatever the matrix says, any topology is loaded."""
    Decision.is_open = property(lambda _: True)


def gradients_lost(_):
    """The micro-step is restored, and the gradients of the batches before are not."""
    gradients.apply = lambda *_, **__: None


def endless_patience(_):
    """A save has all the time in the world."""
    begin = Gate.__init__
    Gate.__init__ = lambda self, _: begin(self, 3600.0)


def other_random_numbers(_):
    """Random numbers go on from anywhere."""
    rng.restore = lambda *_, **__: rng.RngReport()


def sleeps(*_):
    """Do what a rank does that hangs."""
    time.sleep(300)


def moments_mixed_up(_):
    """The first moments are taken for the second ones."""
    restored = resuming.resume

    def resume(state, *given):
        report = restored(state, *given)
        for optimizer in state.optimizers.values():
            for moments in optimizer.state.values():
                moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]
        return report

    resuming.resume = resume


def other_samples(_):
    """The order of samples depends on how many ranks there are."""
    fixed = order.EpochOrder
    order.EpochOrder = lambda *, seed, **more: fixed(seed=seed + dist.get_world_size(), **more)


def nothing(*_):
    """Do what a rank does that has nothing to do."""
