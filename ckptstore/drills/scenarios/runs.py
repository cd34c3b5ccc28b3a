"""What several drills do: train, damage what was saved, resume, and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.drills.place import Place, expect
from ckptstore.errors import IntegrityError

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
    older = trained(place, until=2)[0]["digest"]
    trained(place, until=4, seed=1)
    newest, before = place.opened().checkpoints()
    return newest, before, older


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
    """Resume on ranks, and check that all have what the older checkpoint holds, bit by bit; return what one tells.

    Raises:
        NotAsPromised: One has another one, or other values.
    """
    told: list[dict[str, Any]] = [each["resumed"] for each in trained(place, until=0, seed=7)]
    for rank, resumed in enumerate(told):
        expect(
            resumed["step"] == older.global_step,
            f"Rank {rank} resumed from step {resumed['step']}, not from {older.global_step}.",
        )
        expect(resumed["digest"] == digest, f"Rank {rank} has other values than were saved at step {resumed['step']}.")
    return told[0]
