"""What to resume from, and how carefully."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ckptstore import Checkpoint, CheckpointStore, LogOptions, TransferOptions
from ckptstore.events import Observer, silent
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.verify import Level
from ckptstore.training.compat import Matrix
from storage_writers.roots import open_root


@dataclass(frozen=True, slots=True)
class Asked:
    """What to resume from, and how carefully.

    Args:
        url: Root of the run.
        checkpoint_id, step, seq: One checkpoint; without them the newest that is whole.
        only: Components to take, such as `("model",)`; the rest stays as it is. None: all.
        level: How deep a checkpoint is verified before it is chosen: `exists`, `etag` or `full`. Every byte is verified
            when it is loaded, whatever this says.
        matrix: Which changes of topology are allowed.
        allow: Names of fingerprints, components and facts that may differ.
        engine, storage_options, transfer: How the store is opened.
        log: How records are appended, and who must have signed them.
        observer: Hears of what fails.
        hold: Called on rank 0 with the checkpoint that was chosen, before it is loaded.
    """

    url: str
    checkpoint_id: str | None = None
    step: int | None = None
    seq: int | None = None
    only: tuple[str, ...] | None = None
    level: Level = "exists"
    matrix: Matrix | None = None
    allow: Collection[str] = ()
    engine: str | None = None
    storage_options: Mapping[str, object] | None = None
    transfer: TransferOptions | None = None
    log: LogOptions | None = None
    observer: Observer = silent
    hold: Callable[[Asked, CheckpointStore, Checkpoint], None] | None = None

    @property
    def is_one(self) -> bool:
        """Whether one checkpoint is meant, and no other will do."""
        return (self.checkpoint_id, self.step, self.seq) != (None, None, None)

    def root(self) -> ObjectStore:
        """Open the store at the run's root."""
        return open_root(self.url, engine=self.engine, storage_options=self.storage_options, transfer=self.transfer)

    def open(self) -> CheckpointStore:
        """Open the run."""
        return CheckpointStore.open(
            self.url,
            engine=self.engine,
            storage_options=self.storage_options,
            transfer=self.transfer,
            log=self.log,
        )
