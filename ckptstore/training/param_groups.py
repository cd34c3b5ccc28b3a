"""The groups of an optimizer: their hyper-parameters and what else stands in them, as values and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from ckptstore.errors import UnsupportedError

NOT_FIELDS = frozenset({"params", "param_names"})
"""What a group holds of the parameters. They go by their own names."""

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed, which may depend on the device: saved, but a target keeps its own."""

_CONTAINERS = (list, tuple)


def fields_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field of a group but its parameters, copied; tensors are on the CPU.

    Raises:
        UnsupportedError: A field holds a `DTensor`.
    """
    return {field: copied(value) for field, value in group.items() if field not in NOT_FIELDS}


def copied(value: Any) -> Any:
    """Return `value` without a reference to what may change.

    Raises:
        UnsupportedError: It holds a `DTensor`.
    """
    if isinstance(value, DTensor):
        raise UnsupportedError(
            "A field of a parameter group is a DTensor.", hint="Make it a number or a plain tensor, as for `lr`."
        )
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if type(value) in _CONTAINERS:
        return type(value)(copied(inner) for inner in value)
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    return copy.deepcopy(value)


def put_back(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a group the saved fields; its tensors are filled in place. Fields that were not saved stay."""
    for field, value in saved.items():
        if field not in HOW and field not in NOT_FIELDS:
            group[field] = _filled(group.get(field), value)


def _filled(now: Any, saved: Any) -> Any:
    if isinstance(now, torch.Tensor):
        with torch.no_grad():
            if isinstance(saved, torch.Tensor):
                now.copy_(saved)
            else:
                now.fill_(saved)
        return now
    if isinstance(saved, torch.Tensor) and _is_number(now):
        return saved.item()
    if type(saved) in _CONTAINERS and type(now) is type(saved) and len(now) == len(saved):
        return type(saved)(_filled(one, other) for one, other in zip(now, saved, strict=True))
    return copied(saved)


def field_differences(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the fields in which what was saved cannot go into the group's own tensors: field, saved, now."""
    found: list[tuple[str, str, str]] = []
    for field, value in saved.items():
        if field not in HOW and field not in NOT_FIELDS:
            found += _unlike(field, group.get(field), value)
    return found


def shared_differences(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Return where one tensor stands for fields that were saved with different values: field, saved, now."""
    first: dict[int, tuple[str, Any]] = {}
    found: list[tuple[str, str, str]] = []
    for index, (group, fields) in enumerate(zip(groups, saved_groups, strict=True)):
        for field, saved in fields.items():
            now, what = group.get(field), f"{field} of group {index}"
            if field not in HOW and isinstance(now, torch.Tensor):
                where, other = first.setdefault(id(now), (what, saved))
                if not equal(saved, other):
                    found.append((what, _described(saved), f"one tensor with {where}"))
    return found


def _unlike(field: str, now: Any, saved: Any) -> list[tuple[str, str, str]]:
    if type(saved) in _CONTAINERS and type(now) is type(saved) and len(now) == len(saved):
        pairs = enumerate(zip(now, saved, strict=True))
        return [row for index, (one, other) in pairs for row in _unlike(f"{field}[{index}]", one, other)]
    if isinstance(now, torch.Tensor):
        fits = _is_number(saved)
        if isinstance(saved, torch.Tensor):
            fits = (saved.dtype, saved.shape) == (now.dtype, now.shape)
    else:
        fits = not (isinstance(saved, torch.Tensor) and _is_number(now) and saved.numel() != 1)
    return [] if fits else [(field, _described(saved), _described(now))]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return f"{kind} of {value.item()!r}" if value.numel() == 1 else kind
    return f"{value!r:.60}"


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same, tensors bit by bit, NaN and NaN too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return cast("bool", one == other)


def as_json(value: Any) -> Any:
    """Return `value` as JSON to compare and to show; what JSON lacks by its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.Tensor):
        return as_json(value.item()) if value.numel() == 1 else _described(value)
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    return f"{value!r:.200}"
