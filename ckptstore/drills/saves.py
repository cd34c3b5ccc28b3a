"""Saves of plain numbers, each of which tells whose it is and where it belongs; and ranks that stop in the middle."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import storage_writers as sw
from ckptstore.drills.place import IMPATIENT, Place
from ckptstore.drills.stops import Stop
from ckptstore.drills.told import ended
from ckptstore.drills.worker import Voice
from ckptstore.events import Event
from ckptstore.objectstore.wrappers.tapped import Act, Call, TappedStore
from ckptstore.options import RetryOptions, TransferOptions

ROWS, MARKS = 600_000, 10**9
STOP_SECONDS = 120.0
COMMIT_SECONDS, SLACK = 3.0, 2.0
"""What a save is allowed: so many seconds, and so many times what one took before the store fell silent."""
LATE_SECONDS = 10.0
"""How much later than that it must be known, on a slow machine too."""
NEVER_STALLS = TransferOptions(retry=RetryOptions(stall_timeout_seconds=300.0))
"""It does not notice by itself that a store hangs: the save's own time is what is tried."""


def state(mark: int, rows: int = ROWS) -> dict[str, Any]:
    """Return a state of which every rank holds a share, and which says `mark` everywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = torch.arange(rows // world * rank, rows // world * (rank + 1), dtype=torch.int64) + mark * MARKS
    weights = DTensor.from_local(share, init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False)
    return {"weights": weights, "bias": torch.full((5,), mark)}


def save(voice: Voice, place: Place, *, mark: int, stops: Stop | None = None) -> None:
    """Save `step-<mark>`, and perhaps stop for ever in the middle, having said `stopped`.

    Args:
        voice: Told every event by its name.
        place: The run.
        mark: Whose numbers they are.
        stops: Where. Who never comes there goes on.
    """
    calls = itertools.count(1)

    def tap(call: Call, act: Act) -> Any:
        here = stops is not None and stops.means(call, voice.rank) and next(calls) == stops.number
        if here and stops is not None and stops.before:
            _stop(voice)
        result = act()
        if here:
            _stop(voice)
        return result

    def observe(event: Event) -> None:
        voice.say(type(event).__name__, str(event))

    store = TappedStore(place.store(), tap)
    writer = sw.CkptStoreWriter(store, transfer=IMPATIENT, agree_timeout_seconds=20.0, observer=observe)
    sw.save(state(mark), checkpoint_id=f"step-{mark}", storage_writer=writer)


def save_into_silence(voice: Voice, place: Place, *, silent_rank: int) -> dict[str, Any]:
    """Save in the background while the store answers one rank no more; then it does again.

    Returns:
        What became of a save beside the first one; how the first and the second one ended, after how long, and the
        time that they were allowed; how many uploads hung; and how the last one ended.
    """
    silence, loud = threading.Event(), threading.Event()

    def tap(call: Call, act: Act) -> Any:
        if voice.rank == silent_rank and call.operation in ("write", "complete") and silence.is_set():
            loud.wait(STOP_SECONDS)
        return act()

    store, began = TappedStore(place.store(), tap), time.monotonic()
    with sw.CkptStoreWriter(store, transfer=IMPATIENT) as writer:
        sw.save(state(1), checkpoint_id="step-1", storage_writer=writer)
    limit = longest(COMMIT_SECONDS + SLACK * (time.monotonic() - began))
    writer = sw.CkptStoreWriter(
        store, transfer=NEVER_STALLS, when_busy="raise", commit_timeout_seconds=limit, agree_timeout_seconds=60.0
    )

    def begin(mark: int) -> Any:
        return sw.async_save(state(mark), checkpoint_id=f"step-{mark}", storage_writer=writer)

    def end(future: Any) -> Any:
        return future.result(limit + LATE_SECONDS)

    silence.set()
    voice.say("silence")
    first = begin(2)
    beside = ended(lambda: begin(3))
    late = [ended(lambda: end(first)), ended(lambda: end(begin(4)))]
    hung = sum(thread.name == "ckptstore-upload" for thread in threading.enumerate())
    silence.clear()
    loud.set()
    last = ended(lambda: end(begin(5)))
    return {"beside": beside, "ended": late, "limit": limit, "hung": hung, "last": last}


def longest(seconds: float) -> float:
    """Return the longest of what the ranks say."""
    whole = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    return float(whole)


def _stop(voice: Voice) -> None:
    voice.say("stopped")
    time.sleep(STOP_SECONDS)
