"""Where a rank stops for ever, to be killed there."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.objectstore.wrappers.tapped import Call


@dataclass(frozen=True, slots=True)
class Stop:
    """A call of the store.

    Args:
        rank: Whose.
        operation: The method's name.
        prefix: How its key begins.
        number: Which of those calls, from 1 on.
        before: It stops before the call is made; else after it was answered.
    """

    rank: int
    operation: str
    prefix: str
    number: int = 1
    before: bool = False

    def means(self, call: Call, rank: int) -> bool:
        """Say whether a call of a rank is one of those that are counted."""
        return rank == self.rank and call.operation == self.operation and call.key.startswith(self.prefix)
