"""States to save, targets to load into, and what it means that they are equal."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def blank(value: Any) -> Any:
    """Return a target like `value` that holds none of its values."""
    if isinstance(value, torch.Tensor):
        target = torch.empty_like(value)
        local = target.to_local() if isinstance(target, DTensor) else target
        raw_bytes(local).fill_(0xA5)
        return target
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return "blank"


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that is as large as its elements."""
    storage = tensor.detach().untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, tensors bit by bit and NaN by NaN."""
    if isinstance(one, DTensor):
        return one.placements == other.placements and same(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(inner, other[key]) for key, inner in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.unsqueeze(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
