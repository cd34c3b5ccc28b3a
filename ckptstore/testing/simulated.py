"""A save of several ranks in one process, without torch: what crash tests and drills of a store run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt

from ckptstore.format.shard import Chunk, StoredItem, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import Attempt, Description, begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_parts
from ckptstore.transfer.upload import upload_shard

ROWS = 4
NAME = "model.weight"
OPTIONS = TransferOptions(fetches_in_flight=1)


class ManualClock:
    """A clock that moves only when somebody sleeps, and a little with every look at it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        """Return a date in 2026, later the longer was slept."""
        return datetime(2026, 1, 2, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        """Return the seconds slept so far."""
        self.seconds += 1e-6
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass at once."""
        self.seconds += seconds


class CountedIds:
    """Identifiers in order: `0…01`, `0…02`. Give each process of a test its own `first` digit."""

    def __init__(self, first: str = "0") -> None:
        self.first, self.count = first, 0

    def nonce(self) -> str:
        """Return the next identifier."""
        self.count += 1
        return f"{self.first}{self.count:031x}"

    def fraction(self) -> float:
        """Return a jitter of one half."""
        return 0.5


def values(rank: int, seed: int) -> npt.NDArray[np.float32]:
    """Return the rows that `rank` holds."""
    return np.arange(ROWS, dtype=np.float32) + 100 * seed + 10 * rank


def upload(store: ObjectStore, attempt: Attempt, rank: int, *, seed: int = 0) -> StoredShard:
    """Upload one rank's shard and return its receipt.

    If killed: nothing, or an object under the attempt's private prefix.
    """
    rows = values(rank, seed)
    tensor = TensorMeta(NAME, "float32", (ROWS * attempt.world_size,))
    layout = lay_out([Chunk(tensor, (ROWS * rank,), (ROWS,), rows.nbytes)])
    shard = upload_shard(store, attempt.stem.shard_key(rank), layout, [[rows.tobytes()]], rank=rank, options=OPTIONS)
    return StoredShard(shard, layout.items)


def save(
    log: RunLog, incarnation: Incarnation, name: str, *, step: int = 0, world_size: int = 3, seed: int = 0
) -> Committed:
    """Save a tensor that is sharded over `world_size` ranks, one after the other.

    If killed: like a real save: whole or absent.
    """
    description = Description(global_step=step, metrics={"seed": seed})
    attempt = begin(log, incarnation, checkpoint_id=name, world_size=world_size, description=description)
    shards = [upload(log.store, attempt, rank, seed=seed) for rank in range(world_size)]
    return commit(log, incarnation, attempt, shards, options=OPTIONS)


def load(catalog: Catalog, committed: Committed) -> npt.NDArray[np.float32]:
    """Return the tensor of a simulated save."""
    store = catalog.log.store
    stored: list[tuple[str, StoredItem]] = [
        (shard.shard.path, item)
        for part in load_parts(store, committed)
        for shard in part.shards
        for item in shard.items
    ]
    pieces = [
        store.get_range(path, start=item.position, length=item.chunk.nbytes)
        for path, item in sorted(stored, key=lambda each: each[1].chunk.offsets)
    ]
    return np.frombuffer(b"".join(pieces), dtype=np.float32)
