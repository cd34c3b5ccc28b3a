"""A model's state by name: the same names whatever the model is wrapped in.

DDP, `DataParallel`, `torch.compile` and activation checkpointing each put a step of their own into every name below
them; FSDP2 puts none. Those steps are left out, at any depth and in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.units import some

EXTRA_STATE = "_extra_state"


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by clean name, frozen ones too; a tied one once, under the first of its names.

    Under FSDP2 these are the sharded ones, which the optimizer holds. What an evaluation left unsharded is sharded.

    Raises:
        InvalidInputError: It is no module, a parameter has no memory yet, or two have one name.
        UnsupportedError: It is wrapped in FSDP1 or a DeepSpeed engine.
    """
    names: dict[str, nn.Parameter] = {}
    for held in _first_of_each(_held(model)):
        if isinstance(held.tensor, nn.Parameter):
            names[held.name] = held.tensor
    return names


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers that `state_dict` holds, by clean name, each once.

    They are detached and share memory with the model: what is loaded into them is in the model. Extra state is left
    to `extra_state`.

    Raises:
        InvalidInputError: See `named_parameters`.
        UnsupportedError: See `named_parameters`; or a hook made `state_dict` give values that are not the model's own,
            which nothing could load again.
    """
    return {held.name: held.tensor.detach() for held in _first_of_each(_stated(model))}


def aliases(model: nn.Module) -> list[list[str]]:
    """Return the names of each tensor that has several: tied weights, shared modules.

    Raises:
        InvalidInputError: See `named_state`.
        UnsupportedError: See `named_state`.
    """
    names: dict[int, list[str]] = {}
    for held in _stated(model):
        names.setdefault(id(held.tensor), []).append(held.name)
    return [group for group in names.values() if len(group) > 1]


def facts(model: nn.Module) -> dict[str, Any]:
    """Return what the state looks like, as JSON: dtype and global shape by name, and the other names of what is tied.

    Raises:
        InvalidInputError: See `named_state`.
        UnsupportedError: See `named_state`.
    """
    tied = {names[0]: names[1:] for names in aliases(model)}
    found: dict[str, Any] = {"parameters": {}, "buffers": {}, "aliases": tied}
    for held in _first_of_each(_stated(model)):
        kind = "parameters" if isinstance(held.tensor, nn.Parameter) else "buffers"
        found[kind][held.name] = [str(held.tensor.dtype).removeprefix("torch."), list(held.tensor.shape)]
    return found


def extra_state(model: nn.Module) -> dict[str, Any]:
    """Return what `get_extra_state` of each module gives, tensors too, by clean name.

    Raises:
        InvalidInputError: It is no module.
        UnsupportedError: See `named_parameters`.
    """
    return {name: module.get_extra_state() for name, module in _with_extra_state(model).items()}


def extra_state_names(model: nn.Module) -> list[str]:
    """Return the names under which `extra_state` gives something.

    Raises:
        InvalidInputError: It is no module.
        UnsupportedError: See `named_parameters`.
    """
    return list(_with_extra_state(model))


def set_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give each module what `extra_state` returned for it.

    Raises:
        IncompatibleStateError: Other modules have extra state than had it then. Nothing was set.
        InvalidInputError: It is no module.
        UnsupportedError: See `named_parameters`.
    """
    modules = _with_extra_state(model)
    missing, unexpected = sorted(modules.keys() - saved.keys()), sorted(saved.keys() - modules.keys())
    if missing or unexpected:
        said = [f"none was saved for {some(missing)}"] if missing else []
        said += [f"the model takes none for {some(unexpected)}"] if unexpected else []
        raise IncompatibleStateError(
            f"The extra state does not fit: {'; '.join(said)}.",
            hint="Build the model as the saved run did.",
            missing=missing[:200],
            unexpected=unexpected[:200],
        )
    for name, module in modules.items():
        module.set_extra_state(saved[name])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module stands.

    Args:
        name: Its clean name.
        spelled: What `state_dict` calls it.
        module: Itself.
    """

    name: str
    spelled: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor under one of its names, see `_Place`."""

    name: str
    spelled: str
    tensor: torch.Tensor


