"""The desk: a run's checkpoints, without torch. It only forwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ckptstore.clock import SystemClock, SystemIds
from ckptstore.errors import NotFoundError
from ckptstore.events import Observer, silent
from ckptstore.format.codec import Part
from ckptstore.format.dtypes import array_dtype
from ckptstore.format.records import Commit, SetAside
from ckptstore.format.shard import Shard, StoredItem, TensorMeta
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.catalog import Catalog, Uncommitted
from ckptstore.protocol.fold import Committed, Ignored, Reign
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.verify import Level, Progress, Verdict, readable_records, unwatched
from ckptstore.transfer.assemble import box_of, read_bytes, whole


@dataclass(frozen=True, slots=True)
class Key:
    """What a checkpoint says of one of its keys.

    Args:
        name: Fully qualified.
        dtype: torch's name without the module, or `bytes` for a value that is not a tensor.
        shape: Global shape; `(nbytes,)` for `bytes`.
        nbytes: Stored bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """One committed moment of a run. Got from a `CheckpointStore`, never made by hand."""

    def __init__(self, store: ObjectStore, catalog: Catalog, committed: Committed, transfer: TransferOptions) -> None:
        self._store, self._catalog, self._transfer = store, catalog, transfer
        self.committed = committed

    @property
    def seq(self) -> int:
        """Its identity: the slot of its commit."""
        return self.committed.seq

    @property
    def checkpoint_id(self) -> str:
        """Its name; a label that may repeat."""
        return self.commit.checkpoint_id

    @property
    def global_step(self) -> int | None:
        """The step it was saved at, if that was said; a label that may repeat."""
        return self.commit.global_step

    @property
    def committed_at(self) -> str:
        """When its record was made, by the trainer's clock: ISO 8601 in UTC. For people; nothing is decided by it."""
        return self.committed.written_at

    @property
    def saved_world_size(self) -> int:
        """How many ranks saved it."""
        return self.commit.saved_world_size

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured when it was saved."""
        return self.commit.metrics

    @property
    def commit(self) -> Commit:
        """The whole commit record."""
        return self.committed.commit

    def __repr__(self) -> str:
        return f"Checkpoint({self.checkpoint_id!r}, seq={self.seq}, step={self.global_step})"

    @cached_property
    def keys(self) -> Mapping[str, Key]:
        """Every key with its dtype and shape, by name, sorted. Reads the manifest parts once, verified."""
        sizes: dict[TensorMeta, int] = {}
        for items in self._items.values():
            for _, item in items:
                sizes[item.chunk.tensor] = sizes.get(item.chunk.tensor, 0) + item.chunk.nbytes
        return {
            tensor.name: Key(tensor.name, tensor.dtype, tensor.shape, nbytes)
            for tensor, nbytes in sorted(sizes.items(), key=lambda pair: pair[0].name)
        }

    def read(self, key: str, index: Sequence[slice] = ()) -> npt.NDArray[np.generic]:
        """Return a tensor, or a box of it, as NumPy; only the leaves that it needs are fetched, each verified.

        Args:
            key: Fully qualified name.
            index: One slice per dimension, without steps; missing ones are whole.

        Returns:
            An array of the saved dtype (`ml_dtypes` for bfloat16 and float8), owned by the caller. Where NumPy has no
            such dtype, uint8 with one axis more, for an element's bytes. A value that is no tensor comes as the uint8
            of its stored bytes; nothing is ever unpickled here.

        Raises:
            NotFoundError: The checkpoint has no such key.
            InvalidInputError: The index is not a box of it.
            IntegrityError: A byte is not what was written.
        """
        items = self._items.get(key)
        if items is None:
            raise NotFoundError(
                f"{self.checkpoint_id} (seq {self.seq}) has no key {key!r}; it has {len(self._items)} others.",
                hint=f"Run `ckptstore show {self._store.url} {self.checkpoint_id} --keys`.",
                key=key,
            )
        tensor = items[0][1].chunk.tensor
        box = box_of(tensor, index) if index else whole(tensor)
        raw = read_bytes(self._store, items, box, options=self._transfer)
        dtype = array_dtype(tensor.dtype)
        return raw if dtype is None else raw.view(dtype)[..., 0]

    @cached_property
    def _parts(self) -> Sequence[Part]:
        return self._catalog.load_parts(self._store, self.committed)

    @cached_property
    def _items(self) -> Mapping[str, list[tuple[Shard, StoredItem]]]:
        items: dict[str, list[tuple[Shard, StoredItem]]] = {}
        for part in self._parts:
            for stored in part.shards:
                for item in stored.items:
                    items.setdefault(item.chunk.tensor.name, []).append((stored.shard, item))
        return items


class CheckpointStore:
    """A run: its root, its log, its checkpoints. Opening creates nothing and claims nothing."""

    def __init__(self, store: ObjectStore, log: RunLog, transfer: TransferOptions) -> None:
        self._store, self._log, self._transfer = store, log, transfer
        self._catalog = Catalog(log)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        transfer: TransferOptions | None = None,
        log: LogOptions | None = None,
        observer: Observer = silent,
    ) -> CheckpointStore:
        """Return the run at `url`; an absent run is an empty one.

        Args:
            url: `file://`, `s3://`, `memory://`, or a plain path.
            engine: What moves the bytes, where a scheme has several.
            storage_options: Credentials, endpoint, region, by s3fs's usual names.
            transfer: How bytes are moved.
            log: How records are appended, by `pin`, `unpin` and `rollback`.
            observer: Told of records that were ignored and tails that were lost.

        Raises:
            InvalidInputError: The URL or an option is wrong.
            IntegrityError: The log is damaged.
            UnsupportedError: The log was written by a newer version.
        """
        transfer = transfer or TransferOptions()
        store = open_store(url, engine=engine, storage_options=storage_options, transfer=transfer)
        opened = RunLog.open(
            store, clock=SystemClock(), ids=SystemIds(), options=log or LogOptions(), observer=observer
        )
        return cls(store, opened, transfer)

    @staticmethod
    def readable_records(
        url: str | os.PathLike[str],
        *,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> Iterator[Entry]:
        """Yield the records of a log that may be damaged, up to the last one before the damage.

        For people, after `open` has raised: nothing may be decided by a log that is not whole.

        Raises:
            InvalidInputError: The URL or an option is wrong.
            UnsupportedError: The run is of a newer version.
        """
        return readable_records(open_store(url, engine=engine, storage_options=storage_options))

    @property
    def url(self) -> str:
        """The run's root, without secrets."""
        return self._store.url

    @property
    def run(self) -> str | None:
        """The run's identity; None while nothing was ever written."""
        return self._log.run

    def latest(self) -> Checkpoint | None:
        """Return the newest selectable checkpoint: the highest seq, not the highest step. None on an empty run.

        Raises:
            ResumeError: There are commits, but none may be selected; each is listed with its reason.
            IntegrityError: The log is damaged.
        """
        committed = self._catalog.latest()
        return None if committed is None else self._checkpoint(committed)

    def checkpoints(self, *, include_set_aside: bool = False) -> list[Checkpoint]:
        """Return the selectable checkpoints, newest first; with those set aside, if asked for."""
        found = self._catalog.checkpoints(include_set_aside=include_set_aside)
        return [self._checkpoint(one) for one in reversed(found)]

    def get(self, checkpoint_id: str | None = None, *, step: int | None = None, seq: int | None = None) -> Checkpoint:
        """Return one checkpoint: the newest selectable of that name or step, or exactly `name@seq` or `seq`.

        Raises:
            NotFoundError: No commit is called so.
            UncommittedError: Attempts of that name left data, but no commit.
            InvalidInputError: Not exactly one of the three was given.
        """
        return self._checkpoint(self._catalog.find(checkpoint_id, step=step, seq=seq))

    def uncommitted(self) -> list[Uncommitted]:
        """Return the attempts that left data and no commit, in progress or dead. Lists all data of the run."""
        return self._catalog.in_progress()

    def records(self) -> Iterator[Entry]:
        """Yield every record of the log, in order, each checked.

        Raises:
            IntegrityError: One is damaged or missing.
            UnsupportedError: After the last that this version understands, if a newer one wrote more.
        """
        self._log.refresh()
        yield from self._log.records()
        self._log.fold.whole()

    @property
    def ignored(self) -> Sequence[Ignored]:
        """The newest records that were invalid at their slot and therefore passed over."""
        return self._log.fold.ignored

    @property
    def reign(self) -> Reign | None:
        """The newest claim; None if nobody ever claimed the run."""
        return self._log.fold.claim

    @property
    def reign_has_committed(self) -> bool:
        """Whether the newest claim was followed by a commit of its own."""
        return self._log.fold.tip is not None

    @property
    def lost_from(self) -> int | None:
        """A slot that a hint names although the log ends before it: records were lost, or the hint is damaged."""
        return self._log.lost_from

    def verify(
        self, checkpoint: Checkpoint | None = None, *, level: Level | None = None, progress: Progress = unwatched
    ) -> Verdict:
        """Verify the log, and a checkpoint as deep as `level` says; what is wrong stands in the verdict.

        Args:
            checkpoint: Which one; None verifies the log alone, which is level `chain`.
            level: `chain` (records link), `exists` (sizes; the default for a checkpoint), `etag` (the store's own
                identity of the bytes), `full` (BLAKE3 of every byte).
            progress: Told how many bytes are hashed so far, and of how many.

        Raises:
            InvalidInputError: There is no such level, or it needs a checkpoint.
            IntegrityError: What was appended to the log since it was opened is damaged.
            UnsupportedError: A newer version wrote to the log; that is no verdict.
            UnavailableError: The store could not be read; that is no verdict. AccessDeniedError likewise.
        """
        committed = None if checkpoint is None else checkpoint.committed
        level = level or ("chain" if checkpoint is None else "exists")
        return self._catalog.verify(committed, level=level, options=self._transfer, progress=progress)

    def verify_kept(self, *, level: Level = "exists", progress: Progress = unwatched) -> Iterator[Verdict]:
        """Return a verdict on the log, then one on the data of each checkpoint, newest first, set aside or not.

        Each is made when it is asked for, and then raises what `verify` raises.

        Raises:
            InvalidInputError: There is no such level.
            IntegrityError: What was appended to the log since it was opened is damaged.
            UnsupportedError: With the first verdict: a newer version wrote to the log.
        """
        return self._catalog.verify_kept(level=level, options=self._transfer, progress=progress)

    def pin(self, checkpoint: Checkpoint, *, holder: str, reason: str = "") -> bool:
        """Keep a checkpoint from being retired while `holder` holds it; False if it is pinned just so already.

        Raises:
            NotFoundError: It is retired meanwhile.
            CommitUnknownError: Whether it is pinned is not known; ask again.

        If killed: it is pinned or not.
        """
        return self._catalog.pin(checkpoint.seq, holder=holder, reason=reason) is not None

    def unpin(self, checkpoint: Checkpoint, *, holder: str) -> bool:
        """Let go of a checkpoint; False if `holder` does not hold it.

        Raises:
            NotFoundError: It is retired meanwhile.
            CommitUnknownError: Whether it is unpinned is not known; ask again.

        If killed: it is unpinned or not.
        """
        return self._catalog.unpin(checkpoint.seq, holder=holder) is not None

    def rollback(self, to: Checkpoint, *, note: str = "") -> list[int]:
        """Make `to` the latest: everything selectable above it is set aside as abandoned, and nothing is deleted.

        Returns:
            The slots that were set aside.

        Raises:
            NotFoundError: It is retired meanwhile.
            InvalidInputError: It is set aside itself.
            CommitUnknownError: Whether the run went back is not known; ask again.

        If killed: all of them are set aside or none.
        """
        entry = self._catalog.rollback(to.seq, note=note)
        return list(entry.record.seqs) if entry is not None and isinstance(entry.record, SetAside) else []

    def _checkpoint(self, committed: Committed) -> Checkpoint:
        return Checkpoint(self._store, self._catalog, committed, self._transfer)
