"""Which topologies the drill of resharding can build: no torch, so that it can be said before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ckptstore.drills.place import NotApplicable
from ckptstore.errors import InvalidInputError

BLOCKS, HIDDEN, BATCH = 4, 24, 48
MAX_RANKS = 64
"""Processes of this machine."""
HINT = "Write it as dp=8,tp=1; pp, zero and fsdp may be named too."
STAGES_OF_ZERO = (0, 2, 3)


@dataclass(frozen=True, slots=True)
class Degrees:
    """How a run is spread over its ranks: see `ckptstore.training.topology`."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    fsdp: int = 1

    @classmethod
    def read(cls, given: Mapping[str, int]) -> Degrees:
        """Return the degrees that are meant; with `zero` and no `fsdp`, one copy is spread over all ranks of `dp`.

        Raises:
            NotApplicable: The drill cannot build them.
        """
        if unknown := sorted(name for name in given if name not in cls.__slots__):
            raise NotApplicable(f"{', '.join(unknown)}: this drill builds dp, tp, pp, zero and fsdp.")
        spread = given.get("dp", 1) if given.get("zero") else 1
        degrees = cls(**{"fsdp": spread, **given})
        if reason := degrees._unfit():
            raise NotApplicable(reason)
        return degrees

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        return self.dp * self.tp * self.pp

    def as_table(self) -> dict[str, int]:
        """Return the degrees by name."""
        return asdict(self)

    def _unfit(self) -> str | None:
        """Return why it cannot be built."""
        reasons = {
            "ZeRO 1 shards the optimizer alone, which no part of torch does in a form that is known here.": self.zero
            not in STAGES_OF_ZERO,
            f"fsdp {self.fsdp} does not divide dp {self.dp}.": self.dp % self.fsdp != 0,
            "zero 0 shards nothing, and fsdp says that something is.": not self.zero and self.fsdp > 1,
            f"tp {self.tp} does not divide {HIDDEN}, the width of the drill's network.": HIDDEN % self.tp != 0,
            f"pp {self.pp} is more than the {BLOCKS} blocks of the drill's network.": self.pp > BLOCKS,
            f"dp {self.dp} is more than the {BATCH} samples of the drill's batch.": self.dp > BATCH,
            f"{self.ranks} ranks are more than the {MAX_RANKS} that one machine runs here.": self.ranks > MAX_RANKS,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def degrees_in(text: str, option: str) -> dict[str, int]:
    """Return the degrees that a text like `dp=8,tp=1` names.

    Raises:
        InvalidInputError: It is no such text.
    """
    found: dict[str, int] = {}
    for each in text.split(","):
        name, _, value = each.strip().partition("=")
        if not name or not value.isdecimal() or name in found or (name != "zero" and int(value) < 1):
            raise InvalidInputError(f"{option} has {each!r:.40}, which is no degree.", hint=HINT)
        found[name] = int(value)
    return found
