"""The leaf table of a shard, hashed by threads of its own while the shard is filled and sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ckptstore.format.checksum import LeafHasher
from ckptstore.format.shard import MAX_LEAF_BYTES

RUN_BYTES = MAX_LEAF_BYTES
"""What one thread hashes at a time, about: enough to pay for handing it over, few enough to share a part."""

Step = Callable[[LeafHasher], None]


class LeafTable:
    """Hashes items leaf by leaf, as `LeafHasher` does, which does it: on other threads, and several leaves at once.

    Leaves do not depend on each other, so that a run of whole leaves may go to any thread. A leaf that goes on in the
    next part is continued by the hasher that began it, once that has hashed what stood before.

    No byte is copied: what is handed over must stay what it is until it has been hashed, and is held until then.

    Args:
        threads: How many hash at once.
    """

    def __init__(self, *, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-hash")
        self._hashers = [LeafHasher()]
        self._steps: list[Step] = []
        self._run_bytes = 0
        self._last: Future[None] | None = None
        self._under_way: list[Future[None]] = []
        self._leaf_bytes, self._into_leaf = 1, 0

    def begin(self, leaf_bytes: int) -> None:
        """Start an item whose leaves have `leaf_bytes`."""
        self._leaf_bytes, self._into_leaf = leaf_bytes, 0
        self._steps.append(lambda hasher: hasher.begin(leaf_bytes))

    def update(self, data: memoryview) -> None:
        """Take the item's next bytes."""
        while data:
            # To the first end of a leaf at which the run is long enough.
            left = self._leaf_bytes - self._into_leaf
            more = max(0, RUN_BYTES - self._run_bytes - left)
            piece = data[: left + -(-more // self._leaf_bytes) * self._leaf_bytes]
            data = data[piece.nbytes :]
            self._steps.append(lambda hasher, piece=piece: hasher.update(piece))  # type: ignore[misc]
            self._run_bytes += piece.nbytes
            self._into_leaf = (self._into_leaf + piece.nbytes) % self._leaf_bytes
            if self._run_bytes >= RUN_BYTES and not self._into_leaf:
                self._begin_anew()

    def finish(self) -> None:
        """End the item: its last leaf may be short, and an empty item has none."""
        self._steps.append(LeafHasher.finish)
        self._into_leaf = 0
        if self._run_bytes >= RUN_BYTES:
            self._begin_anew()

    def flush(self) -> None:
        """Let all that was taken be hashed, and so be let go: nothing is kept back to make a run longer."""
        if self._steps:
            steps, self._steps, self._run_bytes = self._steps, [], 0
            self._last = self._pool.submit(_hash, self._hashers[-1], steps, self._last)
            self._under_way.append(self._last)

    def wait(self, *, left: int = 0) -> None:
        """Wait until at most the last `left` runs are under way. With none, all that was taken may be changed."""
        self.flush()
        over = max(0, len(self._under_way) - left)
        for run in self._under_way[:over]:
            run.result()
        del self._under_way[:over]

    def table(self) -> bytes:
        """Return the table, when all is hashed."""
        self.wait()
        return b"".join(hasher.table for hasher in self._hashers)

    def _begin_anew(self) -> None:
        """Let a new hasher take what follows: it begins with a leaf."""
        self.flush()
        self._hashers.append(LeafHasher())
        self._last = None
        leaf_bytes = self._leaf_bytes
        self._steps.append(lambda hasher: hasher.begin(leaf_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _hash(hasher: LeafHasher, steps: list[Step], before: Future[None] | None) -> None:
    if before is not None:
        before.result()  # it was handed over earlier, so it has begun, and waits for nothing but earlier ones
    for step in steps:
        step(hasher)
    steps.clear()  # and with it what was hashed
