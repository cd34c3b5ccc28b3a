"""The parts that a training state is made of: how each is taken apart for a save, and put together after a load."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ckptstore.errors import InvalidInputError
from ckptstore.training import models, optimizers, trees
from ckptstore.training.progress import Progress

Tensors = dict[str, torch.Tensor]
_EXTRA = ".__extra_state__"
"""Under this name of a model stand tensors in what its modules hold beside parameters and buffers."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one part holds.

    Args:
        tensors: By key. Not copied: the training owns them.
        value: All else, as typed JSON can store it; None if there is nothing else.
    """

    tensors: Tensors = field(default_factory=dict)
    value: Any = None


class Part(Protocol):
    """One part of a training state."""

    @property
    def name(self) -> str:
        """The component of the keys."""

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks may hold different values: then these are merged when they are loaded."""

    def take(self) -> Taken:
        """Return what it holds. Changes nothing."""

    def targets(self, value: Any) -> Tensors:
        """Return memory for its tensors, by key. Changes nothing that trains, but a model is loaded in place.

        Args:
            value: What `take` returned beside the tensors, when it was saved.

        Raises:
            IncompatibleStateError: What was saved does not fit.
        """

    def put(self, value: Any, tensors: Tensors) -> None:
        """Let it be what was saved.

        Args:
            value: As for `targets`.
            tensors: What `targets` returned, filled.
        """


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model: its tensors by fully qualified name, loaded in place."""

    name: str
    module: nn.Module
    differs_by_rank: bool = True  # stages of a pipeline hold different modules

    def take(self) -> Taken:
        """Return the model's tensors, and what its modules hold beside them."""
        tensors, extra = trees.split(models.extra_state(self.module), prefix=f"{self.name}{_EXTRA}")
        return Taken(self._own() | tensors, extra)

    def _own(self) -> Tensors:
        return {f"{self.name}.{key}": tensor for key, tensor in models.named_state(self.module).items()}

    def targets(self, value: Any) -> Tensors:
        """Return the model's own tensors, and memory for those in what its modules hold beside them."""
        return self._own() | trees.targets(value, models.extra_state(self.module))

    def put(self, value: Any, tensors: Tensors) -> None:
        """Give the modules what they held beside tensors, which are loaded already."""
        models.set_extra_state(self.module, trees.join(value, tensors))


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """An optimizer: moments by the name of their parameter, groups by their place."""

    name: str
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    differs_by_rank: bool = True

    def take(self) -> Taken:
        """Return moments, and groups with what they say of each parameter."""
        captured = optimizers.capture(self.optimizer, self.parameters)
        return Taken({f"{self.name}.{key}": tensor for key, tensor in captured.tensors.items()}, captured.structure)

    def targets(self, value: Any) -> Tensors:
        """Return fresh memory for all moments that were saved."""
        found = optimizers.targets(self.optimizer, self.parameters, value)
        return {f"{self.name}.{key}": tensor for key, tensor in found.items()}

    def put(self, value: Any, tensors: Tensors) -> None:
        """Let the optimizer have these moments and groups, and no others."""
        start = len(self.name) + 1
        own = {key[start:]: tensor for key, tensor in tensors.items()}
        optimizers.apply(self.optimizer, self.parameters, value, own)


class Stateful(Protocol):
    """Anything that tells its state and takes it again."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state."""


@dataclass(frozen=True, slots=True)
class StatefulPart:
    """A scheduler, a scaler, a sampler, an average of weights: whatever has `state_dict` and `load_state_dict`.

    Its state is replaced whole, whatever the object held before.
    """

    name: str
    stateful: Stateful
    differs_by_rank: bool = False

    def take(self) -> Taken:
        """Return its state, with larger tensors apart."""
        return Taken(*trees.split(self.stateful.state_dict(), prefix=self.name))

    def targets(self, value: Any) -> Tensors:
        """Return memory for the tensors of its state, laid out like its own where it has such."""
        return trees.targets(value, self.stateful.state_dict())

    def put(self, value: Any, tensors: Tensors) -> None:
        """Give it the state."""
        self.stateful.load_state_dict(trees.join(value, tensors, like=self.stateful.state_dict()))


@dataclass(frozen=True, slots=True)
class ExtrasPart:
    """A dict of the user's own: what was saved replaces all that it holds."""

    name: str
    extras: MutableMapping[str, Any]
    differs_by_rank: bool = False

    def take(self) -> Taken:
        """Return what the dict holds, with larger tensors apart."""
        return Taken(*trees.split(dict(self.extras), prefix=self.name))

    def targets(self, value: Any) -> Tensors:
        """Return memory for the tensors in it."""
        return trees.targets(value, dict(self.extras))

    def put(self, value: Any, tensors: Tensors) -> None:
        """Fill the dict anew."""
        joined = trees.join(value, tensors, like=dict(self.extras))
        self.extras.clear()
        self.extras.update(joined)


@dataclass(frozen=True, slots=True)
class ProgressPart:
    """How far the run has come."""

    name: str
    progress: Progress
    differs_by_rank: bool = False

    def take(self) -> Taken:
        """Return the counters."""
        return Taken(value=self.progress.as_json())

    def targets(self, value: Any) -> Tensors:
        """Return nothing: there are no tensors."""
        del value
        return {}

    def put(self, value: Any, tensors: Tensors) -> None:
        """Set the counters."""
        del tensors
        self.progress.restore(value)


def by_name(component: str, given: Any) -> dict[str, Any]:
    """Return what was given for a component, by the component of its keys: one alone, or several by name.

    Raises:
        InvalidInputError: A name cannot be a part of a key.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {component: given}
    for name in given:
        if not isinstance(name, str) or not name or set(name) & set("./"):
            raise InvalidInputError(
                f"{component}={{{name!r}: …}}: {name!r} cannot name it.", hint="Use a name without dots and slashes."
            )
    return {f"{component}.{name}": each for name, each in given.items()}
