"""What was saved of a state, before the state is touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptstore.training.gradients import Targets
from ckptstore.training.migrate import Migrator
from ckptstore.training.parts import Tensors


@dataclass
class Room:
    """What was saved of a state, before the state is touched.

    Args:
        values: Of each part, beside tensors.
        tensors: Memory for tensors, by key.
        migrators: Who makes some of them.
        migrated: Which of them are made so on any rank.
        loaders: Of this rank's loaders.
        rng: Of this rank's random numbers.
        gradients: What gradients there are, by saved rank; empty between two optimizer steps.
        pending: Room for these.
        without_state: Parameters whose optimizer had nothing to say of them.
        frozen_otherwise: Parameters that were trained and are frozen, or the other way round, with which.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    migrators: dict[str, Migrator] = field(default_factory=dict)
    migrated: frozenset[str] = frozenset()
    loaders: dict[str, Any] = field(default_factory=dict)
    rng: Any = None
    gradients: list[Any] = field(default_factory=list)
    pending: Targets | None = None
    without_state: tuple[str, ...] = ()
    frozen_otherwise: tuple[str, ...] = ()
