"""How a verification is shared out: `--subset`, `--memory`, `--threads`, and the processes that torchrun starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from ckptstore.cli.documents import Document
from ckptstore.errors import InvalidInputError
from ckptstore.format.shard import MAX_LEAF_BYTES
from ckptstore.options import TransferOptions
from ckptstore.protocol.shares import Share
from ckptstore.units import GIB, KIB, MIB

Subset = Annotated[
    str | None,
    typer.Option(
        "--subset",
        metavar="K/N",
        help="Only the K-th of N shares of the objects: N runs, one with each K, cover every object exactly once.",
    ),
]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Hold so many bytes on their way at most: 64M, 1G.")
]
Threads = Annotated[int, typer.Option("--threads", metavar="N", help="Read and hash with so many threads.")]

_SIZE = re.compile(r"([0-9]{1,9})\s?(K|M|G|)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}
_SUBSET = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class Shared:
    """What this process takes.

    Args:
        share: Its objects.
        subset: What was asked for, or None.
        rank: Which process of `ranks` it is, from 0.
        ranks: How many there are.
    """

    share: Share
    subset: str | None
    rank: int
    ranks: int

    @property
    def said(self) -> str:
        """What it takes, for people; empty if that is everything."""
        subset = f"subset {self.subset}" if self.subset else ""
        return ", ".join(filter(None, (subset, f"process {self.rank} of {self.ranks}" if self.ranks > 1 else "")))

    @property
    def document(self) -> Document:
        """What it takes, for `--json`."""
        whole = self.share.is_whole
        return {"subset": self.subset, "rank": self.rank, "ranks": self.ranks, "complete": whole}


def shared_out(subset: str | None, environment: Mapping[str, str] | None = None) -> Shared:
    """Return what this process takes of `subset`, by RANK and WORLD_SIZE if they say that there are several.

    Raises:
        InvalidInputError: The subset is not K/N, or RANK and WORLD_SIZE contradict each other.
    """
    environment = os.environ if environment is None else environment
    match = _SUBSET.fullmatch(subset) if subset is not None else None
    if subset is not None and match is None:
        raise InvalidInputError(f"{subset!r:.80} is no subset.", hint="Write K/N, such as 3/7.")
    asked = Share(int(match[1]), int(match[2])) if match else Share()
    said = {name: environment.get(name) for name in ("RANK", "WORLD_SIZE")}
    if said["WORLD_SIZE"] in (None, "", "1"):
        return Shared(asked, subset, 0, 1)
    numbers = {name: int(text) for name, text in said.items() if text is not None and re.fullmatch("[0-9]{1,6}", text)}
    if len(numbers) < len(said):
        raise InvalidInputError(
            f"The environment says RANK={said['RANK']!r:.40} and WORLD_SIZE={said['WORLD_SIZE']!r:.40}.",
            hint="Set both to whole numbers, as torchrun does, or unset both.",
        )
    rank, ranks = numbers["RANK"], numbers["WORLD_SIZE"]
    return Shared(asked.split(rank, ranks), subset, rank, ranks)


def transfer_of(*, memory: str, threads: int) -> TransferOptions:
    """Return the transfer options of a verification.

    Raises:
        InvalidInputError: One of the two is nothing that can be.
    """
    match = _SIZE.fullmatch(memory)
    if match is None:
        raise InvalidInputError(f"{memory!r:.80} is no size.", hint="Write 64M or 1G.")
    if not 1 <= threads <= _MAX_THREADS:
        raise InvalidInputError(f"{threads} threads are none.", hint=f"Take 1 to {_MAX_THREADS} threads.")
    budget = int(match[1]) * _UNITS[match[2].upper()]
    usual = TransferOptions()
    fetch_bytes = max(1, min(usual.fetch_bytes, max(MAX_LEAF_BYTES, budget // threads)))
    return TransferOptions(fetches_in_flight=threads, transfer_bytes=budget, fetch_bytes=fetch_bytes)
