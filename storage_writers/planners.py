"""The planner of `storage_writers.load`: DCP's default one, leaving the target whole until everything is checked."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from ckptstore.errors import IncompatibleStateError
from storage_writers.given import unwrapped
from storage_writers.packed import index_of
from storage_writers.save_planner import flattened, is_plain


class StrictLoadPlanner(DefaultLoadPlanner):
    """Refuses missing keys and other shapes, all of them at once, and writes values back under keys of any type.

    DCP's default planner sets values that are no tensor, number or text to None before anything was checked, stops at
    the first difference, and adds a value under `"1"` where the target has it under `1`.

    Args:
        allow_missing: Keys that the checkpoint lacks keep what they have; `missing` names them.
    """

    def __init__(self, *, allow_missing: bool = False) -> None:
        super().__init__(allow_partial_load=allow_missing)
        self.missing: tuple[str, ...] = ()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  (DCP's signature)
    ) -> None:
        """Flatten the target without touching it; only tensors on the meta device get memory."""
        self.original_state_dict = unwrapped(state_dict)
        _give_memory(self.original_state_dict)
        self.state_dict, self.mappings = flattened(self.original_state_dict)
        if any(issubclass(kind, ShardedTensor) for kind in set(map(type, self.state_dict.values()))):
            self.state_dict = _flatten_sharded_tensors(self.state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return the plan, after comparing keys, kinds and shapes. `planner_data` holds the target's keys.

        Raises:
            IncompatibleStateError: They differ; all differences of this rank are listed.
        """
        assert self.metadata is not None  # noqa: S101  (DCP has called set_up_planner)
        saved = self.metadata.state_dict_metadata
        self.missing = tuple(key for key in self.state_dict if key not in saved)
        unlike = [
            [key, found, wanted]
            for key, target in self.state_dict.items()
            if key in saved and (found := _described(saved[key])) != (wanted := _described_target(target))
        ]
        if unlike or (self.missing and not self.allow_partial_load):
            unexpected = [key for key in saved if key not in self.state_dict]
            raise _unfit([] if self.allow_partial_load else list(self.missing), unlike, unexpected)
        items: list[ReadItem] = []
        for key, target in self.state_dict.items():
            if (whole := _whole_read(key, target, saved.get(key))) is not None:
                items.append(whole)
            else:
                items += create_default_local_load_plan({key: target}, self.metadata, strict=False).items
        return LoadPlan(items, planner_data=tuple(self.state_dict))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return what an item fills: the target or a part of it."""
        target = self.state_dict[read_item.dest_index.fqn]
        if isinstance(target, torch.Tensor) and is_plain(type(target)) and target.shape == read_item.lengths:
            return target
        return cast("torch.Tensor", super().resolve_tensor(read_item))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where the target has it."""
        path = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for part in path[:-1]:
            container = container[_own_key(container, part)]
        # What comes here was made again by the reader from a restricted result, or the user allowed pickle.
        container[_own_key(container, path[-1])] = torch.load(value, weights_only=False)


def _whole_read(
    key: str, target: object, saved: TensorStorageMetadata | BytesStorageMetadata | None
) -> ReadItem | None:
    """Return the item that reads one stored piece into one whole tensor, as nearly all do; None if it is not so."""
    if not isinstance(target, torch.Tensor) or not isinstance(saved, TensorStorageMetadata) or len(saved.chunks) != 1:
        return None
    (chunk,) = saved.chunks
    if not is_plain(type(target)) or chunk.sizes != saved.size or not target.numel():
        return None
    index = index_of(key, chunk.offsets)
    return ReadItem(LoadItemType.TENSOR, index, chunk.offsets, index, chunk.offsets, chunk.sizes)


def _unfit(missing: list[str], unlike: list[list[str]], unexpected: list[str]) -> IncompatibleStateError:
    said = [f"the checkpoint lacks {', '.join(missing[:8])}"] if missing else []
    said += [f"{key} was saved as {found}, the target is {wanted}" for key, found, wanted in unlike[:8]]
    said += [f"the target lacks {', '.join(unexpected[:8])}"] if unexpected else []
    return IncompatibleStateError(
        f"Target and checkpoint do not fit ({len(missing)} keys missing, {len(unlike)} unlike): {'; '.join(said)}.",
        hint="Give the target the saved keys and shapes"
        + (", or pass allow_missing=True to let keys keep their values." if missing else "."),
        missing=missing[:200],
        unlike=unlike[:200],
        unexpected=unexpected[:200],
        missing_count=len(missing),
    )


def _described(saved: TensorStorageMetadata | BytesStorageMetadata) -> str:
    return "a value" if isinstance(saved, BytesStorageMetadata) else f"a tensor {list(saved.size)}"


def _described_target(target: object) -> str:
    return f"a tensor {list(target.shape)}" if isinstance(target, torch.Tensor) else "a value"


def _own_key(container: Any, part: Any) -> Any:
    """Return the key of `container` that DCP's path, which holds text, means."""
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)


def _give_memory(container: Any) -> None:
    """Replace tensors on the meta device, which DCP allows in a target, by ones with memory."""
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(pairs):
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            container[key] = _with_memory(value)
        elif isinstance(value, dict | list):
            _give_memory(value)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like one on the meta device: on the device of the process group, or the CPU if there is none."""
    if dist.is_available() and dist.is_initialized():
        filled = {"tensor": tensor}
        _init_state_dict(filled)
        return filled["tensor"]
    return torch.empty_like(tensor, device="cpu")
