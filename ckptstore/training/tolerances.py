"""How near a resumed run must come to the run that went on, and why no nearer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from ckptstore.errors import InvalidInputError
from ckptstore.training.trace import Conditions

_BY_DTYPE = {"float64": 0.01, "float32": 1.0, "tf32": 10.0, "float16": 10.0, "bfloat16": 100.0}
"""How much coarser than float32 a loss of this dtype is: less than its rounding, because it is a mean over a batch."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far numbers of a resumed run may be from those of the control, relative to the control's.

    The defaults are for float32 on another world size or another machine, where sums are taken in another order.
    Samples, steps and the gradient scale are compared exactly, always. NaN is equal to NaN, an infinity to itself.

    Args:
        loss: Of a step.
        first_loss: Of the first step: the same weights on the same batch, so nothing has drifted yet. Weights that are
            one step older are not let through by it, as long as a step moves the loss by more.
        loss_floor: A loss may always differ by so much: one near zero is mostly rounding.
        grad_norm: Of the gradients.
        update_norm: Of the change of the weights. Moments that were dropped change it by tens of per cent.
        lr: Of the learning rate, a function of the step alone.

    Raises:
        InvalidInputError: One is no number from 0 to 1.
    """

    loss: float = 1e-4
    first_loss: float = 1e-5
    loss_floor: float = 1e-7
    grad_norm: float = 1e-3
    update_norm: float = 1e-3
    lr: float = 1e-9

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidInputError(
                    f"{each.name} must be from 0 to 1, not {value!r:.80}.", hint="Leave it out.", field=each.name
                )

    @classmethod
    def exact(cls) -> Self:
        """Return those of a run that computes the same bits again."""
        return cls(loss=0.0, first_loss=0.0, loss_floor=0.0, grad_norm=0.0, update_norm=0.0, lr=0.0)

    @classmethod
    def of_dtype(cls, dtype: str) -> Self:
        """Return those of arithmetic that is mostly of `dtype`; of one that is not known, those of bfloat16."""
        coarse = _BY_DTYPE.get(dtype, _BY_DTYPE["bfloat16"])
        usual = cls()
        return cls(
            loss=min(0.01, usual.loss * coarse),
            first_loss=min(0.002, usual.first_loss * coarse),
            loss_floor=usual.loss_floor * coarse,
            grad_norm=min(0.05, usual.grad_norm * coarse),
            update_norm=min(0.05, usual.update_norm * coarse),
            lr=usual.lr,
        )

    @classmethod
    def between(cls, control: Conditions, resumed: Conditions) -> Self:
        """Return the strictest that are honest: exact if both compute the same bits, else by the coarser dtype."""
        if control == resumed and control.is_deterministic:
            return cls.exact()
        one, other = cls.of_dtype(control.dtype), cls.of_dtype(resumed.dtype)
        return one if one.loss >= other.loss else other

    @property
    def is_exact(self) -> bool:
        """Whether nothing may differ."""
        return self == type(self).exact()

    def as_json(self) -> dict[str, Any]:
        """Return them as plain values."""
        return dataclasses.asdict(self)


def distance(control: float, resumed: float) -> float:
    """Return by how much `resumed` is greater: 0 if both are NaN or the same infinity, NaN if that says nothing."""
    if control == resumed or (math.isnan(control) and math.isnan(resumed)):
        return 0.0
    return resumed - control


def is_within(control: float, resumed: float, *, relative: float, floor: float = 0.0) -> bool:
    """Say whether `resumed` is near enough to `control`. Nothing is near NaN or an infinity but itself."""
    apart = abs(distance(control, resumed))
    return apart == 0 or (math.isfinite(control) and apart <= max(relative * abs(control), floor))
