"""One tensor, or a box of it, put together from the chunks that several shards hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.dtypes import dtype_named
from ckptstore.format.shard import Shard, StoredItem, TensorMeta
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import BoxRead, check_size, in_flight, read_boxes

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, lengths


def whole(tensor: TensorMeta) -> Box:
    """Return the box that is all of `tensor`."""
    return (0,) * len(tensor.shape), tensor.shape


def box_of(tensor: TensorMeta, index: Sequence[slice]) -> Box:
    """Return the box that `index` asks for: slices with step 1, one per dimension, missing ones whole.

    Raises:
        InvalidInputError: More slices than dimensions, a step other than 1, or no slices at all.
    """
    try:
        fits = len(index) <= len(tensor.shape) and all(piece.step in (None, 1) for piece in index)
        bounds = [piece.indices(size) for piece, size in zip(index, tensor.shape, strict=False)]
    except (TypeError, AttributeError):  # a number in place of a slice, or something else than numbers in one
        fits, bounds = False, []
    if not fits:
        raise InvalidInputError(
            f"{tensor.name} has shape {tensor.shape}; {index!r:.200} is not a box of it.",
            hint="Give one slice without a step per dimension.",
            key=tensor.name,
        )
    bounds += [(0, size, 1) for size in tensor.shape[len(index) :]]
    return tuple(start for start, _, _ in bounds), tuple(max(0, stop - start) for start, stop, _ in bounds)


def read_bytes(
    store: ObjectStore, items: Sequence[tuple[Shard, StoredItem]], box: Box, *, options: TransferOptions
) -> npt.NDArray[np.uint8]:
    """Return the bytes of `box` of one tensor as uint8, shape box lengths + (item size,); every leaf is verified.

    Args:
        store: Rooted at the run's root.
        items: Every stored chunk of the tensor.
        box: Offsets and lengths in the tensor.
        options: How bytes are moved.

    Raises:
        IntegrityError: A byte is not what was written.
    """
    offsets, lengths = box
    width = dtype_named(items[0][1].chunk.tensor.dtype).itemsize
    found: list[tuple[Shard, StoredItem, Box, tuple[slice, ...]]] = []
    for shard, item in items:
        chunk = item.chunk
        low = tuple(max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(offsets, lengths, chunk.offsets, chunk.lengths, strict=True)
        )
        size = tuple(b - a for a, b in zip(low, high, strict=True))
        if min(size, default=1) <= 0 or not math.prod(size):
            continue
        inside = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
        target = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offsets, size, strict=True))
        found.append((shard, item, (inside, size), target))
    covered = sum(math.prod(size) for _, _, (_, size), _ in found)
    if covered != math.prod(lengths):
        name = items[0][1].chunk.tensor.name
        raise IntegrityError(
            f"The chunks of {name!r} hold {covered} of the {math.prod(lengths)} elements asked for.",
            hint="Run `ckptstore verify URL --level full` and load an older checkpoint.",
            key=name,
        )
    # A manifest may claim any number of bytes: room is made for those that are there.
    shards = list({shard.path: shard for shard, *_ in found}.values())
    in_flight(shards, lambda shard: check_size(store, shard), limit=options.fetches_in_flight)
    out = np.empty((*lengths, width), dtype=np.uint8)
    reads = [BoxRead(shard, item, *inside, out[target]) for shard, item, inside, target in found]
    read_boxes(store, reads, options=options)
    return out
