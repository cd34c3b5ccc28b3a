"""Whether the chunks of a save tile every tensor: complete, and nothing twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ckptstore.errors import IntegrityError
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and lengths."""


def covers(shards: Sequence[StoredShard]) -> None:
    """Check that the chunks of all shards cover every tensor, and every value stored as bytes, exactly once.

    Raises:
        IntegrityError: They do not; the tensor is named. Also if one name has two shapes or dtypes.
    """
    chunks: dict[str, list[tuple[Chunk, int]]] = defaultdict(list)
    for stored in shards:
        rank = stored.shard.rank
        for item in stored.items:
            chunks[item.chunk.tensor.name].append((item.chunk, rank))
    for name, pieces in chunks.items():
        tensor, first = pieces[0][0].tensor, pieces[0][1]
        for chunk, rank in pieces:
            if chunk.tensor is not tensor and chunk.tensor != tensor:
                raise _uncovered(name, f"rank {rank} says {_said(chunk.tensor)}, rank {first} {_said(tensor)}")
        if (fault := tiling_fault(tensor.shape, [(chunk.offsets, chunk.lengths) for chunk, _ in pieces])) is not None:
            raise _uncovered(name, fault)


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return what keeps boxes from covering every element of a tensor of `shape` exactly once; None if they do.

    The volumes add up and no two boxes meet: then every element is there once.
    """
    if len(boxes) == 1 and boxes[0][1] == shape and not any(boxes[0][0]) and len(boxes[0][0]) == len(shape):
        return None  # it is one piece, as nearly all are
    for offsets, lengths in boxes:
        fits = len(shape) == len(offsets) == len(lengths)
        if not fits or any(a < 0 or n < 0 or a + n > size for size, a, n in zip(shape, offsets, lengths, strict=True)):
            return f"a piece at {tuple(offsets)}+{tuple(lengths)} lies outside of {tuple(shape)}"
    whole = math.prod(shape)
    if whole == 0:
        return None  # an empty tensor is complete however many empty chunks it has
    filled = [box for box in boxes if math.prod(box[1])]
    if (twice := _first_overlap(filled, len(shape))) is not None:
        return f"an element at {twice} is there twice"
    volume = sum(math.prod(lengths) for _, lengths in filled)
    return None if volume == whole else f"{whole - volume} of its {whole} elements are missing"


def _first_overlap(boxes: Sequence[Box], dimensions: int) -> tuple[int, ...] | None:
    """Return where two boxes meet, or None. A sweep along the dimension with the most cuts."""
    if len(boxes) < 2:  # noqa: PLR2004
        return None
    if not dimensions:
        return ()
    cuts = [len({start[axis] for start, _ in boxes}) for axis in range(dimensions)]
    axis = cuts.index(max(cuts))
    live: list[Box] = []
    for start, length in sorted(boxes, key=lambda box: box[0][axis]):
        live = [other for other in live if other[0][axis] + other[1][axis] > start[axis]]
        for other_start, other_length in live:
            corner = tuple(map(max, start, other_start))
            ends = zip(start, length, other_start, other_length, strict=True)
            if all(at < min(a + n, b + m) for at, (a, n, b, m) in zip(corner, ends, strict=True)):
                return corner
        live.append((start, length))
    return None


def _said(tensor: TensorMeta) -> str:
    return f"{tensor.dtype} {tensor.shape}"


def _uncovered(name: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"The save does not hold the tensor {name!r} exactly once: {what}. Nothing was committed.",
        hint="Save again; if it recurs, the planner is at fault.",
        tensor=name,
    )
