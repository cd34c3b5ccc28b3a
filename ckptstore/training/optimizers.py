"""An optimizer's state by parameter name, taken and put back without ever stepping it.

torch numbers parameters by their place, makes state on the first step and asks for a dummy step to have any. Here a
parameter's moments go by its name, room for them is made from what was saved, and nothing that was saved is left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from torch.distributed.tensor import DTensor

from ckptstore.errors import DisagreementError, IncompatibleStateError
from ckptstore.training import nested
from ckptstore.training.optimizer_fit import check_fit, check_layout, class_of, groups_of, unwrapped
from ckptstore.training.param_groups import as_json, equal, fields_of, put_back
from storage_writers.tensors import dtype_of, lasting_pieces

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's own optimizers that is one number for each parameter, whatever that parameter's shape."""

_CYCLED = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})


@dataclass(frozen=True, slots=True)
class Captured:
    """An optimizer at one moment.

    Args:
        tensors: State by `<parameter>.<name>`: the live tensors, detached, not copied.
        structure: All else, as typed JSON can store it: `class`, `groups` (their fields), and by name the
            `parameters`: `group` (None if in none), `trainable`, `shape` and `state` (trees, see `nested`).
    """

    tensors: dict[str, torch.Tensor]
    structure: dict[str, Any]


