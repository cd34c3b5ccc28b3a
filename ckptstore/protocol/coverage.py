"""Whether the chunks of a save tile every tensor: complete, and nothing twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ckptstore.errors import IntegrityError
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta


def covers(shards: Sequence[StoredShard]) -> None:
    """Check that the chunks of all shards cover every tensor, and every value stored as bytes, exactly once.

    Raises:
        IntegrityError: They do not; the tensor is named. Also if one name has two shapes or dtypes.
    """
    chunks: dict[str, list[tuple[Chunk, int]]] = defaultdict(list)
    for stored in shards:
        for item in stored.items:
            chunks[item.chunk.tensor.name].append((item.chunk, stored.shard.rank))
    for name, pieces in chunks.items():
        tensor = pieces[0][0].tensor
        for chunk, rank in pieces:
            if chunk.tensor != tensor:
                raise _uncovered(name, f"rank {rank} says {_said(chunk.tensor)}, rank {pieces[0][1]} {_said(tensor)}")
            _check_inside(chunk, rank)
        _check_tiling(tensor, [chunk for chunk, _ in pieces])


def _check_inside(chunk: Chunk, rank: int) -> None:
    shape = chunk.tensor.shape
    box = tuple(zip(shape, chunk.offsets, chunk.lengths, strict=False))
    fits = len(shape) == len(chunk.offsets) == len(chunk.lengths)
    if not fits or any(start < 0 or length < 0 or start + length > size for size, start, length in box):
        raise _uncovered(chunk.tensor.name, f"rank {rank} holds {chunk.offsets}+{chunk.lengths}, outside of {shape}")


def _check_tiling(tensor: TensorMeta, chunks: Sequence[Chunk]) -> None:
    """The volumes add up and no two boxes meet: then every element is there once."""
    volume, whole = sum(math.prod(chunk.lengths) for chunk in chunks), math.prod(tensor.shape)
    if whole == 0:
        return  # an empty tensor is complete however many empty chunks it has
    boxes = [(chunk.offsets, chunk.lengths) for chunk in chunks if math.prod(chunk.lengths)]
    if (twice := _first_overlap(boxes, tensor.shape)) is not None:
        raise _uncovered(tensor.name, f"an element at {twice} is stored twice")
    if volume != whole:
        raise _uncovered(tensor.name, f"{whole - volume} of its {whole} elements are missing")


def _first_overlap(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return where two boxes meet, or None. A sweep along the dimension with the most cuts."""
    if len(boxes) < 2:  # noqa: PLR2004
        return None
    cuts = [len({start[axis] for start, _ in boxes}) for axis in range(len(shape))]
    axis = cuts.index(max(cuts)) if cuts else 0
    live: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, length in sorted(boxes, key=lambda box: box[0][axis] if box[0] else 0):
        live = [other for other in live if not shape or other[0][axis] + other[1][axis] > start[axis]]
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
