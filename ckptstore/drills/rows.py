"""What a batch was like: rows of two runs can be compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A batch, right after it.

    Args:
        step, micro_step: The counters.
        loss: Of the whole batch.
        samples: Those of all ranks.
        digest: Of weights and moments.
    """

    step: int
    micro_step: int
    loss: float
    samples: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return f"step {self.step}, micro-step {self.micro_step}: loss {self.loss!r}, {self.digest[:8]}"
