"""How far a run has come."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ckptstore.errors import IncompatibleStateError, InvalidInputError

LARGEST = 2**63 - 1
"""The largest count: what 64 bits hold, here and wherever a checkpoint is read."""


@dataclass(slots=True)
class Progress:
    """The counters of a training run. The loop moves them on; each holds a whole number from 0 on, always.

    Args:
        global_step: Optimizer steps done.
        epoch: Passes over the data that are complete.
        micro_step: Batches whose gradients are accumulated since the last optimizer step; 0 right after one.
        consumed_samples: Samples trained on, over all epochs and ranks.

    Raises:
        InvalidInputError: A counter is given, then or later, anything else.
    """

    global_step: int = 0
    epoch: int = 0
    micro_step: int = 0
    consumed_samples: int = 0

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, _whole(name, value))

    def as_json(self) -> dict[str, int]:
        """Return the counters by name, as plain values, in one order in every process."""
        return {name: getattr(self, name) for name in _names()}

    def restore(self, saved: Mapping[str, object]) -> None:
        """Take over the counters that `as_json` returned. All are taken, or none.

        Raises:
            IncompatibleStateError: Counters are missing or unknown; they are named.
            InvalidInputError: A counter is not a whole number from 0 on.
        """
        missing = sorted(set(_names()) - saved.keys())
        unknown = sorted(str(name) for name in saved.keys() - set(_names()))
        if missing or unknown:
            raise IncompatibleStateError(
                f"The saved progress does not fit (missing: {missing or 'none'}, unknown: {unknown or 'none'}).",
                hint="Resume with the release of ckptstore that saved it.",
                missing=missing,
                unknown=unknown,
            )
        for name, value in {name: _whole(name, saved[name]) for name in _names()}.items():
            setattr(self, name, value)


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Progress))


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= LARGEST:
        raise InvalidInputError(
            f"{name} must be a whole number from 0 on, not {value!r:.80}.",
            hint=f"Set {name} to an int; `.item()` makes one of a tensor.",
            counter=name,
        )
    return int(value)
