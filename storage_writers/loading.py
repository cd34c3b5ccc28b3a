"""The reads of one rank: what goes where, checked first, then verified bytes straight into the target's memory."""

from __future__ import annotations

import contextlib
import io
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckptstore.errors import (
    CkptStoreError,
    IncompatibleStateError,
    IntegrityError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptstore.format.shard import Shard, StoredItem
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.meanwhile import check_kept
from ckptstore.transfer.download import BoxRead, check_shard, in_flight, read_boxes
from ckptstore.units import MIB
from storage_writers import pickles, tensors
from storage_writers.agreement import in_our_words
from storage_writers.metadata import Contents
from storage_writers.planning import TORCH_SAVE

BOUNCE_BYTES = 64 * MIB
"""What is held at once of tensors that bytes cannot be put into directly: on a device, or of another dtype."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TensorRead:
    """A box of a stored chunk and the part of a target that it fills."""

    item: ReadItem
    shard: Shard
    stored: StoredItem
    target: torch.Tensor

    @property
    def key(self) -> str:
        """The tensor's name."""
        return self.stored.chunk.tensor.name

    @property
    def dtype(self) -> torch.dtype:
        """As it was saved."""
        return tensors.dtype_of(self.stored.chunk.tensor.dtype, key=self.key)

    @property
    def is_direct(self) -> bool:
        """Whether its bytes can go straight into the target."""
        return tensors.takes_bytes(self.target) and self.target.dtype == self.dtype


@dataclass(frozen=True)
class ValueRead:
    """A value that is no tensor."""

    item: ReadItem
    shard: Shard
    stored: StoredItem


@dataclass(frozen=True)
class Cast:
    """A tensor that was loaded into another dtype than it was saved in."""

    key: str
    saved: str
    target: str


@dataclass(frozen=True)
class Reads:
    """All that one rank reads."""

    tensors: tuple[TensorRead, ...]
    values: tuple[ValueRead, ...]

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Tensors whose target has another dtype, by key."""
        found = {
            read.key: Cast(read.key, str(read.dtype), str(read.target.dtype))
            for read in self.tensors
            if read.target.dtype != read.dtype
        }
        return tuple(found[key] for key in sorted(found))

    @property
    def shards(self) -> list[Shard]:
        """The shards that are touched."""
        shards = [read.shard for read in self.tensors] + [read.shard for read in self.values]
        return list({shard.path: shard for shard in shards}.values())


def reads_of(plan: LoadPlan, planner: LoadPlanner, contents: Contents) -> Reads:
    """Return the reads of a plan, with the memory that each fills. No byte of it is touched.

    Raises:
        IncompatibleStateError: A target has another shape than what is to fill it, is no tensor where one was saved or
            the other way round, or cannot be written into.
    """
    found: list[TensorRead] = []
    values: list[ValueRead] = []
    targets = getattr(planner, "state_dict", None)
    for item in plan.items:
        shard, stored = contents.find(item.storage_index)
        key = item.dest_index.fqn
        if item.type is LoadItemType.BYTE_IO:
            if isinstance(targets, dict) and isinstance(targets.get(key), torch.Tensor):
                raise IncompatibleStateError(
                    f"{key} is a tensor in the target and was saved as a value that is none.",
                    hint="Give the target the saved structure, or load without it (only=...).",
                    key=key,
                )
            values.append(ValueRead(item, shard, stored))
        else:
            found.append(TensorRead(item, shard, stored, _target_of(item, planner)))
    return Reads(tuple(found), tuple(values))


def _target_of(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item)
    if target.shape != item.lengths:
        raise IncompatibleStateError(
            f"{item.dest_index.fqn} gets {list(item.lengths)} and has {list(target.shape)}.",
            hint="Give the target the saved shape.",
            key=item.dest_index.fqn,
        )
    tensors.check_target(target, key=item.dest_index.fqn)
    return target


def check_dtypes(reads: Reads, *, allow_cast: bool) -> None:
    """Check that no target would change what was saved.

    Raises:
        IncompatibleStateError: Dtypes differ, and casting is not allowed or not possible; all of them are listed.
    """
    casts = [cast for cast in reads.casts if not allow_cast or "float4" in cast.saved + cast.target]
    if casts:
        shown = "; ".join(f"{cast.key} was saved as {cast.saved}, the target has {cast.target}" for cast in casts[:8])
        raise IncompatibleStateError(
            f"{len(casts)} tensors would be cast: {shown}.",
            hint="Give the target the saved dtype, or pass allow_cast=True to CkptStoreReader.",
            casts=[[cast.key, cast.saved, cast.target] for cast in casts[:200]],
            count=len(casts),
        )


class Fetcher:
    """Moves verified bytes for one rank and counts them.

    Args:
        store: Rooted at the run.
        options: How bytes are moved.
    """

    def __init__(self, store: ObjectStore, options: TransferOptions) -> None:
        self._store, self._options = store, options
        self.bytes_fetched = 0

    def check_structure(self, shards: Sequence[Shard]) -> None:
        """Check sizes, headers, leaf tables and roots of `shards`.

        Raises:
            IntegrityError: One is not what was written, or missing.
        """
        in_flight(shards, lambda shard: check_shard(self._store, shard), limit=self._options.fetches_in_flight)

    def values(self, reads: Sequence[ValueRead], *, allow_pickle: bool) -> list[io.BytesIO]:
        """Return what the planner may unpickle for each value.

        Raises:
            UnsafePickleError: A value needs unrestricted pickle and that is not allowed.
            UnsupportedError: A value was not written by `torch.save`; a typed value is read by `Checkpoint.value`.
        """
        for read in reads:
            chunk = read.stored.chunk
            if chunk.codec != TORCH_SAVE:
                raise UnsupportedError(
                    f"{chunk.tensor.name} is stored as {chunk.codec}, which DCP cannot load.",
                    hint="Read it with Checkpoint.value(key), and load the tensors without it: only=(...) names them.",
                    key=chunk.tensor.name,
                )
        raw = [np.empty((read.stored.chunk.nbytes, 1), np.uint8) for read in reads]
        self._read(
            [
                BoxRead(read.shard, read.stored, (0,), read.stored.chunk.lengths, out)
                for read, out in zip(reads, raw, strict=True)
            ]
        )
        return [
            pickles.remade(
                out.tobytes(),
                key=read.stored.chunk.tensor.name,
                pickled=read.stored.chunk.pickled,
                allow_pickle=allow_pickle,
            )
            for read, out in zip(reads, raw, strict=True)
        ]

    def fill(self, reads: Sequence[TensorRead], filled: list[str]) -> None:
        """Fill this rank's targets. Each leaf is verified before a byte of it reaches one (I13).

        Args:
            reads: What goes where.
            filled: Gets the keys of the targets that may hold something new.

        Raises:
            IntegrityError: Bytes are not what was written. Its facts say which of the targets that take bytes directly
                were written by then.
        """
        direct = [read for read in reads if read.is_direct]
        self._read(
            [
                _box_read(read, ((0,) * read.target.dim(), tuple(read.item.lengths)), tensors.byte_view(read.target))
                for read in direct
            ]
        )
        filled += dict.fromkeys(read.key for read in direct)
        for batch in _batches([read for read in reads if not read.is_direct]):
            self._bounce(batch, filled)

    def scan(self, reads: Sequence[TensorRead]) -> None:
        """Verify every leaf that `reads` touch, keeping nothing.

        Raises:
            IntegrityError: Bytes are not what was written.
        """
        for batch in _batches(reads):
            self._read([_box_read(read, box, _scratch(read, box)) for read, box in batch])

    def _bounce(self, batch: Sequence[tuple[TensorRead, Box]], filled: list[str]) -> None:
        scratch = [_scratch(read, box) for read, box in batch]
        self._read([_box_read(read, box, out) for (read, box), out in zip(batch, scratch, strict=True)])
        for (read, (offsets, lengths)), out in zip(batch, scratch, strict=True):
            part = read.target.detach()
            for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            source = torch.from_numpy(out.reshape(-1)).view(read.dtype).view(lengths)
            if read.key not in filled[-1:]:
                filled.append(read.key)
            tensors.place(source, part)

    def _read(self, boxes: list[BoxRead]) -> None:
        self.bytes_fetched += read_boxes(self._store, boxes, options=self._options).bytes_fetched


def _box_read(read: TensorRead, box: Box, out: Array) -> BoxRead:
    offsets = tuple(start + inside for start, inside in zip(read.item.storage_offsets, box[0], strict=True))
    return BoxRead(read.shard, read.stored, offsets, box[1], out)


def _scratch(read: TensorRead, box: Box) -> Array:
    return np.empty((*box[1], read.dtype.itemsize), np.uint8)


def _batches(reads: Sequence[TensorRead]) -> Iterator[list[tuple[TensorRead, Box]]]:
    """Yield boxes of `reads`, together at most `BOUNCE_BYTES` at a time."""
    batch: list[tuple[TensorRead, Box]] = []
    held = 0
    for read in reads:
        for box in cut(tuple(read.item.lengths), read.dtype.itemsize, BOUNCE_BYTES):
            nbytes = math.prod(box[1]) * read.dtype.itemsize
            if batch and held + nbytes > BOUNCE_BYTES:
                yield batch
                batch, held = [], 0
            batch.append((read, box))
            held += nbytes
    if batch:
        yield batch


def cut(lengths: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Yield boxes that tile one of `lengths`, in order, each of at most `limit` bytes (or one element)."""
    if not lengths or math.prod(lengths) * itemsize <= limit:
        yield (0,) * len(lengths), lengths
        return
    row_bytes = math.prod(lengths[1:]) * itemsize
    rows = max(1, limit // row_bytes)
    for start in range(0, lengths[0], rows):
        count = min(rows, lengths[0] - start)
        for offsets, inner in cut(lengths[1:], itemsize, max(limit // count, 1)):
            yield (start, *offsets), (count, *inner)


@contextlib.contextmanager
def telling_what_to_do(log: RunLog, committed: Committed) -> Iterator[None]:
    """Let an error that means damage of this checkpoint name the command that sets it aside, if it was not retired.

    Args:
        log: Of the run; it is read once more if the block fails.
        committed: What is read.

    Raises:
        ConflictError: It was retired meanwhile: that its bytes are gone is no damage, and no absent checkpoint (a job
            that finds none begins anew).
        CkptStoreError: The block failed.
    """
    try:
        yield
    except UnsafePickleError:
        raise
    except IntegrityError as error:
        check_kept(log, committed, error, done="loaded")
        url, name = shlex.quote(log.store.url), shlex.quote(committed.exact_name)
        error.hint = (
            f"Run `ckptstore verify {url} {name} --level full --quarantine`, which sets it aside if it is damaged, and "
            "load again: then the latest is an older one."
        )
        raise


@contextlib.contextmanager
def telling_what_was_filled(filled: Sequence[str], *, ranks: int) -> Iterator[None]:
    """Let errors out as ours, and say in them which targets hold something new.

    Args:
        filled: Their keys, as known when the block fails; the error may know of more.
        ranks: How many load.

    Raises:
        CkptStoreError: The block failed.
    """
    try:
        yield
    except CkptStoreError as error:
        _say_written(error, filled, ranks)
        raise
    except Exception as error:
        ours = in_our_words(error, "The load failed while targets were filled")
        _say_written(ours, filled, ranks, sure=False)
        raise ours from error


def _say_written(error: CkptStoreError, filled: Sequence[str], ranks: int, *, sure: bool = True) -> None:
    """Say in `error` which tensors had been written when it happened, and whether the target is a mixture now.

    Args:
        error: What happened; it may name tensors itself.
        filled: The keys of those that are known of beside.
        ranks: How many load.
        sure: Whether that is all. An error that is not of our making does not say how far it came.
    """
    here = error.facts.get("written")
    written = [*filled, *(here if isinstance(here, list) else [])]
    count = len(filled) + int(error.facts.get("written_count") or 0)  # type: ignore[arg-type]
    untouched = sure and ranks == 1 and not count
    error.facts |= {"written": [str(key) for key in written[:20]], "written_count": count, "untouched": untouched}
    none = " No tensor was written." if sure else " Whether a tensor was written is not known."
    named = ", ".join(str(key) for key in written[:8])
    error.message += f" {count} tensors were already written: {named}." if count else none
    if ranks > 1:
        error.message += " That is said of this rank; the others went on filling their targets."
    if not untouched:
        error.message += " Taken as a whole the target is a mixture now: load it again, or start anew."
