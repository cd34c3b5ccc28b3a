"""Many shards verified at once: every byte hashed, by so many threads, within the budget of the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from ckptstore.errors import IntegrityError
from ckptstore.format.shard import StoredShard
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.budget import budget
from ckptstore.transfer.download import checked_table, damaged_leaves, fetch, spans_of_shard
from ckptstore.transfer.spans import Span


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a shard.

    Args:
        error: The first thing that was found.
        tensors: Names of those whose bytes are hit: all of the shard's where its structure is.
    """

    error: IntegrityError
    tensors: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Open:
    """A shard whose structure is right: its leaf table, and the spans that nobody has taken yet."""

    stored: StoredShard
    table: bytes
    spans: Iterator[Span]


def names_in(stored: StoredShard) -> tuple[str, ...]:
    """Return the names of all that a shard holds, sorted."""
    return tuple(sorted({item.chunk.tensor.name for item in stored.items}))


def verify_shards(
    store: ObjectStore,
    shards: Sequence[StoredShard],
    *,
    options: TransferOptions,
    watch: Callable[[int], None],
) -> dict[str, Damage]:
    """Hash every byte of `shards`, as `verify_shard` does, and return what is damaged, by path (I13).

    `fetches_in_flight` threads read and hash, or as many as there is room for. Together they hold `transfer_bytes` at
    most, with all else that this process moves, and 32 bytes for each leaf of as many shards. No thread survives the
    call.

    Args:
        store: Rooted at the run.
        shards: Of any checkpoint.
        options: How bytes are moved.
        watch: Told how many more bytes were hashed; by one thread at a time.

    Raises:
        CkptStoreError: The store could not be read; that is no verdict.
    """
    work = _Work(store, shards, options, watch)
    # No more threads than reads have room: one that waits would keep the memory of the read that it made before.
    room = options.transfer_bytes // min(options.fetch_bytes, options.transfer_bytes)
    work.run(min(options.fetches_in_flight, room))
    return {path: Damage(found.error, tuple(sorted(found.tensors))) for path, found in work.damage.items()}


@dataclass(slots=True)
class _Found:
    error: IntegrityError
    tensors: set[str] = field(default_factory=set)


class _Work:
    """What is to be done: spans of shards that are open first, so that few are open at once."""

    def __init__(
        self,
        store: ObjectStore,
        shards: Iterable[StoredShard],
        options: TransferOptions,
        watch: Callable[[int], None],
    ) -> None:
        self._store, self._options, self._watch = store, options, watch
        self._shards, self._open = iter(shards), deque[_Open]()
        self._opening, self._stopped = 0, False
        self._changed = threading.Condition()
        self.damage: dict[str, _Found] = {}

    def run(self, threads: int) -> None:
        """Do it all. The first failure that is no damage stops everything and is raised."""
        if threads == 1:
            self._work()
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-verify") as pool:
            try:
                for future in [pool.submit(self._work) for _ in range(threads)]:
                    future.result()
            finally:
                self._stop()  # an interrupt of this thread stops the others too

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                task()
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._stopped:
                while self._open:
                    span = next(self._open[0].spans, None)
                    if span is not None:
                        return partial(self._hash, self._open[0], span)
                    self._open.popleft()
                stored = next(self._shards, None)
                if stored is not None:
                    self._opening += 1
                    return partial(self._begin, stored)
                if not self._opening:
                    break
                self._changed.wait()  # for a request of another thread, which has limits of its own
            return None

    def _begin(self, stored: StoredShard) -> None:
        shard, opened = stored.shard, None
        nbytes = shard.header_bytes + shard.size - shard.leaf_table_offset
        try:
            with budget().taken(nbytes, options=self._options):
                table = checked_table(self._store, stored)
            opened = _Open(stored, table, spans_of_shard(stored, self._options))
        except IntegrityError as error:
            self._note(stored, error, names_in(stored))
        finally:
            with self._changed:
                self._opening -= 1
                if opened is not None:
                    self._open.append(opened)
                    self._watch(nbytes)
                self._changed.notify_all()

    def _hash(self, opened: _Open, span: Span) -> None:
        try:
            with budget().taken(span.length, options=self._options):
                data = fetch(self._store, span)
                for error in damaged_leaves(span, data, opened.table):
                    self._note(opened.stored, error, (str(error.facts["tensor"]),))
                del data
        except IntegrityError as error:  # it is gone, or shorter, since it was opened
            self._note(opened.stored, error, {leaf.wanted.item.chunk.tensor.name for leaf in span.leaves})
        with self._changed:
            self._watch(span.length)

    def _note(self, stored: StoredShard, error: IntegrityError, names: Iterable[str]) -> None:
        with self._changed:
            self.damage.setdefault(stored.shard.path, _Found(error)).tensors.update(names)