def _places(model: nn.Module) -> list[_Place]:
    """Return every module in the order of `state_dict`, as often as it is held."""
    _refuse(model)
    by_path: dict[str, _Place] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not path:
            by_path[path] = _Place("", "", module)
            continue
        above, _, step = path.rpartition(".")
        holder = by_path[above]
        name, spelled = _joined(holder.name, step), _joined(holder.spelled, step)
        if step == _inner_of(holder.module):
            name = holder.name
            if isinstance(holder.module, ActivationWrapper):  # it leaves its own step out of `state_dict`
                spelled = holder.spelled
        by_path[path] = _Place(name, spelled, module)
    return list(by_path.values())


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"{model!r:.80} is no torch module.", hint="Pass the model itself.")
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                f"{path or 'The model'} is wrapped in FSDP1, whose flat parameters have no names of their own.",
                hint="Shard it with `torch.distributed.fsdp.fully_shard` (FSDP2).",
                module=path,
            )
        if any(kind.__module__.split(".")[:2] == ["deepspeed", "runtime"] for kind in type(module).__mro__):
            raise UnsupportedError(
                f"{path or 'The model'} is DeepSpeed's {type(module).__name__}, which keeps its state to itself.",
                hint="Save with the engine's own `save_checkpoint`, or train with FSDP2 (`fully_shard`).",
                module=path,
            )


def _inner_of(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper keeps what it wraps; None of any other module."""
    compiling = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this: that takes seconds
    if compiling is not None and isinstance(module, compiling.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return "_checkpoint_wrapped_module" if isinstance(module, ActivationWrapper) else None


def _held(model: nn.Module) -> list[_Held]:
    """Return every parameter and buffer under each of its names, in the order of `state_dict`."""
    places = _places(model)
    for place in places:
        if isinstance(place.module, FSDPModule):
            place.module.reshard()
    held = [
        _Held(_joined(place.name, name), _joined(place.spelled, name), tensor)
        for place in places
        for name, tensor in _own_tensors(place.module)
    ]
    _check_memory(held)
    by_name: dict[str, torch.Tensor] = {}
    for one in held:
        if by_name.setdefault(one.name, one.tensor) is not one.tensor:
            raise InvalidInputError(
                f"Two tensors of the model have the name {one.name}.",
                hint="Rename the one that the wrapper holds.",
                name=one.name,
            )
    return held


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )


def _check_memory(held: list[_Held]) -> None:
    lazy = [one.name for one in held if is_lazy(one.tensor)]
    away = [one.name for one in held if hasattr(one.tensor, "ds_id")]
    empty = [one.name for one in held if not is_lazy(one.tensor) and one.tensor.device.type == "meta"]
    if lazy:
        raise InvalidInputError(
            f"{some(lazy)} have no shape yet.",
            hint="Run one forward pass of the lazy modules before the state is taken.",
            names=lazy[:200],
        )
    if away:
        raise UnsupportedError(
            f"{some(away)} are tensors that DeepSpeed's ZeRO keeps in parts.",
            hint="Save with the engine's own `save_checkpoint`, or train with FSDP2 (`fully_shard`).",
            names=away[:200],
        )
    if empty:
        raise InvalidInputError(
            f"{some(empty)} lie on the meta device and have no memory.",
            hint="Call `model.to_empty(device=...)` before the state is taken or loaded.",
            names=empty[:200],
        )


def _stated(model: nn.Module) -> list[_Held]:
    """Return those of the model's tensors that `state_dict` holds, under each of their names."""
    held = {one.spelled: one for one in _held(model)}
    extra = {_joined(place.spelled, EXTRA_STATE) for place in _places(model) if _has_extra_state(place.module)}
    stated = model.state_dict(keep_vars=True)
    strange = [
        key
        for key, value in stated.items()
        if key not in extra and (key not in held or not _same_memory(value, held[key].tensor))
    ]
    if strange:
        raise UnsupportedError(
            f"`state_dict` gives {some(strange)}, which are no parameters or buffers of the model: "
            "what is loaded would not reach it.",
            hint="Let `get_extra_state` of the module give them, or save them as an object of their own.",
            keys=strange[:200],
        )
    return [one for one in held.values() if one.spelled in stated]


def _same_memory(value: object, tensor: torch.Tensor) -> bool:
    if value is tensor:
        return True
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
        return False
    return isinstance(value, DTensor) == isinstance(tensor, DTensor) and _local(value).is_set_to(_local(tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _first_of_each(held: list[_Held]) -> Iterator[_Held]:
    seen: set[int] = set()
    for one in held:
        if id(one.tensor) not in seen:
            seen.add(id(one.tensor))
            yield one


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, each once."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for place in _places(model):
        if _has_extra_state(place.module) and id(place.module) not in seen:
            seen.add(id(place.module))
            found[_joined(place.name, EXTRA_STATE)] = place.module
    return found


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _joined(above: str, step: str) -> str:
    return f"{above}.{step}" if above else step
