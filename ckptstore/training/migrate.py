"""Migrators: how a state that was saved becomes one that is not quite the same, such as a vocabulary that has grown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ckptstore.errors import IncompatibleStateError, InvalidInputError
from ckptstore.training.differences import ABSENT, Difference, named

Form = tuple[str, tuple[int, ...]]
"""A tensor's dtype, as torch names it, and its global shape."""
Fill = Literal["mean", "zeros", "target"]

_NOT_WEIGHTS = ("optimizer.", "gradients.", "ranks/")


class Migrator(Protocol):
    """Turns what was saved into what is here. It is asked before anything is allocated or read.

    It makes tensors: of another shape or dtype than was saved, and such as were not saved. What is no tensor, an
    optimizer of another class above all, is not for it to open.
    """

    @property
    def name(self) -> str:
        """What reports call it."""

    def covers(self, difference: Difference) -> bool:
        """Say whether it makes up for a difference, and for all that follows from it.

        Of a tensor, `saved` and `now` are `[dtype, shape]`, and the path ends in its key: `state.models.model.…` when
        the gate asks, the key itself when the tensor is loaded. `saved` is `ABSENT` of one that the checkpoint lacks.
        """

    def migrate(self, key: str, saved: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
        """Return what the target shall hold, as a new tensor of its shape and dtype.

        Args:
            key: Of the tensor in the checkpoint.
            saved: All of it, on the CPU; None if the checkpoint lacks it.
            target: What the program has there now, all of it, on the CPU; it may be blank.
        """


def plan(saved: Mapping[str, Form], now: Mapping[str, Form], migrators: Sequence[Migrator]) -> dict[str, Migrator]:
    """Return who migrates each tensor that is not of the same form on both sides; the first who covers it does.

    What was not saved and nobody covers is for the load to refuse, as is what was saved and has no place.

    Raises:
        IncompatibleStateError: Nobody does; all such are named.
    """
    found: dict[str, Migrator] = {}
    left: list[Difference] = []
    for key in sorted(now):
        if saved.get(key) == now[key]:
            continue
        sides = [[side[key][0], list(side[key][1])] if key in side else ABSENT for side in (saved, now)]
        difference = Difference(key, *sides)
        migrator = next((each for each in migrators if each.covers(difference)), None)
        if migrator is not None:
            found[key] = migrator
        elif key in saved:
            left.append(difference)
    if left:
        raise IncompatibleStateError(
            f"No migrator covers {named(left)}.",
            hint="Build the target as it was saved, or register a Migrator that covers them.",
            differences=[each.as_json() for each in left],
        )
    return found


def migrated(migrator: Migrator, key: str, *, saved: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
    """Return what a migrator makes of one tensor, checked.

    Raises:
        IncompatibleStateError: It is not of the target's form, or it is the target itself.
    """
    made = migrator.migrate(key, saved, target)
    wanted = f"{target.dtype} {list(target.shape)}"
    if not isinstance(made, torch.Tensor) or (made.dtype, made.shape) != (target.dtype, target.shape) or made is target:
        shown = f"{made.dtype} {list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise IncompatibleStateError(
            f"The migrator {migrator.name} made {shown} of {key}, not a new {wanted}.",
            hint="Let it return a new tensor of the target's shape and dtype.",
            key=key,
        )
    return made


@dataclass(frozen=True)
class GrownVocabulary:
    """A vocabulary that has new tokens at its end: the rows of the old ones stay, new ones are filled.

    Moments and gradients of new rows are zero, as those of a parameter that has not been trained.

    Args:
        keys: Names of the parameters with a row for each token: of the embedding and, if it is not tied, of the head.
        fill: Of new rows of weights: the `mean` of the old ones, `zeros`, or what stands in the `target`.
        fields: What else says so in fingerprints, such as `model.vocab_size` and `tokenizer`: with all below it.

    Raises:
        InvalidInputError: It names no parameter, or another filling.
    """

    keys: tuple[str, ...]
    fill: Fill = "mean"
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _texts("keys", self.keys))
        object.__setattr__(self, "fields", _texts("fields", self.fields))
        if not self.keys or self.fill not in ("mean", "zeros", "target"):
            raise InvalidInputError(
                f"GrownVocabulary(keys={self.keys!r:.80}, fill={self.fill!r:.40}) says not what to fill, or how.",
                hint="Say keys=('embed.weight', 'head.weight') and fill='mean', 'zeros' or 'target'.",
            )

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"GrownVocabulary({', '.join(self.keys)})"

    def covers(self, difference: Difference) -> bool:
        """Say whether rows were added to one of its parameters, or a field of its own differs."""
        domain, _, field = difference.path.partition(".")
        if domain == "fingerprints":
            return any(field == each or field.startswith((f"{each}.", f"{each}[")) for each in self.fields)
        if not _names_one(self.keys, difference.path):
            return False
        match difference.saved, difference.now:
            case [str(old), [int(rows), *rest]], [str(new), [int(more), *others]]:
                return (old, rest) == (new, others) and more > rows
        return False

    def migrate(self, key: str, saved: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
        """Return the old rows and the new ones.

        Raises:
            IncompatibleStateError: It is no tensor to which rows were added.
        """
        rows = len(saved) if saved is not None and saved.dim() else 0
        if saved is None or not rows or _row_of(saved) != _row_of(target) or len(target) < rows:
            raise IncompatibleStateError(
                f"{key} was {_form(saved)} and would be {target.dtype} {list(target.shape)}: that is "
                "no grown vocabulary.",
                hint="Name only parameters with a row for each token.",
                key=key,
            )
        made = torch.zeros(target.shape, dtype=saved.dtype)
        made[:rows] = saved.detach()
        if key.startswith(_NOT_WEIGHTS) or self.fill == "zeros":
            return made
        wide = torch.promote_types(saved.dtype, torch.float32)
        made[rows:] = (
            target.detach()[rows:] if self.fill == "target" else saved.detach().to(wide).mean(0).to(saved.dtype)
        )
        return made


@dataclass(frozen=True)
class AddedParameters:
    """Parameters that the saved model did not have, such as adapters or a new head: they stay as they were made.

    Give all ranks the same ones, from one seed, say. What was saved of an optimizer does not know them: take the model
    alone, `resume(source=…, only=("model",))`.

    Args:
        keys: Names, or steps of names: `lora_a` is every parameter with this step in its name.

    Raises:
        InvalidInputError: It names no parameter.
    """

    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _texts("keys", self.keys))
        if not self.keys:
            raise InvalidInputError("AddedParameters(keys=()) names no parameter.", hint="Say keys=('lora_a',), say.")

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"AddedParameters({', '.join(self.keys)})"

    def covers(self, difference: Difference) -> bool:
        """Say whether it is a parameter of a model that was not saved, and is named here."""
        path = difference.path.removeprefix("state.models.")
        return difference.saved is ABSENT and path.startswith("model.") and _names_one(self.keys, path)

    def migrate(self, key: str, saved: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
        """Return what stands there."""
        del key, saved
        return target.detach().clone()


def _names_one(keys: Sequence[str], path: str) -> bool:
    return any(f".{key}." in f".{path}." for key in keys)


def _row_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape[1:]


def _form(tensor: torch.Tensor | None) -> str:
    return "not saved" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise InvalidInputError(f"{name} must be a list of texts, not {value!r:.80}.", hint=f"Say {name}=('…',).")
    if not all(isinstance(each, str) and each for each in value):
        raise InvalidInputError(f"{name} holds what is no text: {value!r:.80}.", hint=f"Say {name}=('…',).")
    return tuple(value)
