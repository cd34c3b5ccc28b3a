"""Parts of which ranks may hold different shares, as stages of a pipeline do.

Here stands what each rank holds, what they make together, and which share of it a rank takes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptstore.errors import IncompatibleStateError
from ckptstore.training import models, optimizers
from ckptstore.training.param_groups import equal
from ckptstore.training.parts import ModelPart, OptimizerPart, Part


def held(part: Part) -> list[str]:
    """Return what this rank holds of a part: an optimizer's parameters, a model's modules with extra state."""
    if isinstance(part, OptimizerPart):
        return list(part.parameters)
    return list(models.extra_state_names(part.module)) if isinstance(part, ModelPart) else []


def entries(part: Part, value: Any) -> dict[str, Any]:
    """Return what ranks must not contradict each other in, by name: `value` is what `take` returned beside tensors."""
    if not isinstance(part, OptimizerPart):
        return dict(value)
    parameters = {f"parameters.{name}": each for name, each in value["parameters"].items()}
    return {"class": value["class"], "groups": value["groups"], **parameters}


def merged(part: Part, values: Sequence[Any]) -> Any:
    """Return one value from those that ranks saved of a part.

    Raises:
        DisagreementError: They contradict each other.
        IncompatibleStateError: The same.
    """
    if len(values) == 1 or not part.differs_by_rank:
        return values[0]
    if isinstance(part, OptimizerPart):
        return optimizers.merged(values)
    whole: dict[str, Any] = {}
    for value in values:
        for name, each in value.items():
            if not equal(whole.setdefault(name, each), each):
                raise IncompatibleStateError(
                    f"Ranks saved different values of {part.name}: {name}.",
                    hint="Resume from a checkpoint in which they are the same.",
                )
    return whole


def share(part: Part, value: Any, elsewhere: Collection[str]) -> Any:
    """Return a value without what only other ranks hold.

    Args:
        part: Of this rank.
        value: What `merged` returned.
        elsewhere: What other ranks hold of it, and this one does not.
    """
    if not elsewhere or not isinstance(value, Mapping):
        return value
    if isinstance(part, OptimizerPart):
        return {**value, "parameters": _without(value["parameters"], elsewhere)}
    return _without(value, elsewhere) if isinstance(part, ModelPart) else value


def _without(entries: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: each for name, each in entries.items() if name not in names}
