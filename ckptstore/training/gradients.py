"""Accumulated gradients, for a save between two micro-steps of one optimizer step.

The gradient of a `DTensor` is one tensor that all ranks hold together, already reduced: it is laid out anew as any
other. A plain gradient may differ by rank, because ranks reduce only at the end of the accumulation: each rank's own is
saved, and on another number of ranks they are dealt out so that the reduction to come gives the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from storage_writers.tensors import dtype_of

Reduction = Literal["mean", "sum"]

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Gradients(NamedTuple):
    """Gradients by parameter name; one that is None has no entry.

    Args:
        shared: `DTensor`s, held by all ranks together.
        local: Plain tensors of this rank.
    """

    shared: dict[str, torch.Tensor]
    local: dict[str, torch.Tensor]


class Targets(NamedTuple):
    """Room to load gradients into.

    Args:
        shared: By parameter name.
        local: By the rank that saved them, then by parameter name.
    """

    shared: dict[str, torch.Tensor]
    local: dict[int, dict[str, torch.Tensor]]


def capture(names: Mapping[str, nn.Parameter], *, models: Iterable[nn.Module]) -> Gradients:
    """Return the pending gradients: detached, not copied, nothing changed.

    Args:
        names: All parameters of this rank.
        models: Where they come from: FSDP2 keeps what it has not reduced yet in its modules.

    Raises:
        UnsupportedError: A gradient is sparse, or FSDP2 accumulates without reducing.
    """
    for model in models:
        _refuse_unreduced(model)
    found = Gradients({}, {})
    for name, parameter in names.items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"The gradient of {name} is a tensor of layout {gradient.layout}.",
                hint="Save when an optimizer step is complete, or make the gradient dense.",
                name=name,
            )
        (found.shared if isinstance(gradient, DTensor) else found.local)[name] = gradient.detach()
    return found


def facts(gradients: Gradients) -> dict[str, Any]:
    """Return dtype and global shape of each gradient, as JSON: what `targets` asks for."""
    return {kind: {name: _described(tensor) for name, tensor in part.items()} for kind, part in _parts(gradients)}


def reshaped(saved: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return what `facts` said as if these parameters had had other shapes, for a migration that makes them so."""
    return {
        kind: {name: [dtype, list(shapes.get(name, shape))] for name, (dtype, shape) in part.items()}
        for kind, part in saved.items()
    }


def targets(
    names: Mapping[str, nn.Parameter],
    saved: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    world_size: int,
    reduction: Reduction | None = None,
    elsewhere: Collection[str] = (),
) -> Targets:
    """Return room for what this rank loads, once everything is known to fit.

    On the saved number of ranks that is its own. On another, rank r loads the local gradients of ranks r, r + W, ... of
    those that saved, on the CPU if they are several.

    Args:
        names: All parameters of this rank.
        saved: What `facts` returned, by rank.
        rank: Of this process.
        world_size: W, the number of ranks now.
        reduction: How the job reduces local gradients over its ranks when the accumulation ends.
        elsewhere: Parameters that other ranks hold, under pipeline parallelism.

    Raises:
        IncompatibleStateError: A gradient has no parameter to go to, or another shape or kind; or the number of ranks
            changed and `reduction` is None.
        InvalidInputError: `reduction` is unknown.
    """
    sources = _sources(saved, rank=rank, world_size=world_size, reduction=reduction)
    shared = {name: shape for part in saved for name, shape in part["shared"].items() if name in names}
    _check_fit(names, saved, sources, world_size=world_size, elsewhere=elsewhere)
    local: dict[int, dict[str, torch.Tensor]] = {}
    for source in sources:
        on_cpu = len(sources) > 1
        local[source] = {
            name: _room(names[name], dtype, name=name, on_cpu=on_cpu)
            for name, (dtype, _) in saved[source]["local"].items()
        }
    return Targets({name: _room(names[name], dtype, name=name) for name, (dtype, _) in shared.items()}, local)


def apply(
    names: Mapping[str, nn.Parameter],
    loaded: Targets,
    saved: Sequence[Mapping[str, Any]],
    *,
    world_size: int,
    reduction: Reduction | None = None,
) -> None:
    """Make the loaded gradients the pending ones; parameters that had none have None.

    On another number of ranks each gets the sum of what it loaded, zeros if that is nothing; for `mean` times new over
    old number of ranks, so that the mean over the new ranks is what it would have been over the old.

    Args:
        names: All parameters of this rank.
        loaded: What `targets` returned, filled; not copied where it is used as it is.
        saved: See `targets`.
        world_size: See `targets`.
        reduction: See `targets`.
    """
    pending = dict(loaded.shared)
    if len(saved) == world_size:
        for part in loaded.local.values():
            pending |= part
    else:
        factor = world_size / len(saved) if reduction == "mean" else 1.0
        kinds = {name: dtype for part in saved for name, (dtype, _) in part["local"].items() if name in names}
        for name, dtype in kinds.items():
            parts = [part[name] for part in loaded.local.values() if name in part]
            pending[name] = _dealt(names[name], parts, dtype_of(dtype, key=name), factor=factor)
    for name, parameter in names.items():
        parameter.grad = pending.get(name)


