"""Which transfer options suit a store: tried out by sending and reading shards, hashed as always.

It is bounded: it ends after its seconds, each measurement has its bytes, and nothing that was written stays. Of what
is about as fast as the fastest, the one that holds the least memory is recommended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.errors import InvalidInputError, OutcomeUnknownError, StalledError, UnavailableError
from ckptstore.format.shard import Chunk, ShardLayout, StoredShard, TensorMeta, lay_out
from ckptstore.maintenance.report import Began, Check
from ckptstore.maintenance.visit import Visit
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions, check_counts, check_seconds, usable_cores
from ckptstore.transfer.download import BoxRead, read_boxes
from ckptstore.transfer.upload import upload_shard
from ckptstore.units import MIB

PARTS = (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
FETCHES = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
IN_FLIGHT = (2, 4, 8, 16)
HASH_THREADS = (1, 2, 4)
ROUNDS = 2
"""Everything is measured so often, in turns; the faster time counts."""
ABOUT_AS_FAST = 0.95
SAMPLE_SECONDS = 2.0
_BLOCK_BYTES = 8 * MIB
_FIRST_BYTES = 8 * MIB

Way = Literal["save", "load"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far it goes.

    Args:
        transfer_bytes: What a rank may hold of bytes on their way; nothing is tried that needs more.
        sample_bytes: The largest object of one measurement. Slow stores get smaller ones.
        seconds: After this long no other measurement begins.

    Raises:
        InvalidInputError: A value is not above 0, or the budget does not hold two of the smallest parts.
    """

    transfer_bytes: int = 64 * MIB
    sample_bytes: int = 256 * MIB
    seconds: float = 120.0

    def __post_init__(self) -> None:
        check_counts(transfer_bytes=self.transfer_bytes, sample_bytes=self.sample_bytes)
        check_seconds(seconds=self.seconds)
        least = PARTS[0] * IN_FLIGHT[0]
        if self.transfer_bytes < least:
            raise InvalidInputError(
                f"transfer_bytes is {self.transfer_bytes}: there is nothing to choose from.",
                hint=f"Allow {least} or more.",
            )


