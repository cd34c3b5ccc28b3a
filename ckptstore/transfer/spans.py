"""Which leaves a set of reads needs, and how they are put together into few ranged reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.errors import InvalidInputError
from ckptstore.format.dtypes import dtype_named
from ckptstore.format.shard import MIN_LEAF_BYTES, Shard, StoredItem
from ckptstore.transfer.boxes import Array, as_elements, touched_leaves

MAX_GAP_BYTES = MIN_LEAF_BYTES // 4
"""Unneeded bytes between two needed leaves that are fetched rather than paid for with another request.

Smaller than any leaf but an item's last: it passes over small items, and the leaves of one item in a span always follow
each other.
"""


@dataclass(frozen=True, slots=True, eq=False)
class BoxRead:
    """A box of a stored chunk, and where its bytes are to go.

    Args:
        shard: The shard that holds the chunk.
        item: The chunk's place in it.
        offsets: Where the box begins **inside the stored chunk** (not in the tensor).
        lengths: The box's shape.
        out: uint8, of shape `(*lengths, itemsize)`, writable, any strides; filled in place. The caller keeps it alive
            and leaves it alone until the call returns.
    """

    shard: Shard
    item: StoredItem
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    out: npt.NDArray[np.uint8]


class Target(NamedTuple):
    """A read that has been checked: its box, and `out` with whole elements."""

    box: tuple[tuple[int, ...], tuple[int, ...]]
    out: Array


@dataclass(slots=True)
class Wanted:
    """An item, what is to be read of it, and the leaves that this touches."""

    item: StoredItem
    itemsize: int
    targets: list[Target] = field(default_factory=list)
    leaves: Sequence[int] = ()

    def add(self, read: BoxRead) -> None:
        """Take one more read of this item into account."""
        chunk = self.item.chunk
        self.targets.append(Target((read.offsets, read.lengths), as_elements(read.out)))
        touched = touched_leaves(self.item.leaf_bytes // self.itemsize, chunk.lengths, read.offsets, read.lengths)
        self.leaves = sorted({*self.leaves, *touched}) if self.leaves else touched


class Leaf(NamedTuple):
    """One leaf to fetch: where it stands in the object, and whose it is."""

    start: int
    nbytes: int
    number: int
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Span:
    """Leaves that one ranged read fetches, in file order."""

    shard: Shard
    leaves: list[Leaf]

    @property
    def start(self) -> int:
        """First byte, from the start of the object."""
        return self.leaves[0].start

    @property
    def length(self) -> int:
        """How many bytes."""
        return self.leaves[-1].start + self.leaves[-1].nbytes - self.start


def check_read(read: BoxRead) -> int:
    """Return the item's element size, after checking that the box lies in the chunk and that `out` fits it.

    Raises:
        InvalidInputError: It does not.
    """
    chunk = read.item.chunk
    itemsize = dtype_named(chunk.tensor.dtype, of=chunk.tensor.name).itemsize
    inside = len(read.offsets) == len(read.lengths) == len(chunk.lengths) and all(
        min(offset, length) >= 0 and offset + length <= size
        for offset, length, size in zip(read.offsets, read.lengths, chunk.lengths, strict=True)
    )
    fits = read.out.dtype == np.uint8 and read.out.shape == (*read.lengths, itemsize) and read.out.flags.writeable
    if not inside or not fits:
        raise InvalidInputError(
            f"A read of {chunk.tensor.name!r} asks for {read.lengths} at {read.offsets} of a chunk of {chunk.lengths}, "
            f"into {read.out.dtype} {read.out.shape} (writable: {read.out.flags.writeable}).",
            hint=f"Give a writable uint8 array of shape {(*read.lengths, itemsize)}.",
            tensor=chunk.tensor.name,
        )
    return itemsize


def wanted_by_shard(reads: Iterable[BoxRead]) -> list[tuple[Shard, list[Wanted]]]:
    """Return, shard by shard, the items that `reads` touch, in file order.

    Raises:
        InvalidInputError: A box leaves its chunk, or its `out` does not fit.
    """
    shards: dict[str, tuple[Shard, dict[int, Wanted]]] = {}
    for read in reads:
        itemsize = check_read(read)
        if read.out.size == 0:
            continue
        _, items = shards.setdefault(read.shard.path, (read.shard, {}))
        wanted = items.get(read.item.first_leaf)
        if wanted is None:
            wanted = items[read.item.first_leaf] = Wanted(read.item, itemsize)
        wanted.add(read)
    return [(shard, [items[leaf] for leaf in sorted(items)]) for shard, items in shards.values()]


def spans_of(shard: Shard, wanted: Iterable[Wanted], *, fetch_bytes: int) -> Iterator[Span]:
    """Yield the ranged reads that fetch every touched leaf once, each of at most `fetch_bytes` (or one leaf)."""
    leaves: list[Leaf] = []
    start = end = 0
    for leaf in _leaves(wanted):
        if leaves and (leaf.start - end > MAX_GAP_BYTES or leaf.start + leaf.nbytes - start > fetch_bytes):
            yield Span(shard, leaves)
            leaves = []
        if not leaves:
            start = leaf.start
        leaves.append(leaf)
        end = leaf.start + leaf.nbytes
    if leaves:
        yield Span(shard, leaves)


def _leaves(wanted: Iterable[Wanted]) -> Iterator[Leaf]:
    for each in wanted:
        item, nbytes = each.item, each.item.chunk.nbytes
        for index in each.leaves:
            offset = index * item.leaf_bytes
            yield Leaf(item.position + offset, min(item.leaf_bytes, nbytes - offset), index, each)