def _refuse_unreduced(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001  (torch tells it nowhere else)
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)
                if held.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None:
                    raise UnsupportedError(
                        f"{path or 'The model'} holds gradients that FSDP2 has not reduced over the ranks yet.",
                        hint="Save when the accumulation has ended, or accumulate with "
                        "`set_requires_gradient_sync(True)`.",
                        module=path,
                    )


def _parts(gradients: Gradients) -> list[tuple[str, dict[str, torch.Tensor]]]:
    return [("shared", gradients.shared), ("local", gradients.local)]


def _described(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _sources(
    saved: Sequence[Mapping[str, Any]], *, rank: int, world_size: int, reduction: Reduction | None
) -> list[int]:
    """Return the ranks that saved what this one loads."""
    if reduction is not None and reduction not in get_args(Reduction):
        raise InvalidInputError(
            f"A reduction of gradients is 'mean' or 'sum', not {reduction!r}.", hint="Name one of them."
        )
    if len(saved) == world_size:
        return [rank]
    if reduction is None and any(part["local"] for part in saved):
        raise IncompatibleStateError(
            f"The accumulated gradients were saved by {len(saved)} ranks, each with its own, and there are "
            f"{world_size} now.",
            hint="Say how the job reduces them: TrainingState(gradient_reduction='mean'), as DDP does, or 'sum'; or "
            "resume from a checkpoint of a complete step.",
            saved_world_size=len(saved),
            world_size=world_size,
        )
    return list(range(rank, len(saved), world_size))


def _check_fit(
    names: Mapping[str, nn.Parameter],
    saved: Sequence[Mapping[str, Any]],
    sources: list[int],
    *,
    world_size: int,
    elsewhere: Collection[str],
) -> None:
    rows: list[tuple[str, str, str]] = []
    for source in sources:
        for name, (dtype, shape) in saved[source]["local"].items():
            rows += _unlike(name, names.get(name), dtype, shape, fits=not isinstance(names.get(name), DTensor))
    for name, (dtype, shape) in {name: kind for part in saved for name, kind in part["shared"].items()}.items():
        if name not in elsewhere or name in names:
            fits = world_size == 1 or isinstance(names.get(name), DTensor)
            rows += _unlike(name, names.get(name), dtype, shape, fits=fits)
    if rows:
        said = "; ".join(f"{name} was {one}, is {other}" for name, one, other in rows[:8])
        raise IncompatibleStateError(
            f"The accumulated gradients do not fit ({len(rows)} differences): {said}.",
            hint="Shard and name the model as the saved run did, or resume from a checkpoint of a complete step.",
            differences=rows[:200],
        )


def _unlike(
    name: str, parameter: nn.Parameter | None, dtype: str, shape: list[int], *, fits: bool
) -> list[tuple[str, str, str]]:
    if parameter is None:
        return [(name, f"a gradient {shape}", "no parameter of this rank")]
    if list(parameter.shape) != list(shape):
        return [(name, f"a gradient {list(shape)}", f"a parameter {list(parameter.shape)}")]
    if not fits:
        now = "a DTensor" if isinstance(parameter, DTensor) else "a plain tensor on each rank"
        was = "each rank's own" if isinstance(parameter, DTensor) else "of all ranks together"
        return [(name, was, now)]
    wanted = parameter.grad_dtype
    if wanted is not None and str(wanted).removeprefix("torch.") != dtype:
        return [(name, f"a gradient {dtype}", f"a parameter with gradients of {str(wanted).removeprefix('torch.')}")]
    return []


def _room(parameter: nn.Parameter, dtype: str, *, name: str, on_cpu: bool = False) -> torch.Tensor:
    device = torch.device("cpu") if on_cpu else parameter.device
    return torch.empty_like(parameter.detach(), dtype=dtype_of(dtype, key=name), device=device)


def _dealt(parameter: nn.Parameter, parts: list[torch.Tensor], dtype: torch.dtype, *, factor: float) -> torch.Tensor:
    total = torch.zeros_like(parameter.detach(), dtype=_WIDER.get(dtype, dtype))
    for part in parts:
        total += part.to(total.device)
    return (total * factor).to(dtype)
