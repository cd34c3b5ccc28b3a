"""When to save."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.options import check_counts, check_seconds
from ckptstore.training.progress import Progress


@dataclass(frozen=True, slots=True)
class Saved:
    """When a run was saved last, or began.

    Args:
        global_step, epoch: Of its progress then.
        at: Monotonic seconds.
    """

    global_step: int
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """When to save: whichever comes first. With none of them a run is saved when the loop says so.

    Args:
        every_steps: Global steps; at their multiples.
        every_seconds: Since the save before, by rank 0's clock.
        every_epochs: When so many epochs have ended.

    Raises:
        InvalidInputError: One is not above 0.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    every_epochs: int | None = None

    def __post_init__(self) -> None:
        counts = {"every_steps": self.every_steps, "every_epochs": self.every_epochs}
        check_counts(**{name: value for name, value in counts.items() if value is not None})
        if self.every_seconds is not None:
            check_seconds(every_seconds=self.every_seconds)

    def is_due(self, progress: Progress, last: Saved, *, now: float) -> bool:
        """Return whether to save now. Never twice at one step, and only between two optimizer steps."""
        if progress.micro_step or progress.global_step <= last.global_step:
            return False
        return (
            _crossed(self.every_steps, last.global_step, progress.global_step)
            or _crossed(self.every_epochs, last.epoch, progress.epoch)
            or (self.every_seconds is not None and now - last.at >= self.every_seconds)
        )


def _crossed(every: int | None, before: int, now: int) -> bool:
    return every is not None and now // every > before // every
