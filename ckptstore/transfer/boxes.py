"""Where the elements of a box lie in its chunk's row-major bytes, and how verified bytes are laid into it.

Element sizes and leaf sizes are powers of two, so no element is ever cut by the end of a leaf.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Ints = tuple[int, ...]
Array = npt.NDArray[np.generic]

_WIDE: dict[int, np.dtype[np.generic]] = {np.dtype(code).itemsize: np.dtype(code) for code in ("u2", "u4", "u8", "c16")}


def as_elements(array: npt.NDArray[np.uint8]) -> Array:
    """Return `array`, whose last axis holds an element's bytes, with one element per entry where that is possible.

    NumPy moves whole elements much faster. A last axis that is not contiguous stays as it is.
    """
    wide = _WIDE.get(array.shape[-1])
    return array if wide is None or array.strides[-1] != 1 else array.view(wide)[..., 0]


def next_in_box(position: int, shape: Ints, offsets: Ints, lengths: Ints) -> int | None:
    """Return the smallest linear index ≥ `position` that lies in a box which is not empty, or None."""
    if not shape:
        return 0 if position <= 0 else None
    row = math.prod(shape[1:])
    index, rest = divmod(position, row)
    if index < offsets[0]:
        index, rest = offsets[0], 0
    for candidate in range(index, min(index + 2, offsets[0] + lengths[0])):
        inner = next_in_box(rest, shape[1:], offsets[1:], lengths[1:])
        if inner is not None:
            return candidate * row + inner
        rest = 0
    return None


def touched_leaves(leaf_elements: int, shape: Ints, offsets: Ints, lengths: Ints) -> list[int]:
    """Return the leaves of a chunk that hold any element of a box, in order."""
    if 0 in lengths:
        return []
    if lengths == shape:
        return list(range(-(-math.prod(shape) // leaf_elements)))
    leaves = []
    position = next_in_box(0, shape, offsets, lengths)
    while position is not None:
        leaves.append(position // leaf_elements)
        position = next_in_box((leaves[-1] + 1) * leaf_elements, shape, offsets, lengths)
    return leaves


def scatter(window: Array, start: int, shape: Ints, box: tuple[Ints, Ints], out: Array) -> None:
    """Lay the elements of a box that stand in `window` into `out`; the others stay as they are.

    Args:
        window: Consecutive elements of the chunk (axes behind the first are parts of an element).
        start: Linear index, in the chunk, of the window's first element. May be negative in recursion.
        shape: The chunk's.
        box: Offsets and lengths of the box in the chunk. Not empty.
        out: The box: its lengths, then the axes of an element.
    """
    offsets, lengths = box
    if not shape:
        out[...] = window[-start]
        return
    row, end = math.prod(shape[1:]), start + len(window)
    first, stop = max(offsets[0], -(-start // row)), min(offsets[0] + lengths[0], end // row)
    if first < stop:
        rows = window[first * row - start : stop * row - start].reshape(stop - first, *shape[1:], *window.shape[1:])
        inner = tuple(slice(offset, offset + length) for offset, length in zip(offsets[1:], lengths[1:], strict=True))
        out[first - offsets[0] : stop - offsets[0]] = rows[(slice(None), *inner)]
    for index in {start // row, end // row}:  # rows that the window holds only a part of
        if not first <= index < stop and offsets[0] <= index < offsets[0] + lengths[0] and index * row < end:
            scatter(window, start - index * row, shape[1:], (offsets[1:], lengths[1:]), out[index - offsets[0]])
