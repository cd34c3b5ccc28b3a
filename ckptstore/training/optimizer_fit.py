"""Whether an optimizer can take what was saved of another, and which optimizers can be saved at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training.nested import tensors_in
from ckptstore.training.param_groups import field_differences, shared_differences

MAX_WRAPPERS = 8

Row = tuple[str, str, str]
"""What differs, as it was saved, as it is now."""


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state: what a wrapper such as Accelerate's has under `optimizer`.

    Raises:
        InvalidInputError: It is none.
        UnsupportedError: It shards its state in a way of its own.
    """
    for _ in range(MAX_WRAPPERS):
        kinds = type(optimizer).__mro__
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in kinds):
            raise UnsupportedError(
                "ZeroRedundancyOptimizer keeps each parameter's state on one rank only.",
                hint="Shard the model with `torch.distributed.fsdp.fully_shard` (FSDP2) and use a plain optimizer.",
            )
        if any(kind.__module__.split(".")[:2] == ["deepspeed", "runtime"] for kind in kinds):
            raise UnsupportedError(
                f"DeepSpeed's {type(optimizer).__name__} keeps its state to itself.",
                hint="Save with the engine's own `save_checkpoint`, or train with FSDP2 (`fully_shard`).",
            )
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(optimizer, LRScheduler) or not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(f"{optimizer!r:.80} is no torch optimizer.", hint="Pass the optimizer itself.")
    return optimizer


def class_of(each: object) -> str:
    """Return the full name of its class."""
    return f"{type(each).__module__}.{type(each).__qualname__}"


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the group of each parameter that the optimizer holds.

    Raises:
        InvalidInputError: It holds one that has no name, or state of something that is in no group.
    """
    by_id: dict[int, str] = {}
    for name, parameter in names.items():
        by_id.setdefault(id(parameter), name)
    found: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in by_id:
                raise InvalidInputError(
                    f"Group {index} of {class_of(optimizer)} holds a parameter {list(parameter.shape)} "
                    "that the model does not have.",
                    hint="Make the optimizer from the parameters of this model, after it was sharded or moved.",
                    group=index,
                )
            found[by_id[id(parameter)]] = index
    held = {id(names[name]) for name in found}
    for key in optimizer.state:
        if id(key) not in held:
            what = by_id.get(id(key), f"{key!r:.60}" if not isinstance(key, torch.Tensor) else "a stray tensor")
            raise InvalidInputError(
                f"{class_of(optimizer)} holds state of {what}, which is in none of its groups.",
                hint="Keep state under the parameters that it belongs to; `del optimizer.state[...]` drops the rest.",
                key=what,
            )
    return found


def check_layout(parameter: torch.Tensor, shape: list[int], *, sharded: bool, key: str, owner: str) -> None:
    """Check that a tensor of this shape means the same on every number of ranks.

    Args:
        parameter: Whose state it is.
        shape: The state's.
        sharded: Whether the state is a `DTensor`.
        key: What to call it.
        owner: The optimizer's class.

    Raises:
        UnsupportedError: It is a rank's own piece of state, or a `DTensor` that is not laid out as its parameter.
    """
    if not isinstance(parameter, DTensor):
        fits = not sharded
    else:
        fits = shape == list(parameter.shape) if sharded else not shape
    if not fits:
        raise UnsupportedError(
            f"The state {key} of {owner} has the shape {shape} and is {'a' if sharded else 'no'} DTensor, but its "
            f"parameter is {'a' if isinstance(parameter, DTensor) else 'no'} DTensor {list(parameter.shape)}: "
            "it cannot be laid out anew.",
            hint="With sharded parameters use an optimizer whose state has their shape: AdamW, SGD, Adagrad, say.",
            key=key,
            optimizer=owner,
        )


def check_fit(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    structure: Mapping[str, Any],
) -> dict[str, int]:
    """Check that everything that was saved finds its place, and return the group of each parameter held here.

    Raises:
        IncompatibleStateError: It does not; every difference is listed.
        InvalidInputError: See `groups_of`.
    """
    groups = groups_of(optimizer, names)
    rows = differences(optimizer, names, structure, groups=groups)
    if rows:
        said = "; ".join(f"{what} was {saved}, is {now}" for what, saved, now in rows[:8])
        more = f"; {len(rows) - 8} more" if len(rows) > 8 else ""  # noqa: PLR2004  (as many as are said)
        raise IncompatibleStateError(
            f"The optimizer cannot take the saved state: {said}{more}.",
            hint="Build it as the saved run did, and leave frozen parameters in their groups: without a gradient "
            "they are not stepped.",
            differences=rows[:200],
            difference_count=len(rows),
        )
    return groups


def differences(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    structure: Mapping[str, Any],
    *,
    groups: Mapping[str, int],
) -> list[Row]:
    """Return all that keeps the optimizer from taking the saved state.

    Args:
        optimizer: The target.
        names: The parameters of this rank.
        structure: What was saved.
        groups: The group of each parameter that the target holds.
    """
    rows: list[Row] = []
    if structure["class"] != class_of(optimizer):
        rows.append(("the class", structure["class"], class_of(optimizer)))
    saved_groups = structure["groups"]
    comparable = len(saved_groups) == len(optimizer.param_groups)
    if not comparable:
        rows.append(("the number of groups", str(len(saved_groups)), str(len(optimizer.param_groups))))
    else:
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
            rows += [
                (f"{field} of group {index}", before, now) for field, before, now in field_differences(group, saved)
            ]
        rows += shared_differences(optimizer.param_groups, saved_groups)
    for name, saved in structure["parameters"].items():
        if name in names:
            rows += _of_parameter(name, names[name], saved, groups.get(name), comparable=comparable)
        else:
            rows.append((name, _said(saved["group"], bool(saved["state"])), "no parameter of the model"))
    rows += [
        (name, "unknown", f"in group {groups[name]}")
        for name in names
        if name in groups and not _knows(structure, name)
    ]
    return rows


def _knows(structure: Mapping[str, Any], name: str) -> bool:
    return name in structure["parameters"]


def _of_parameter(
    name: str, parameter: nn.Parameter, saved: Mapping[str, Any], group: int | None, *, comparable: bool
) -> list[Row]:
    has_state = bool(saved["state"])
    now = _said(group, None)
    if group is None:
        # Out of the optimizer because it is frozen now: nothing is lost if nothing was there.
        lost = saved["group"] is not None and (has_state or parameter.requires_grad)
        return [(name, _said(saved["group"], has_state), now)] if lost else []
    if saved["group"] is None:
        # Frozen and left out at the save, trained from now on: it starts without state.
        return [(name, "trainable, but in no group", now)] if saved["trainable"] else []
    rows: list[Row] = []
    if comparable and saved["group"] != group:
        rows.append((name, _said(saved["group"], has_state), now))
    if has_state and list(saved["shape"]) != list(parameter.shape):
        rows.append((f"the shape of {name}", str(list(saved["shape"])), str(list(parameter.shape))))
    elif has_state and isinstance(parameter, DTensor):
        rows += [
            (f"the state {path} of {name}", f"of shape {shape}", f"of a DTensor {list(parameter.shape)}")
            for key, tree in saved["state"].items()
            for path, _, shape in tensors_in(tree, key)
            if shape and shape != list(parameter.shape)
        ]
    return rows


def _said(group: int | None, has_state: bool | None) -> str:  # noqa: FBT001  (a word of the sentence)
    place = "in no group" if group is None else f"in group {group}"
    return place if has_state is None else f"{place} with state" if has_state else f"{place} without state"