@dataclass(frozen=True, slots=True)
class Tried:
    """One choice, and how fast it was.

    Args:
        way: Saving or loading.
        options: The choice; of a load only its `fetch…` matter.
        mib_per_second: Of the faster round; None: it failed, in whichever round.
        failure: Why.
    """

    way: Way
    options: TransferOptions
    mib_per_second: float | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What came of it.

    Args:
        best: What is recommended.
        tried: In the order in which they were tried first.
        is_whole: Everything was measured in the time there was.
        sample_bytes: The size of the objects.
        left_behind: Keys that could not be deleted again.
    """

    best: TransferOptions
    tried: tuple[Tried, ...]
    is_whole: bool
    sample_bytes: int
    left_behind: tuple[str, ...] = ()


def tune(
    store_with: Callable[[TransferOptions], ObjectStore],
    *,
    bounds: Bounds | None = None,
    watch: Callable[[str], None] = lambda _: None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
) -> Tuning:
    """Return the options with which saving to and loading from a store is fastest, and what was tried.

    Args:
        store_with: Opens the store, rooted at a run's root, with these options.
        bounds: How far it goes.
        watch: Told of every measurement.
        clock: This machine's.
        ids: Where the place under `probe/` gets its name.

    Raises:
        AccessDeniedError: Writing, reading or deleting is denied.
        InvalidInputError: There is no such bucket.
        UnavailableError: The store does not answer.

    If killed: objects of at most `sample_bytes` each, two at most, under `probe/`, which nobody reads. After an
        interrupt they are deleted.
    """
    bounds, clock = bounds or Bounds(), clock or SystemClock()
    base = replace(TransferOptions(), transfer_bytes=bounds.transfer_bytes)
    visit = Visit(store_with(base), clock=clock, ids=ids or SystemIds(), watch=_unheard)
    trial = _Trial(visit, store_with, clock.monotonic() + bounds.seconds, watch)
    try:
        tuning = trial.run(base, bounds)
    finally:
        left = visit.leave_even_if_interrupted()
    return replace(tuning, left_behind=left)


def part_choices(base: TransferOptions) -> list[TransferOptions]:
    """Return the sizes of parts, and how many of them at once, that fit into the budget."""
    return [
        replace(base, part_bytes=part, parts_in_flight=many)
        for part in PARTS
        for many in IN_FLIGHT
        if part * many <= base.transfer_bytes
    ]


def fetch_choices(base: TransferOptions) -> list[TransferOptions]:
    """Return the sizes of reads, and how many of them at once, that fit into the budget."""
    return [
        replace(base, fetch_bytes=fetch, fetches_in_flight=many)
        for fetch in FETCHES
        for many in IN_FLIGHT
        if fetch * many <= base.transfer_bytes
    ]


def hash_choices(base: TransferOptions) -> list[TransferOptions]:
    """Return how many threads may hash, up to as many as there are cores."""
    return [replace(base, hash_threads=many) for many in HASH_THREADS if many <= usable_cores()]


def fastest(tried: Sequence[Tried], cost: Callable[[TransferOptions], int]) -> TransferOptions | None:
    """Return the cheapest choice of those that are about as fast as the fastest one; None: all have failed."""
    speeds = [each.mib_per_second for each in tried if each.mib_per_second is not None]
    near = [each.options for each in tried if (each.mib_per_second or 0) >= ABOUT_AS_FAST * max(speeds, default=0)]
    return min(near, key=cost) if speeds else None


class _Trial:
    """The measurements of one call."""

    def __init__(
        self,
        visit: Visit,
        store_with: Callable[[TransferOptions], ObjectStore],
        deadline: float,
        watch: Callable[[str], None],
    ) -> None:
        self._visit, self._store_with, self._watch = visit, store_with, watch
        self._deadline, self._count, self._is_whole = deadline, 0, True
        self._stores: dict[TransferOptions, ObjectStore] = {}
        self._block = memoryview(os.urandom(_BLOCK_BYTES))

    def run(self, base: TransferOptions, bounds: Bounds) -> Tuning:
        """Measure, choose, and measure what depends on the choice."""
        self._visit.store.put(self._visit.key("first"), b"x")
        self._visit.store.delete(self._visit.key("first"))  # where that is denied, nothing large is written
        layout = self._layout(base, bounds.sample_bytes)
        saves = self._compared("save", part_choices(base), layout)
        best = fastest(saves, lambda o: o.part_bytes * o.parts_in_flight) or base
        hashes = self._compared("save", hash_choices(best), layout)
        best = fastest(hashes, lambda o: o.hash_threads) or best
        kept = self._save(best, layout)
        loads = self._compared("load", fetch_choices(best), layout, kept)
        best = fastest(loads, lambda o: o.fetch_bytes * o.fetches_in_flight) or best
        self._visit.delete({kept.shard.path})
        return Tuning(best, (*saves, *hashes, *loads), self._is_whole, layout.size)

    def _layout(self, base: TransferOptions, most_bytes: int) -> ShardLayout:
        """Return the layout of an object that takes about `SAMPLE_SECONDS`, by how long a small one takes."""
        first = _of_bytes(_FIRST_BYTES)
        seconds, shard = self._timed(lambda: self._save(base, first))
        self._visit.delete({shard.shard.path})
        wanted = int(_FIRST_BYTES / seconds * SAMPLE_SECONDS)
        blocks = max(2, min(most_bytes, wanted) // _BLOCK_BYTES)
        return _of_bytes(blocks * _BLOCK_BYTES)

    def _compared(
        self, way: Way, choices: Sequence[TransferOptions], layout: ShardLayout, kept: StoredShard | None = None
    ) -> list[Tried]:
        times: dict[TransferOptions, list[float]] = {choice: [] for choice in choices}
        failures: dict[TransferOptions, str] = {}
        for turn in range(ROUNDS):
            for choice in choices:
                if choice in failures:
                    continue
                if self._visit.clock.monotonic() >= self._deadline and (turn or any(times.values())):
                    self._is_whole = False
                    continue
                self._watch(f"{way}: {_told(way, choice)}, round {turn + 1}")
                try:
                    times[choice].append(self._seconds(choice, layout, kept))
                except (UnavailableError, StalledError, OutcomeUnknownError) as error:
                    failures[choice] = error.message
                    if all(measured in failures for measured, each in times.items() if each):
                        raise
        size = layout.size / MIB
        return [
            Tried(way, choice, None, failures.get(choice, "not measured"))
            if not each or choice in failures
            else Tried(way, choice, round(size / min(each), 1))
            for choice, each in times.items()
        ]

    def _seconds(self, choice: TransferOptions, layout: ShardLayout, kept: StoredShard | None) -> float:
        if kept is not None:
            return self._load(choice, kept)
        seconds, stored = self._timed(lambda: self._save(choice, layout))
        self._visit.delete({stored.shard.path})
        return seconds

    def _save(self, options: TransferOptions, layout: ShardLayout) -> StoredShard:
        self._count += 1
        key = self._visit.key(f"tune/{self._count}")
        self._visit.store.written.add(key)
        blocks = [self._block] * (layout.items[0].chunk.nbytes // _BLOCK_BYTES)
        shard = upload_shard(self._store(options), key, layout, [blocks], rank=0, options=options)
        return StoredShard(shard, layout.items)

    def _load(self, options: TransferOptions, stored: StoredShard) -> float:
        item = stored.items[0]
        out = np.ones((item.chunk.nbytes, 1), np.uint8)  # touched: a load goes into memory that is there
        read = BoxRead(stored.shard, item, (0,), item.chunk.lengths, out)
        seconds, _ = self._timed(lambda: read_boxes(self._store(options), [read], options=options))
        return seconds

    def _store(self, options: TransferOptions) -> ObjectStore:
        if options not in self._stores:
            self._stores[options] = self._store_with(options)
        return self._stores[options]

    def _timed(self, act: Callable[[], Any]) -> tuple[float, Any]:
        began = self._visit.clock.monotonic()
        found = act()
        return max(self._visit.clock.monotonic() - began, 1e-6), found


def _of_bytes(size: int) -> ShardLayout:
    return lay_out([Chunk(TensorMeta("tune", "uint8", (size,)), (0,), (size,), size)])


def _told(way: Way, options: TransferOptions) -> str:
    if way == "load":
        return f"{options.fetches_in_flight} reads of {options.fetch_bytes // MIB} MiB"
    threads = options.hash_threads
    return f"{options.parts_in_flight} parts of {options.part_bytes // MIB} MiB, {threads} to hash"


def _unheard(event: Began | Check) -> None:
    """Nothing is checked here."""
