"""What one process does when it is measured. See `benchmarks.child`."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from benchmarks.child import LITTLE_BYTES, Job, Outcome
from benchmarks.measure import Cost, measured
from benchmarks.peers import PEERS, Peer
from benchmarks.workloads import Shape, State, differing, make, shape_of

STEP = "step-1"


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
    _warm_up(type(peer)(f"{job.root}-warm-up"), shape, loads=True)
    cost = _cost(lambda: peer.load(target, STEP))
    if not job.peer.startswith("raw") and (wrong := differing(shape, target)):
        raise ValueError(f"{job.peer} loaded {len(wrong)} tensors wrongly: {wrong[:3]}.")
    return Outcome(cost, shape.nbytes)


ACTS: dict[str, Callable[[Job], Outcome]] = {"save": save, "load": load}


def _begun(job: Job) -> tuple[Shape, Peer]:
    return shape_of(job.kind, job.size), PEERS[job.peer](job.root)


def _warm_up(peer: Peer, like: Shape, *, loads: bool = False) -> None:
    """Save something little (and load it), so that imports, connections and a run's beginning are not measured."""
    little: State = make(shape_of("sharded" if like.is_sharded else "dense", LITTLE_BYTES))
    peer.save(little, "warm-up")
    if loads:
        peer.load(little, "warm-up")


def _cost(work: Callable[[], object]) -> Cost:
    if dist.is_initialized():
        dist.barrier()
    return measured(work)
