"""Which checkpoints may not be retired, and why (I14): what the log goes by, and what people are told. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptstore.protocol.fold import Fold

MIN_KEEP = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that may not be retired.

    Args:
        seq: Of its commit.
        name: `name@seq`.
        why: For people.
        holders: Of its pins, if these are why.
    """

    seq: int
    name: str
    why: str
    holders: tuple[str, ...] = ()


def refusals(fold: Fold, seqs: Iterable[int]) -> list[Refusal]:
    """Return which of these checkpoints may not be retired together, by seq; none if all may.

    What stays must be enough to go on from, and nothing goes that somebody relies on.
    """
    refused: list[Refusal] = []
    targets, newest, newest_verified = {*seqs}, fold.newest, fold.newest_verified
    for seq in sorted(targets):
        each = fold.commits.get(seq)
        if each is None:
            refused.append(Refusal(seq, f"slot {seq}", "it holds no kept checkpoint"))
        elif each == newest:
            refused.append(Refusal(seq, each.exact_name, "it is the newest checkpoint"))
        elif each == newest_verified:
            refused.append(Refusal(seq, each.exact_name, "it is the newest verified at level full"))
        elif each.pins:
            holders = tuple(pin.holder for pin in each.pins)
            refused.append(Refusal(seq, each.exact_name, f"it is pinned by {', '.join(holders)}", holders))
    stay = [each.seq for each in fold.selectable if each.seq not in targets]
    if not refused and len(stay) < MIN_KEEP:
        going = [each for each in fold.selectable if each.seq in targets][len(stay) - MIN_KEEP :]
        why = f"fewer than {MIN_KEEP} would be left"
        refused += [Refusal(each.seq, each.exact_name, why) for each in going]
    return refused
