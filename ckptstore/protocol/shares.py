"""Whose turn it is to verify an object: a hash of its key says so, and nobody has to be asked."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.errors import InvalidInputError
from ckptstore.format.checksum import digest

MAX_SHARES = 1 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` shares of all objects: together they have every object exactly once, whoever makes them when.

    Args:
        index: Which one, from 1 to `count`.
        count: How many there are.

    Raises:
        InvalidInputError: There is no such share.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in (self.index, self.count))
        if not numbers or not 1 <= self.index <= self.count <= MAX_SHARES:
            raise InvalidInputError(
                f"{self.index!r:.40} of {self.count!r:.40} is no share of the objects.",
                hint=f"Give whole numbers: 1 to n of n, and n at most {MAX_SHARES}.",
            )

    @property
    def is_whole(self) -> bool:
        """Whether it has every object."""
        return self.count == 1

    def holds(self, key: str) -> bool:
        """Say whether an object is of this share."""
        return self.is_whole or int.from_bytes(digest(key.encode())[:8], "big") % self.count == self.index - 1

    def split(self, rank: int, ranks: int) -> Share:
        """Return what the process `rank` (from 0) of `ranks` takes of this share.

        Raises:
            InvalidInputError: There is no such process, or there are too many.
        """
        if not 0 <= rank < ranks:
            raise InvalidInputError(
                f"Process {rank} of {ranks} is none.", hint="Set RANK from 0 on, below WORLD_SIZE, or unset both."
            )
        return Share(self.index + self.count * rank, self.count * ranks)
