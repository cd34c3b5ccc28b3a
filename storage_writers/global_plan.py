"""From all ranks' plans to one: who writes what is held more than once, and whether everything is there once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckptstore.errors import DisagreementError, InvalidInputError
from ckptstore.protocol.coverage import tiling_fault

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
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    holders: dict[str, Holders] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            _take(described, holders, rank, item)
    for key, each in described.items():
        if isinstance(each, TensorStorageMetadata):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in each.chunks]
            if (fault := tiling_fault(each.size, boxes)) is not None:
                raise InvalidInputError(
                    f"The ranks do not hold {key} exactly once: {fault}. Nothing was written.",
                    hint="Save from all ranks that hold a piece of it, each its own.",
                    tensor=key,
                )
    if len(plans) > 1:
        plans = _each_once(plans, holders, to_lowest_rank=to_lowest_rank)
    return list(plans), Metadata(described, planner_data=_merged_paths(plans))


def _take(
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata],
    holders: dict[str, Holders],
    rank: int,
    item: WriteItem,
) -> None:
    index, data = item.index, item.tensor_data
    known, of_key = described.get(index.fqn), holders.setdefault(index.fqn, {})
    if known is None:
        known = described[index.fqn] = _VALUE if data is None else TensorStorageMetadata(data.properties, data.size, [])
    if data is None or isinstance(known, BytesStorageMetadata):
        if (data is None) != isinstance(known, BytesStorageMetadata):
            raise _contradicted(rank, item, known)
    elif data.size != known.size or data.properties.dtype is not known.properties.dtype:
        raise _contradicted(rank, item, known)
    before = of_key.get(index.offset)
    if before is None:
        of_key[index.offset] = rank
        if data is not None and isinstance(known, TensorStorageMetadata):
            known.chunks.append(data.chunk)
    elif isinstance(before, int):
        of_key[index.offset] = [before, rank]
    else:
        before.append(rank)


def _contradicted(rank: int, item: WriteItem, known: TensorStorageMetadata | BytesStorageMetadata) -> DisagreementError:
    data = item.tensor_data
    said = "a value" if data is None else f"{data.properties.dtype} {list(data.size)}"
    other = "a value" if isinstance(known, BytesStorageMetadata) else f"{known.properties.dtype} {list(known.size)}"
    return DisagreementError(
        f"{item.index.fqn} is {said} on rank {rank} and {other} on a rank before it. Nothing was written.",
        hint="Give every rank the same state.",
        key=item.index.fqn,
        rank=rank,
    )


def _each_once(plans: Sequence[SavePlan], holders: dict[str, Holders], *, to_lowest_rank: bool) -> list[SavePlan]:
    """Return the plans without what another rank writes."""
    planned_bytes = [0] * len(plans)
    shared: list[WriteItem] = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            held = holders[item.index.fqn][item.index.offset]
            if isinstance(held, int):
                planned_bytes[rank] += _nbytes(item)
            elif held[0] == rank:
                shared.append(item)
    for item in shared:
        of_key = holders[item.index.fqn]
        held = of_key[item.index.offset]
        assert isinstance(held, list)  # noqa: S101  (it was shared above)
        writer = held[0] if to_lowest_rank else min(held, key=planned_bytes.__getitem__)
        of_key[item.index.offset] = writer
        planned_bytes[writer] += _nbytes(item)
    return [
        dataclasses.replace(
            plan, items=[item for item in plan.items if holders[item.index.fqn][item.index.offset] == rank]
        )
        for rank, plan in enumerate(plans)
    ]


def _nbytes(item: WriteItem) -> int:
    """Return what a rank writes for an item; 1 for a value, whose size is not known yet."""
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _merged_paths(plans: Sequence[SavePlan]) -> dict[str, Any]:
    """Return the path of each key; where ranks differ, that of the lowest, as DCP does."""
    paths: dict[str, Any] = {}
    for plan in reversed(plans):
        paths |= plan.planner_data or {}
    return paths
