"""What several drills do: train, damage what was saved, resume, and compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.drills.place import Place, expect
from ckptstore.drills.rows import Row
from ckptstore.errors import IntegrityError

if TYPE_CHECKING:
    from ckptstore.drills.ranks import Ranks

GOES_ON_SECONDS = 20.0
"""How long a trace may take to be written."""

TRAIN = "ckptstore.drills.job:train"
WORLD = 2
MAX_SHARD_BYTES = 1 << 24


def trained(place: Place, *, until: int, world_size: int = WORLD, **options: Any) -> list[dict[str, Any]]:
    """Train on ranks that end well, and return what each tells. A save stands at every second step."""
    with place.ranks(world_size, TRAIN, until=until, **options) as ranks:
        told: list[dict[str, Any]] = ranks.results()
    return told


def shard_of(checkpoint: Checkpoint, place: Place, rank: int) -> str:
    """Return the key of a rank's shard."""
    shards = [info.key for info in place.store().list("data/") if info.key.split("/")[2] == checkpoint.commit.prefix]
    return next(key for key in shards if key.endswith(f"rank-{rank:05d}.safetensors"))


def saved_twice(place: Place) -> tuple[Checkpoint, Checkpoint, str]:
    """Train until two checkpoints stand; return both, the newer one first, and the digest of the older one's state."""
    with place.ranks(WORLD, TRAIN, until=4) as ranks:
        ranks.results()
        digests = {row.step: row.digest for row in rows_of(ranks)}
    newest, before = place.opened().checkpoints()
    return newest, before, digests[before.global_step or 0]


def refused(what: str, act: Callable[[], object]) -> str:
    """Return how an act was refused because of damage.

    Raises:
        NotAsPromised: It was not.
    """
    try:
        act()
    except IntegrityError as error:
        return error.message
    expect(False, f"{what} was not refused.")  # noqa: FBT003  (see `expect`)
    return ""


def resumed_from(place: Place, older: Checkpoint, digest: str) -> dict[str, Any]:
    """Resume on ranks, and check what they have: see `check_resumed`; return what one tells."""
    told = trained(place, until=0, shape={"seed": 7})
    check_resumed(told, older, digest)
    resumed: dict[str, Any] = told[0]["resumed"]
    return resumed


def check_resumed(told: Sequence[Mapping[str, Any]], older: Checkpoint, digest: str) -> None:
    """Check that all ranks have what a checkpoint holds, bit by bit.

    Raises:
        NotAsPromised: One has another one, or other values.
    """
    for rank, resumed in enumerate(each["resumed"] for each in told):
        expect(
            resumed["step"] == older.global_step,
            f"Rank {rank} resumed from step {resumed['step']}, not from {older.global_step}.",
        )
        expect(resumed["digest"] == digest, f"Rank {rank} has other values than were saved at step {resumed['step']}.")


@dataclass(frozen=True, slots=True)
class GoneOn:
    """How a run went on after it was killed.

    Args:
        resumed: What a rank tells of its resume.
        batches: How many were done again, and were the same.
        proof: What the resume says of itself.
    """

    resumed: Mapping[str, Any]
    batches: int
    proof: str | None


def goes_on(place: Place, *, at: tuple[int, int], until: int, **options: Any) -> GoneOn:
    """Save at a step and micro-step, train on, be killed; then resume, and compare what is done again, bit by bit.

    Raises:
        NotAsPromised: Something else was resumed, or what follows differs.
    """
    shape = options.pop("shape", {})
    options |= {"save_at": at, "every_steps": 1000}
    with place.ranks(WORLD, TRAIN, until=until, shape=shape, waits=True, **options) as ranks:
        for rank in range(WORLD):
            ranks.hear("waits", rank=rank)
        control = [row for row in rows_of(ranks) if (row.step, row.micro_step) > at]
        if options.get("proof_steps"):
            _await_trace(place)
        for rank in range(WORLD):
            ranks.kill(rank)
    with place.ranks(WORLD, TRAIN, until=until, shape={**shape, "seed": 5}, **options) as ranks:
        told = ranks.results()[0]
        again = rows_of(ranks)
    for before, after in zip(control, again, strict=False):
        expect(before == after, f"It went on as {after}; before it was killed it was {before}.")
    expect(len(control) == len(again), f"{len(again)} batches were done again, and {len(control)} were before.")
    return GoneOn(told["resumed"], len(again), told["proof"])


def rows_of(ranks: Ranks) -> list[Row]:
    """Return the batches of which the first rank told."""
    return [value for word, value in ranks.said[0] if word == "batch"]


def _await_trace(place: Place) -> None:
    until = time.monotonic() + place.left_seconds(GOES_ON_SECONDS)
    while (latest := place.opened().latest()) is None or latest.trace() is None:
        expect(time.monotonic() < until, "What the run did after the save was not written.")
        time.sleep(0.1)
