"""Saves of plain numbers: each checkpoint holds nothing but its own mark, so that a mixture shows."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import storage_writers as sw
from ckptstore.drills.clocks import step_clock
from ckptstore.drills.place import IMPATIENT, Place
from ckptstore.drills.told import FINE, Ended, Restored, ended
from ckptstore.drills.worker import Voice
from ckptstore.events import Committed, Event
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.wrappers.tapped import Act, Call, Tap, TappedStore
from ckptstore.options import LogOptions

NUMBERS = 1 << 17
"""Of each rank: 1 MiB."""
PAUSE_SECONDS = 0.1
WAIT_SECONDS = 60.0
LOG = LogOptions(deadline_seconds=5.0)


def untouched(call: Call, act: Act) -> Any:
    """Let a call be what it is."""
    del call
    return act()


class Saves:
    """Saves of all ranks of the group, over a store that a tap may do things to.

    Args:
        voice: Of this rank.
        place: The run.
        wrap: Put around the tapped store.
        job: What the scheduler would call it.
    """

    def __init__(
        self,
        voice: Voice,
        place: Place,
        *,
        wrap: Callable[[TappedStore], ObjectStore] | None = None,
        job: str | None = None,
    ) -> None:
        self.rank = voice.rank
        self.store = TappedStore(place.store(), untouched)
        self.committed: list[str] = []
        """What was told of as committed."""
        self._writer = sw.CkptStoreWriter(
            self.store if wrap is None else wrap(self.store),
            transfer=IMPATIENT,
            log=LOG,
            agree_timeout_seconds=20.0,
            observer=self._observe,
            job=job,
        )

    def save(self, mark: int, tap: Tap = untouched) -> Ended:
        """Save `step-<mark>` while the tap does what it does, and return how it ended."""
        self.store.tap = tap
        state = {name_of(self.rank): torch.full((NUMBERS,), mark)}
        done = ended(lambda: sw.save(state, checkpoint_id=f"step-{mark}", storage_writer=self._writer))
        self.store.tap = untouched
        return done

    def _observe(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.committed.append(event.checkpoint_id)


def name_of(rank: int) -> str:
    """Return what the tensor of a rank is called."""
    return f"rank{rank}"


def save(voice: Voice, place: Place, *, marks: Sequence[int], days: float = 0.0) -> list[Ended]:
    """Save once for each mark, on a host whose clock is so many days ahead; return how each ended."""
    step_clock(days)
    saves = Saves(voice, place)
    return [saves.save(mark) for mark in marks]


def save_until_refused(voice: Voice, place: Place, *, job: str, first: int) -> list[Ended]:
    """Save again and again as a job, and say `saved` with each mark; return how the failed one ended, and one more."""
    saves = Saves(voice, place, job=job)
    for mark in itertools.count(first):
        done = saves.save(mark)
        if done.kind != FINE:
            return [done, saves.save(mark + 1)]
        voice.say("saved", mark)
        time.sleep(PAUSE_SECONDS)
    raise AssertionError("marks do not end")


def restore(voice: Voice, place: Place, *, mark: int, shards: int) -> Restored:
    """Load `step-<mark>`, and wait after the first bytes until it is told to go on; then load the latest."""
    first, goes_on = itertools.count(), threading.Event()

    def tap(call: Call, act: Act) -> Any:
        if call.operation != "get_range" or next(first):
            if call.operation == "get_range":
                goes_on.wait(WAIT_SECONDS)
            return act()
        result = act()
        voice.say("reading")
        voice.hear(WAIT_SECONDS)
        goes_on.set()
        return result

    store = TappedStore(place.store(), tap)

    def loaded(checkpoint_id: str | None) -> tuple[Ended, frozenset[int]]:
        state = {name_of(rank): torch.zeros(NUMBERS, dtype=torch.int64) for rank in range(shards)}
        reader = sw.CkptStoreReader(store, checkpoint_id=checkpoint_id, transfer=IMPATIENT)
        done = ended(lambda: sw.load(state, storage_reader=reader))
        return done, frozenset(each for tensor in state.values() for each in tensor.tolist())

    return Restored(*loaded(f"step-{mark}"), *loaded(None))
