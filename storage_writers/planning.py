"""From DCP's plans to chunks: what a rank will write, checked before the first byte leaves it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.format.layout import Stem, encode_name
from ckptstore.format.shard import Chunk, TensorMeta, lay_out
from ckptstore.format.values import CODEC
from storage_writers import pickles, tensors
from storage_writers.staged import COPY_SECONDS, Staged
from storage_writers.typed import TypedValue

TORCH_SAVE = "torch.save"

_KNOWN = ("torch.distributed.checkpoint.", "storage_writers.")

_STEP_NAME = re.compile(r"step[-_]([0-9]{1,15})")


@dataclass(frozen=True)
class Ticket:
    """What the coordinator puts into every rank's plan: which save it is, and where this rank's shard goes."""

    save_id: str
    rank: int
    stem: Stem


def name_and_step(checkpoint_id: str | os.PathLike[str] | None, global_step: int | None) -> tuple[str, int | None]:
    """Return a checkpoint's name and step: each may be left out if the other tells it.

    Raises:
        InvalidInputError: There is neither a name nor a step, the name cannot be used, or it says another step.
    """
    if checkpoint_id is None:
        if global_step is None:
            raise InvalidInputError(
                "This save has no name.",
                hint="Pass checkpoint_id='step-12000', or call writer.describe(global_step=12000) first.",
            )
        return f"step-{global_step}", global_step
    name = plain_name(checkpoint_id)
    encode_name(name)
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return name, global_step
    named = int(match[1])
    if global_step not in (None, named):
        raise InvalidInputError(
            f"The name {name!r} says step {named}, and describe() says global_step={global_step}.",
            hint=f"Call writer.describe(global_step={named}), leave it out, or pass a name that says no step.",
            checkpoint_id=name,
            global_step=global_step,
        )
    return name, named


def plain_name(checkpoint_id: str | os.PathLike[str]) -> str:
    """Return a name as text; what is neither text nor a path is left to whoever checks names."""
    return os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id


def check_plans(plans: Sequence[SavePlan], world_size: int) -> None:
    """Check that the plans of all ranks came, and hold something.

    Raises:
        InvalidInputError: There is nothing to save, or DCP saves with other ranks than the writer.
        UnsupportedError: A plan is a reference to a cached one.
    """
    if len(plans) != world_size:
        raise InvalidInputError(
            f"{len(plans)} ranks save, this writer's group has {world_size}.",
            hint="Pass one process_group to dcp.save and to CkptStoreWriter.",
        )
    if not all(plan.usable for plan in plans):
        raise UnsupportedError("A rank's plan refers to a cached one.", hint="Pass enable_plan_caching=False.")
    if not any(plan.items for plan in plans):
        raise InvalidInputError("The state is empty on all ranks.", hint="Pass the state to save.")


def check_items(items: Sequence[WriteItem]) -> None:
    """Check that every tensor in a plan can be stored as bytes.

    Raises:
        UnsupportedError: A dtype or a layout cannot; key and dtype are named.
    """
    for item in items:
        if item.tensor_data is None:
            continue
        properties, key = item.tensor_data.properties, item.index.fqn
        tensors.dtype_name(properties.dtype, key=key)
        if properties.layout is not torch.strided:
            raise UnsupportedError(
                f"{key} has the layout {properties.layout}; only dense tensors are stored.",
                hint="Save it as dense, or its indices and values as tensors of their own.",
                key=key,
                layout=str(properties.layout),
            )


def check_caching(planner: SavePlanner, plan: SavePlan) -> None:
    """Refuse planners that hand over the plan of an earlier save.

    Raises:
        UnsupportedError: Plan caching is on, or the plan is a reference to a cached one.
    """
    if getattr(planner, "_enable_plan_caching", False) or not plan.usable:
        raise UnsupportedError(
            "The planner caches plans: a later save would be written with an earlier save's plan.",
            hint="Pass enable_plan_caching=False to the planner.",
        )


class Contents:
    """One rank's items: how they stand in its shard now, their bytes when asked for.

    Values that are not tensors are resolved here and kept, because their size must be known first; they are small.

    Args:
        plan: This rank's final plan.
        planner: Resolves its items.
        allow_pickle: Values that only unrestricted pickle can read are stored, and marked.
        staged: Where the state is staged, in a background save: tensors may still be on their way.

    Raises:
        UnsafePickleError: A value needs pickle and that is not allowed.
        UnsupportedError: A value cannot be pickled at all.
        InvalidInputError: No shard can hold them; see `lay_out`.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool, staged: Staged | None = None
    ) -> None:
        self._items = plan.items
        self._planner = planner
        self._staged = staged
        self._bytes: dict[int, bytes] = {}
        as_they_are = _hands_out_as_they_are(planner)
        self.lasting = staged is None and as_they_are
        """Whether pieces stay what they are while they are referred to: a pool, or a planner, uses its memory again."""
        if staged is not None and not as_they_are:  # it may compute what it hands out from any tensor
            staged.wait_copied(seconds=COPY_SECONDS)
        chunks = []
        for index, item in enumerate(plan.items):
            if item.type is WriteItemType.BYTE_IO:
                chunks.append(self._bytes_chunk(index, item, allow_pickle=allow_pickle))
            else:
                chunks.append(_tensor_chunk(item))
        self.layout = lay_out(chunks)
        """Of the shard that they make."""
        self._left = len(plan.items) - len(self._bytes)
        self._tensors: dict[int, torch.Tensor] = {}
        if staged is None:
            return
        if as_they_are and not staged.is_whole:
            self._tensors = {index: self._tensor(index) for index in self.layout.order if index not in self._bytes}
            staged.expect([(plan.items[index].index.fqn, tensor) for index, tensor in self._tensors.items()])
        elif not self._left:
            staged.all_read()

    def _bytes_chunk(self, index: int, item: WriteItem, *, allow_pickle: bool) -> Chunk:
        key = item.index.fqn
        held = getattr(self._planner, "state_dict", None)
        value = held.get(key) if isinstance(held, dict) else None
        if isinstance(value, TypedValue):
            data, codec, pickled = value.body, CODEC, False
        else:
            if self._staged is not None and isinstance(held, dict) and isinstance(value, Mapping | list):
                held[key] = self._staged.taken_out(value)
            data, codec = pickles.saved_bytes(lambda: self._planner.resolve_data(item), key=key), TORCH_SAVE
            pickled = pickles.check(data, key=key, allow_pickle=allow_pickle)
        self._bytes[index] = data
        meta = TensorMeta(key, "bytes", (len(data),))
        return Chunk(meta, (0,), (len(data),), len(data), codec=codec, pickled=pickled)

    def pieces(self, index: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of item `index`.

        Raises:
            InvalidInputError: The planner gave another dtype or shape than it had planned, or a tensor without memory.
            UnavailableError: The tensor could not be copied into host memory.
        """
        if index in self._bytes:
            yield self._bytes[index]
            return
        tensor = self._tensors.pop(index) if index in self._tensors else self._tensor(index)
        if self._staged is None:
            yield from tensors.lasting_pieces(tensor)
            return
        yield from self._staged.pieces(tensor)
        self._left -= 1
        if not self._left:
            self._staged.all_read()

    def _tensor(self, index: int) -> torch.Tensor:
        """Return the tensor of item `index`, which must be what was planned."""
        item = self._items[index]
        assert item.tensor_data is not None  # noqa: S101  (only bytes items have none)
        tensor = self._planner.resolve_data(item)
        planned = (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.shape) != planned or tensor.is_meta:
            found = (
                f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                if isinstance(tensor, torch.Tensor)
                else tensor
            )
            raise InvalidInputError(
                f"{item.index.fqn} was planned as {planned[0]} {list(planned[1])} and is now {found}.",
                hint="The state must not change during a save, and must have memory.",
                key=item.index.fqn,
            )
        tensors.check_source(tensor, key=item.index.fqn)
        return tensor


def _hands_out_as_they_are(planner: SavePlanner) -> bool:
    """Return whether a planner gives the tensors of the state themselves, because its methods are DCP's or ours."""
    ways = (getattr(planner, name, None) for name in ("resolve_data", "lookup_object", "transform_object"))
    return all(getattr(way, "__module__", "").startswith(_KNOWN) for way in ways)


def _tensor_chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    assert data is not None  # noqa: S101  (only bytes items have none)
    dtype = data.properties.dtype
    meta = TensorMeta(item.index.fqn, tensors.dtype_name(dtype, key=item.index.fqn), tuple(data.size))
    lengths = tuple(data.chunk.sizes)
    return Chunk(meta, tuple(data.chunk.offsets), lengths, math.prod(lengths) * dtype.itemsize)
