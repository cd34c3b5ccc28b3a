"""`reshard`: a run goes on in another topology; what is seen is the evidence that a matrix asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.drills.degrees import Degrees
from ckptstore.drills.place import NotAsPromised, Place, expect

AT, UNTIL = 3, 6
TOLERANCE = 1e-4
"""Relative: sums of float32 in another order."""
SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Change:
    """From one topology to another.

    Args:
        saved, now: As they were given.
    """

    saved: Mapping[str, int]
    now: Mapping[str, int]


def reshard(place: Place, change: Change) -> str:
    """Save in one topology and resume in the other: every whole tensor is the same, and the losses after it are near.

    Raises:
        NotApplicable: One of them cannot be built.
        NotAsPromised: Something differs.
    """
    before, after = Degrees.read(change.saved), Degrees.read(change.now)
    with place.ranks(
        before.ranks, "ckptstore.drills.reshaped:save_and_go_on", degrees=before, at=AT, until=UNTIL
    ) as ranks:
        control = ranks.results(seconds=SECONDS)
    latest = place.opened().latest()
    expect(latest is not None, "Nothing was committed.")
    verdict = place.opened().verify(latest, level="full")
    expect(verdict.ok, f"What was saved is damaged: {verdict.findings[:1]}")
    with place.ranks(
        after.ranks,
        "ckptstore.drills.reshaped:resume_and_go_on",
        degrees=after,
        saved=before.as_table(),
        until=UNTIL,
    ) as ranks:
        found = ranks.results(seconds=SECONDS)
    tensors = _same(_whole(control, before), _whole(found, after))
    apart = _near(control[0]["losses"], found[0]["losses"])
    return (
        f"{tensors} tensors, weights and moments, are the same bit by bit on {before.ranks} and {after.ranks} ranks; "
        f"the losses of the next {UNTIL - AT} steps differ by {apart:.1e} at most, {TOLERANCE:g} is allowed"
    )


def _whole(told: Sequence[Mapping[str, Any]], degrees: Degrees) -> dict[str, str]:
    """Return the hashes of all stages; ranks that hold the same tensor have the same."""
    whole: dict[str, str] = {}
    for rank, each in enumerate(told):
        for name, digest in each["hashes"].items():
            expect(whole.setdefault(name, digest) == digest, f"Ranks of {degrees} differ in {name}, rank {rank} too.")
    return whole


def _same(control: Mapping[str, str], found: Mapping[str, str]) -> int:
    differ = sorted(name for name in {*control, *found} if control.get(name) != found.get(name))
    if differ:
        raise NotAsPromised(f"{len(differ)} of {len(control)} tensors differ, {', '.join(differ[:3])} among them.")
    return len(control)


def _near(control: Sequence[float], found: Sequence[float]) -> float:
    expect(len(control) == len(found) == UNTIL - AT, f"Losses were {control}, then {found}.")
    apart = [abs(one - other) / max(abs(one), abs(other)) for one, other in zip(control, found, strict=True)]
    near = all(math.isfinite(each) and each <= TOLERANCE for each in apart)
    expect(near, f"Losses after it are {found}; in the topology that saved they were {control}.")
    return max(apart)
