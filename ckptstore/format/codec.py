"""Manifest parts: many shards in one small gzip object, columnar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.format.shard import StoredShard


@dataclass(frozen=True, slots=True)
class PartRef:
    """How a commit, or a root part, names a part.

    Args:
        path: Key relative to the run's root, under the commit's own attempt.
        size: Of the gzip object in bytes.
        blake3: Of the gzip object.
        inflated: Size of the JSON in bytes.
        ranks: First and last rank it describes.
        is_root: It lists parts instead of shards.
    """

    path: str
    size: int
    blake3: str
    inflated: int
    ranks: tuple[int, int]
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The shards of a part, and (part 0) DCP's planner data as a JSON value."""

    shards: tuple[StoredShard, ...]
    planner: Any = None


def encode_part(part: Part) -> tuple[bytes, int]:
    """Return the gzip object (the same bytes for the same part, always) and the size of the JSON in it."""
    raise NotImplementedError


def decode_part(body: bytes, ref: PartRef) -> Part:
    """Return the part in `body` after checking size, hash and inflated size, and every number in it.

    Raises:
        IntegrityError: Anything differs, or an item leaves its shard or tensor. Nothing larger than `ref.inflated` is
            ever held.
    """
    raise NotImplementedError


def split(shards: Sequence[StoredShard]) -> list[tuple[StoredShard, ...]]:
    """Return `shards` (by rank) cut into parts of at most 256 shards and 131,072 items (one shard may exceed it)."""
    raise NotImplementedError
