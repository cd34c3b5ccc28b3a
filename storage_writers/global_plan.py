"""From all ranks' plans to one: who writes what is held more than once, and whether everything is there once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from ckptstore.errors import DisagreementError, InvalidInputError
from ckptstore.protocol.coverage import Box, tiling_fault
from storage_writers.packed import Chunks, Items, PackedItems, PackedPaths, Row, rows_of

Holders = dict[torch.Size | None, int | list[int]]
"""The ranks that hold each chunk of one key, by offsets; None for a value that is no tensor."""

_VALUE = BytesStorageMetadata()


def merged(plans: Sequence[SavePlan], *, to_lowest_rank: bool) -> tuple[list[SavePlan], Metadata]:
    """Return every rank's plan, with each chunk on one rank, and what all of them hold.

    Of several ranks that hold a chunk the one with the fewest bytes so far writes it. Work grows as the items do.

    Args:
        plans: By rank, each of unique items.
        to_lowest_rank: Chunks that several ranks hold are written by the lowest of them.

    Raises:
        DisagreementError: Ranks say different things of one key.
        InvalidInputError: The chunks of a tensor do not cover it exactly once.
    """
    held = _Held()
    for rank, plan in enumerate(plans):
        for row in rows_of(plan.items):
            held.take(rank, row)
    for key, each in held.described.items():
        if isinstance(each, TensorStorageMetadata) and (fault := tiling_fault(each.size, boxes_of(each))) is not None:
            raise InvalidInputError(
                f"The ranks do not hold {key} exactly once: {fault}. Nothing was written.",
                hint="Save from all ranks that hold a piece of it, each its own.",
                tensor=key,
            )
    paths = _merged_paths(plans)
    if len(plans) > 1 or any(isinstance(plan.planner_data, PackedPaths) for plan in plans):
        plans = _each_once(plans, held.holders, to_lowest_rank=to_lowest_rank)
    return list(plans), Metadata(held.described, planner_data=paths)


class _Held:
    """What is held, and by whom."""

    def __init__(self) -> None:
        self.described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self.holders: dict[str, Holders] = {}
        # How long the chunks are: of a key nearly all are as long as the first.
        self._usual: dict[str, torch.Size | None] = {}
        self._odd: dict[tuple[str, torch.Size | None], torch.Size | None] = {}

    def take(self, rank: int, row: Row) -> None:
        """Add an item of a rank's.

        Raises:
            DisagreementError: Of its key, or of the chunk that begins where it does, another rank says something else.
        """
        key, _, offset, lengths, size, properties = row
        known = self.described.get(key)
        if known is None:
            known = self.described[key] = (
                _VALUE
                if size is None or properties is None
                else TensorStorageMetadata(properties, size, cast("Any", Chunks(len(size))))
            )
            self.holders[key] = {}
            self._usual[key] = lengths
        if isinstance(known, BytesStorageMetadata):
            agrees = size is None
        else:
            agrees = properties is not None and size == known.size and properties.dtype is known.properties.dtype
        if not agrees:
            raise _contradicted(rank, row, known)
        before = self.holders[key].get(offset)
        if before is None:
            self.holders[key][offset] = rank
            if lengths != self._usual[key]:
                self._odd[key, offset] = lengths
            if isinstance(known, TensorStorageMetadata):
                cast("Any", known.chunks).append(offset, lengths)
            return
        if lengths != (there := self._odd.get((key, offset), self._usual[key])):
            raise _cut_otherwise(rank, row, before if isinstance(before, int) else before[0], there)
        if isinstance(before, int):
            self.holders[key][offset] = [before, rank]
        else:
            before.append(rank)


def _contradicted(rank: int, row: Row, known: TensorStorageMetadata | BytesStorageMetadata) -> DisagreementError:
    said = "a value" if row.size is None or row.properties is None else f"{row.properties.dtype} {list(row.size)}"
    other = "a value" if isinstance(known, BytesStorageMetadata) else f"{known.properties.dtype} {list(known.size)}"
    return DisagreementError(
        f"{row.key} is {said} on rank {rank} and {other} on a rank before it. Nothing was written.",
        hint="Give every rank the same state.",
        key=row.key,
        rank=rank,
    )


def _cut_otherwise(rank: int, row: Row, other: int, lengths: torch.Size | None) -> DisagreementError:
    return DisagreementError(
        f"The piece of {row.key} at {list(row.offset or ())} has the lengths {list(row.lengths or ())} on rank {rank} "
        f"and {list(lengths or ())} on rank {other}. Nothing was written.",
        hint="Shard the tensor in the same way on every rank.",
        key=row.key,
        ranks=[other, rank],
    )


def _each_once(plans: Sequence[SavePlan], holders: dict[str, Holders], *, to_lowest_rank: bool) -> list[SavePlan]:
    """Return the plans without what another rank writes, and without the paths: the coordinator has them."""
    planned_bytes = [0] * len(plans)
    shared: list[Row] = []
    for rank, plan in enumerate(plans):
        for row in rows_of(plan.items):
            held = holders[row.key][row.offset]
            if isinstance(held, int):
                planned_bytes[rank] += _nbytes(row)
            elif held[0] == rank:
                shared.append(row)
    for row in shared:
        held = holders[row.key][row.offset]
        assert isinstance(held, list)  # noqa: S101  (it was shared above)
        writer = held[0] if to_lowest_rank else min(held, key=planned_bytes.__getitem__)
        holders[row.key][row.offset] = writer
        planned_bytes[writer] += _nbytes(row)
    return [_kept_by(rank, plan, holders) for rank, plan in enumerate(plans)]


def _kept_by(rank: int, plan: SavePlan, holders: dict[str, Holders]) -> SavePlan:
    kept = [index for index, row in enumerate(rows_of(plan.items)) if holders[row.key][row.offset] == rank]
    items: Any = plan.items
    items = items.chosen(kept) if isinstance(items, PackedItems) else Items(items[index] for index in kept)
    return dataclasses.replace(plan, items=items, planner_data=None)


def _nbytes(row: Row) -> int:
    """Return what a rank writes for an item; 1 for a value, whose size is not known yet."""
    known = row.lengths is not None and row.properties is not None
    return math.prod(row.lengths) * row.properties.dtype.itemsize if known else 1  # type: ignore[union-attr,arg-type]


def _merged_paths(plans: Sequence[SavePlan]) -> dict[str, Any]:
    """Return the path of each key; where ranks differ, that of the lowest, as DCP does."""
    paths: dict[str, Any] = {}
    for plan in reversed(plans):
        if isinstance(plan.planner_data, PackedPaths):
            plan.planner_data.add_to(paths)
        else:
            paths |= plan.planner_data or {}
    return paths


def boxes_of(tensor: TensorStorageMetadata) -> list[Box]:
    """Return offsets and lengths of a tensor's chunks, whoever planned it."""
    chunks: Any = tensor.chunks
    return [*chunks.boxes()] if isinstance(chunks, Chunks) else [(chunk.offsets, chunk.sizes) for chunk in chunks]
