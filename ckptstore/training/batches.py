"""Which samples a batch is made of: a number that does not depend on their order or on who holds them."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from ckptstore.errors import InvalidInputError
from ckptstore.format.checksum import digest

DIGEST_MASK = 2**63 - 1
"""Digests are added modulo 2^63, so that they fit into the integers that ranks can add up."""


def batch_digest(ids: Iterable[int | str | bytes] | npt.NDArray[np.generic] | torch.Tensor) -> int:
    """Return which samples a batch is made of, whatever their order: the digests of two shares add up to that of both.

    Args:
        ids: What tells samples apart: indices or names; or the samples themselves, as rows of a tensor or an array.

    Returns:
        From 0 (no sample) to 2^63 - 1. Add those of all ranks and micro-batches with `combined`.

    Raises:
        InvalidInputError: `ids` is one text, or holds something else.
    """
    if isinstance(ids, DTensor):
        raise InvalidInputError("The ids of a batch are a DTensor.", hint="Pass the ids of this rank's own samples.")
    if isinstance(ids, torch.Tensor):
        plain = ids.detach().cpu().contiguous()
        if plain.ndim <= 1 and not (plain.is_floating_point() or plain.is_complex()):
            return _of_integers(plain.reshape(-1).to(torch.int64).numpy())
        rows = plain.reshape(-1, 1) if plain.ndim <= 1 else plain
        raw = rows.reshape(len(rows), -1).view(torch.uint8).numpy() if rows.numel() else None
        return _of_rows(str(plain.dtype).removeprefix("torch."), rows.shape, raw)
    if isinstance(ids, np.ndarray):
        if ids.ndim <= 1 and ids.dtype.kind in "biu":
            return _of_integers(ids.reshape(-1).astype(np.int64))
        if ids.dtype.kind in "biufc":
            array = np.ascontiguousarray(ids.reshape(-1, 1) if ids.ndim <= 1 else ids)
            raw = array.reshape(len(array), -1).view(np.uint8) if array.size else None
            return _of_rows(ids.dtype.name, array.shape, raw)
    if isinstance(ids, str | bytes | Mapping):
        raise InvalidInputError(
            f"The ids of a batch are one {type(ids).__name__}.", hint="Pass a list with an id for each sample."
        )
    return combined(_of_id(each) for each in ids)


def combined(digests: Iterable[int]) -> int:
    """Return the digest of all samples together: the sum modulo 2^63. It takes sums that ran over 2^63 too."""
    return sum(digests) & DIGEST_MASK


def _of_integers(ids: npt.NDArray[np.int64]) -> int:
    """Return the sum of SplitMix64 of each id (Steele, Lea, Flood: Fast splittable pseudorandom generators, 2014)."""
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64)) & DIGEST_MASK


def _of_rows(dtype: str, shape: Sequence[int], raw: npt.NDArray[np.uint8] | None) -> int:
    """Return the sum of the BLAKE3 of each row; `raw` has its bytes, or is None where rows are empty."""
    kind = f"{dtype} {tuple(shape[1:])} ".encode()
    rows = [b""] * shape[0] if raw is None else [row.tobytes() for row in raw]
    return combined(_of_bytes(kind + row) for row in rows)


def _of_id(each: object) -> int:
    if isinstance(each, str):
        return _of_bytes(b"text " + each.encode(errors="surrogatepass"))
    if isinstance(each, bytes):
        return _of_bytes(b"bytes " + each)
    if isinstance(each, torch.Tensor) and each.numel() == 1 and not isinstance(each, DTensor):
        each = each.item()
    if isinstance(each, numbers.Integral):
        return _of_integers(np.array([int(each) & (2**64 - 1)], dtype=np.uint64).view(np.int64))
    raise InvalidInputError(
        f"The id of a sample is a {type(each).__name__}.", hint="Pass indices or names of samples, or a tensor of rows."
    )


def _of_bytes(data: bytes) -> int:
    return int.from_bytes(digest(data)[:8], "big") & DIGEST_MASK
