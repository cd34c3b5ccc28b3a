"""What one process does when it is measured. See `benchmarks.child`."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.child import BEGIN, LITTLE_BYTES, Job, Outcome, warm_up_root
from benchmarks.measure import Cost, measured
from benchmarks.peers import PEERS, BackgroundPeer, Peer
from benchmarks.workloads import Shape, State, differing, make, plain, shape_of
from ckptstore.options import TransferOptions
from ckptstore.units import MIB

STEP = "step-1"
SAVES = 4
SECONDS = 600.0


def save(job: Job) -> Outcome:
    """Save once."""
    shape, peer = _begun(job)
    _warm_up(peer, shape)
    state = make(shape)
    return Outcome(_cost(lambda: peer.save(state, STEP)), shape.nbytes)


def load(job: Job) -> Outcome:
    """Load what `save` saved, and compare it."""
    shape, peer = _begun(job)
    target = make(shape, touched_only=True)
    _warm_up(type(peer)(warm_up_root(job.root)), shape, loads=True)
    cost = _cost(lambda: peer.load(target, STEP))
    if not job.peer.startswith("raw") and (wrong := differing(shape, target)):
        raise ValueError(f"{job.peer} loaded {len(wrong)} tensors wrongly: {wrong[:3]}.")
    return Outcome(cost, shape.nbytes)


def stall(job: Job) -> Outcome:
    """Save in the background several times, and measure how long each stops the caller, from the second one on.

    The facts hold how long the least takes: one copy of the state into memory that has been touched.
    """
    shape, peer = _begun(job)
    _warm_up(peer, shape)
    state = make(shape)
    copying = _copy_seconds(state, make(shape, touched_only=True))
    background = _limited(peer, job)
    blocked, costs = [], []
    for number in range(SAVES):
        times: list[float] = []

        def once(number: int = number, times: list[float] = times) -> None:
            began = time.perf_counter()
            ending = background.begin(state, f"step-{number}")
            background.fence()
            times.append(time.perf_counter() - began)
            ending.result(SECONDS)

        costs.append(measured(once))
        blocked += times
    later, stood = costs[1:], statistics.median(blocked[1:])
    cost = Cost(
        statistics.median(each.wall_seconds for each in later),
        statistics.median(each.cpu_seconds for each in later),
        max(each.peak_extra_bytes for each in later),
        stood,
    )
    facts = {"copy_seconds": copying, "blocked_by_the_first_seconds": blocked[0]}
    return Outcome(cost, shape.nbytes, facts | {"blocked_by_copies": stood / copying})


def pile_up(job: Job) -> Outcome:
    """Begin three saves in the background, one after the other, and wait for all: how much memory do they hold?"""
    shape, peer = _begun(job)
    _warm_up(peer, shape)
    state = make(shape)
    background = _limited(peer, job)

    def work() -> None:
        endings = [background.begin(state, f"step-{number}") for number in range(3)]
        background.fence()
        for ending in endings:
            ending.result(SECONDS)

    cost = _cost(work)
    options: Any = TransferOptions()
    budgets = job.options["staging_bytes"] + options.transfer_bytes
    return Outcome(cost, shape.nbytes, {"states": cost.peak_extra_bytes / shape.nbytes, "budgets_mib": budgets / MIB})


def rounds(job: Job) -> Outcome:
    """Save several times, then load each: what MLPerf Storage's checkpointing does. The facts list what each took."""
    shape, peer = _begun(job)
    _warm_up(peer, shape, loads=True)
    state = make(shape)
    names = [f"step-{number}" for number in range(job.options["checkpoints"])]
    saves = [_cost(partial(peer.save, state, name)) for name in names]
    loads = []
    for name in names:
        for tensor in state.values():
            plain(tensor).zero_()
        loads.append(_cost(partial(peer.load, state, name)))
    if not job.peer.startswith("raw") and (wrong := differing(shape, state)):
        raise ValueError(f"{job.peer} loaded {len(wrong)} tensors wrongly: {wrong[:3]}.")
    total = Cost(
        sum(each.wall_seconds for each in saves + loads),
        sum(each.cpu_seconds for each in saves + loads),
        max(each.peak_extra_bytes for each in saves + loads),
    )
    facts = {
        f"{what}_{field}": [getattr(each, field) for each in costs]
        for what, costs in (("save", saves), ("load", loads))
        for field in ("wall_seconds", "cpu_seconds", "peak_extra_bytes")
    }
    return Outcome(total, shape.nbytes, facts)


ACTS: dict[str, Callable[[Job], Outcome]] = {
    "save": save,
    "load": load,
    "stall": stall,
    "pile_up": pile_up,
    "rounds": rounds,
}


def is_sharded(job: Job) -> bool:
    """Return whether the state is one that ranks share, be it only one."""
    return shape_of(job.kind, job.size).is_sharded


def _begun(job: Job) -> tuple[Shape, Peer]:
    return shape_of(job.kind, job.size), PEERS[job.peer](job.root)


def _warm_up(peer: Peer, like: Shape, *, loads: bool = False) -> None:
    """Save something little (and load it), so that imports, connections and a run's beginning are not measured."""
    little: State = make(shape_of("sharded" if like.is_sharded else "dense", LITTLE_BYTES))
    peer.save(little, "warm-up")
    if loads:
        peer.load(little, "warm-up")


def _cost(work: Callable[[], object]) -> Cost:
    if (url := os.environ.get(BEGIN)) and os.environ.get("RANK") == "0":
        with contextlib.suppress(OSError):  # whatever is answered
            urllib.request.urlopen(url, timeout=SECONDS).close()  # noqa: S310  (the parent's own proxy)
    if dist.is_initialized():
        dist.barrier()
    return measured(work)


def _limited(peer: Peer, job: Job) -> BackgroundPeer:
    if not isinstance(peer, BackgroundPeer):
        raise TypeError(f"{job.peer} does not save in the background.")
    peer.limit(job.options["staging_bytes"])
    return peer


def _copy_seconds(state: State, other: State) -> float:
    """Return how long one copy takes, into memory that was touched before: the median of five."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for name, tensor in state.items():
            plain(other[name]).copy_(plain(tensor))
        times.append(time.perf_counter() - began)
    return statistics.median(times)