def capture(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> Captured:
    """Return what the optimizer holds. Nothing is changed or stepped; gradients may be pending.

    Args:
        optimizer: It may never have stepped.
        names: All parameters of the model, those that the optimizer does not hold too.

    Raises:
        InvalidInputError: It is no optimizer, or holds a parameter or state that has no name.
        UnsupportedError: Its state cannot be stored, or not so that it can be laid out on other ranks.
    """
    optimizer = unwrapped(optimizer)
    groups = groups_of(optimizer, names)
    tensors: dict[str, torch.Tensor] = {}
    parameters: dict[str, Any] = {}
    for name, parameter in names.items():
        found: dict[str, torch.Tensor] = {}
        state = optimizer.state.get(parameter, {}) if name in groups else {}
        trees = {str(key): nested.taken_apart(value, str(key), found) for key, value in state.items()}
        for path, tensor in found.items():
            key = f"{name}.{path}"
            sharded, owner = isinstance(tensor, DTensor), class_of(optimizer)
            check_layout(parameter, list(tensor.shape), sharded=sharded, key=key, owner=owner)
            tensors[key] = tensor
        parameters[name] = {
            "group": groups.get(name),
            "trainable": parameter.requires_grad,
            "shape": list(parameter.shape),
            "state": trees,
        }
    fields = [fields_of(group) for group in optimizer.param_groups]
    return Captured(tensors, {"class": class_of(optimizer), "groups": fields, "parameters": parameters})


def merged(structures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one structure for ranks that hold different parameters, by rank.

    Raises:
        DisagreementError: Two ranks contradict each other; what they say differently is named.
    """
    first = structures[0]
    parameters: dict[str, Any] = {}
    origin: dict[str, int] = {}
    for rank, structure in enumerate(structures):
        for part in ("class", "groups"):
            if not equal(structure[part], first[part]):
                raise _contradiction(f"the {part} of the optimizer", 0, rank)
        for name, saved in structure["parameters"].items():
            if not equal(parameters.setdefault(name, saved), saved):
                raise _contradiction(f"the optimizer's state of {name}", origin[name], rank)
            origin.setdefault(name, rank)
    return {"class": first["class"], "groups": first["groups"], "parameters": parameters}


def reshaped(structure: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the structure as if these parameters, and state of their shape, had been saved with other shapes.

    For a migration, which makes tensors of the new shape itself.
    """
    parameters = dict(structure["parameters"])
    for name in shapes.keys() & parameters.keys():
        saved, shape = parameters[name], list(shapes[name])
        trees = {
            key: tree if key in SCALARS else nested.reshaped(tree, list(saved["shape"]), shape)
            for key, tree in saved["state"].items()
        }
        parameters[name] = {**saved, "shape": shape, "state": trees}
    return {**structure, "parameters": parameters}


def targets(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    structure: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return room for the saved tensors of this rank, once everything is known to fit: saved dtypes, target's layout.

    State of a parameter's shape is laid out as the parameter is. A single number goes where torch's own optimizers
    want it: the CPU, unless the group is capturable or fused. Nothing of the optimizer is touched.

    Args:
        optimizer: It may never have stepped.
        names: All parameters of this rank.
        structure: What `capture` returned; of several ranks, `merged` and without what other ranks hold.

    Raises:
        IncompatibleStateError: Saved state has no target, or another one; all differences are listed. What never had
            state needs none, and what was frozen and in no group may start without.
        InvalidInputError: See `capture`.
        UnsupportedError: See `capture`.
    """
    optimizer = unwrapped(optimizer)
    groups = check_fit(optimizer, names, structure)
    room: dict[str, torch.Tensor] = {}
    for name in groups:
        group, saved = optimizer.param_groups[groups[name]], structure["parameters"].get(name)
        for key, tree in saved["state"].items() if saved else ():
            for path, dtype, shape in nested.tensors_in(tree, key):
                like, full = names[name].detach(), f"{name}.{path}"
                kind = dtype_of(dtype, key=full)
                if path in SCALARS and not shape:
                    room[full] = torch.empty((), dtype=kind, device=_device_of_scalars(optimizer, group, like))
                elif shape == list(like.shape):
                    room[full] = torch.empty_like(like, dtype=kind)
                else:
                    room[full] = torch.empty(shape, dtype=kind, device=like.device)
    return room


def apply(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    structure: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Make the optimizer what was saved: `tensors` become its state, groups get their fields.

    State that was not saved is dropped. Tensors in groups, such as `lr`, stay the same objects. `foreach`, `fused`,
    `capturable` and `differentiable` stay as the target has them, as do fields that were not saved.

    Args:
        optimizer: It may never have stepped, and does not now.
        names: All parameters of this rank.
        structure: What `capture` returned.
        tensors: What `targets` returned, filled. They are not copied.

    Raises:
        IncompatibleStateError: See `targets`; or a tensor is missing. Nothing was changed.
        InvalidInputError: See `capture`.
        UnsupportedError: See `capture`.
    """
    optimizer = unwrapped(optimizer)
    groups = check_fit(optimizer, names, structure)
    states: dict[str, dict[str, Any]] = {}
    for name in groups:
        saved = structure["parameters"].get(name, {"state": {}})
        states[name] = {
            key: nested.put_together(tree, key, _found(tree, key, name, tensors))
            for key, tree in saved["state"].items()
        }
    for name, state in states.items():
        optimizer.state.pop(names[name], None)
        if state:
            optimizer.state[names[name]] = state
    for group, saved in zip(optimizer.param_groups, structure["groups"], strict=True):
        put_back(group, saved)


def facts(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return what a gate compares, as JSON.

    `defaults` are the arguments that the optimizer was made with, without learning rates: what stands in groups may
    change from step to step. Of groups there is the number: which parameter is in which is for `targets` to judge;
    ranks may hold different ones, and those that never had state may come and go.

    Raises:
        InvalidInputError: See `capture`.
        UnsupportedError: See `capture`.
    """
    optimizer = unwrapped(optimizer)
    groups_of(optimizer, names)
    return {
        "class": class_of(optimizer),
        "defaults": {key: as_json(value) for key, value in optimizer.defaults.items() if key not in _CYCLED},
        "groups": len(optimizer.param_groups),
    }


def digest(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], *, max_bytes: int
) -> dict[str, int | str]:
    """Return numbers by which two states are told apart, see `digest_of`.

    Raises:
        InvalidInputError: See `capture`.
        UnsupportedError: See `capture`.
    """
    return digest_of(capture(optimizer, names).tensors, max_bytes=max_bytes)


def digest_of(tensors: Mapping[str, torch.Tensor], *, max_bytes: int) -> dict[str, int | str]:
    """Return numbers by which two states are told apart: over all tensors, and over the first bytes of this rank.

    Args:
        tensors: What `capture` returned of an optimizer. None of them is changed.
        max_bytes: How much is read, by name in order.

    Returns:
        `tensors`, `elements` (global), `bytes` (read), `nonzero` (bytes among them), `blake3` (of them and the names),
        `layout` (of all names, dtypes and shapes, global ones and those of this rank's pieces).
    """
    summary, layout, read, nonzero = blake3(), blake3(), 0, 0
    for key, tensor in sorted(tensors.items()):
        layout.update(f"{key}\0{tensor.dtype}\0{list(tensor.shape)}\0{list(_local(tensor).shape)}\0".encode())
    for key in sorted(tensors):
        if read >= max_bytes:
            break
        tensor = tensors[key]
        summary.update(f"{key}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        for piece in lasting_pieces(_local(tensor)):
            taken = piece[: max_bytes - read]
            summary.update(taken)
            read += len(taken)
            nonzero += len(taken) - bytes(taken).count(0)
            if read >= max_bytes:
                break
    return {
        "tensors": len(tensors),
        "elements": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": read,
        "nonzero": nonzero,
        "blake3": summary.hexdigest(),
        "layout": layout.hexdigest(),
    }


def is_any_nonzero(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> bool:
    """Return whether this rank holds any state that is not zero; its pieces are looked through until one is found.

    Raises:
        InvalidInputError: See `capture`.
        UnsupportedError: See `capture`.
    """
    return any(bool(_local(tensor).any()) for tensor in capture(optimizer, names).tensors.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _device_of_scalars(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> torch.device:
    beside = isinstance(optimizer, torch.optim.ASGD) or group.get("capturable") or group.get("fused")
    return parameter.device if beside else torch.device("cpu")


def _found(tree: nested.Tree, key: str, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for path, _, shape in nested.tensors_in(tree, key):
        tensor = tensors.get(f"{name}.{path}")
        if tensor is None or list(tensor.shape) != shape:
            raise IncompatibleStateError(
                f"The state {name}.{path} {shape} is not among the tensors that were loaded.",
                hint="Pass what `targets` returned, filled by `sw.load`.",
                key=f"{name}.{path}",
            )
        found[path] = tensor.detach()
    return found


def _contradiction(what: str, one: int, other: int) -> DisagreementError:
    return DisagreementError(
        f"Ranks {one} and {other} say different things of {what}.",
        hint="Build the same optimizer, with the same groups, on every rank.",
        what=what,
        ranks=[one, other],
    )
