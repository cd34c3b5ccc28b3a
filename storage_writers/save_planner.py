"""The planner of `storage_writers.save`: DCP's default one, made for many tensors and for saves that repeat."""

from __future__ import annotations

import io
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptstore.errors import InvalidInputError
from storage_writers.given import unwrapped
from storage_writers.global_plan import merged
from storage_writers.packed import Items, Path, Paths, index_of

MAX_KEPT = 2
"""States whose local plans a process keeps: two models that are saved in turn. About 200 bytes for each item."""

Structure = tuple[Hashable, ...]


class SavePlanner(DefaultSavePlanner):
    """Plans as `DefaultSavePlanner` does, in a fraction of the time, and refuses a state in which ranks contradict.

    The items of a rank's plan are made once and used again as long as the structure of its state is the same: keys,
    kinds, dtypes, shapes and the layout of each `DTensor`. Values may change. What a save adds to a plan (the attempt,
    where the shard goes) is never kept, and DCP's own plan caching stays off: it hands one save the plan of another.

    Picklable, and carries nothing of the state then. One object may be used for many saves, one after the other.

    Args:
        dedup_save_to_lowest_rank: The lowest rank of those that hold the same writes it, not the one with least to do.
    """

    def __init__(self, *, dedup_save_to_lowest_rank: bool = False) -> None:
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)
        self.state_dict: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: Any = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  (DCP's signature)
    ) -> None:
        """Flatten the state, under the same keys as DCP does.

        Raises:
            InvalidInputError: Two values have one key.
        """
        del storage_meta
        self.state_dict, self.mappings = flattened(unwrapped(state_dict))
        if any(issubclass(kind, ShardedTensor) for kind in set(map(type, self.state_dict.values()))):
            self.state_dict = _flatten_sharded_tensors(self.state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return what this rank holds."""
        structure = structure_of(self.state_dict)
        items = None if structure is None else _kept.get(structure)
        if items is None:
            items = _items_of(self.state_dict)
            if structure is not None:
                _kept.keep(structure, items)
        self.plan = SavePlan(Items(items), planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return every rank's plan, with each chunk on one rank, and what all of them hold. See `global_plan.merged`.

        Raises:
            DisagreementError: Ranks say different things of one key.
            InvalidInputError: The chunks of a tensor do not cover it exactly once.
        """
        self.global_plan, self.metadata = merged(all_plans, to_lowest_rank=self.dedup_save_to_lowest_rank)
        return self.global_plan, self.metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the bytes of a value, or the tensor that an item stands for."""
        if write_item.type is WriteItemType.TENSOR:
            data = self.transform_object(write_item, self.state_dict[write_item.index.fqn])
        else:
            data = super().resolve_data(write_item)
        return cast("torch.Tensor | io.BytesIO", data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "state_dict": {}, "mappings": {}, "plan": None, "global_plan": None, "metadata": None}


class _Kept:
    """The items of the plans made last, by structure. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[Structure, tuple[WriteItem, ...]] = OrderedDict()

    def get(self, structure: Structure) -> tuple[WriteItem, ...] | None:
        with self._lock:
            items = self._items.get(structure)
            if items is not None:
                self._items.move_to_end(structure)
            return items

    def keep(self, structure: Structure, items: tuple[WriteItem, ...]) -> None:
        with self._lock:
            self._items[structure] = items
            while len(self._items) > MAX_KEPT:
                self._items.popitem(last=False)


_kept = _Kept()


def flattened(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], Paths]:
    """Return what DCP's `flatten_state_dict` does: values by key, and the path of each.

    Raises:
        InvalidInputError: Two values have one key.
    """
    flat: dict[str, Any] = {}
    paths = Paths()

    def put(key: str, path: Path, value: Any) -> None:
        if key in flat:
            raise InvalidInputError(
                f"Two values of the state have the key {key}.",
                hint="Rename one: a dot in a name and a level of nesting look the same.",
                key=key,
            )
        key = sys.intern(key)  # one text in each save's plan
        flat[key], paths[key] = value, path

    def visit(container: Mapping[Any, Any], prefix: str, above: Path) -> None:
        for name, value in container.items():
            key, path = prefix + str(name), (*above, str(name))
            if isinstance(value, torch.Tensor) or not isinstance(value, Mapping | list):
                put(key, path, value)
            elif isinstance(value, Mapping):
                visit(value, key + ".", path)
            else:  # whether a list is one value is DCP's to say
                values, inner = flatten_state_dict({str(name): value})
                for own, each in values.items():
                    put(prefix + own, (*above, *inner[own]), each)

    visit(state_dict, "", ())
    return flat, paths


def structure_of(flat: Mapping[str, Any]) -> Structure | None:
    """Return all that the local plan of a flat state depends on; None if that is not known of some kind of tensor."""
    found: list[Hashable] = []
    meshes: dict[int, Hashable] = {}
    for key, value in flat.items():
        if not isinstance(value, torch.Tensor):
            found.append(key)
        elif is_plain(type(value)):
            found.append((key, value.dtype, value.shape, value.layout, value.requires_grad))
        elif type(value) is DTensor and type(value._local_tensor) is torch.Tensor:  # noqa: SLF001  (to_local is autograd's)
            local, mesh = value._local_tensor, value.device_mesh  # noqa: SLF001
            at = meshes.get(id(mesh)) or meshes.setdefault(id(mesh), _place_in(mesh))
            whole = (value.dtype, value.shape, value.requires_grad, value.placements)
            found.append((key, *whole, local.shape, local.layout, at))
        else:
            return None
    return tuple(found)


def _place_in(mesh: DeviceMesh) -> Hashable:
    where = mesh.get_coordinate()
    return (
        mesh.device_type,
        tuple(mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        None if where is None else tuple(where),
    )


def is_plain(kind: type) -> bool:
    """Say whether DCP plans tensors of this class as one whole piece."""
    known = _plain.get(kind)
    if known is None:
        known = _plain[kind] = not (hasattr(kind, "__create_write_items__") or issubclass(kind, ShardedTensor))
    return known


_plain: dict[type, bool] = {}


def _items_of(flat: Mapping[str, Any]) -> tuple[WriteItem, ...]:
    parts = Parts()
    items: list[WriteItem] = []
    for key, value in flat.items():
        if isinstance(value, torch.Tensor) and is_plain(type(value)):
            data = parts.whole(value)
            items.append(WriteItem(index_of(key, data.chunk.offsets), WriteItemType.TENSOR, tensor_data=data))
        elif not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
            items += map(parts.item, _create_write_items(key, value))
    return tuple(items)


class Parts:
    """Equal parts of items become one object, so that a plan is smaller in memory and on its way to the coordinator."""

    def __init__(self) -> None:
        self._sizes: dict[torch.Size, torch.Size] = {}
        self._properties: dict[tuple[object, ...], TensorProperties] = {}
        self._whole: dict[tuple[object, ...], TensorWriteData] = {}

    def whole(self, tensor: torch.Tensor) -> TensorWriteData:
        """Return what is written of a tensor that is one piece."""
        key = (tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad)
        known = self._whole.get(key)
        if known is None:
            size = self.size(tensor.shape)
            chunk = ChunkStorageMetadata(self.size(torch.Size([0] * len(size))), size)
            known = self._whole[key] = TensorWriteData(chunk, self.properties(tensor), size)
        return known

    def size(self, size: torch.Size) -> torch.Size:
        """Return the same size, once."""
        return self._sizes.setdefault(size, size)

    def properties(self, of: torch.Tensor | TensorProperties) -> TensorProperties:
        """Return what DCP records, without asking whether memory is pinned: nobody reads it, and a driver answers."""
        key = (of.dtype, of.layout, of.requires_grad)
        return self._properties.get(key) or self._properties.setdefault(key, TensorProperties(*key))

    def item(self, item: WriteItem) -> WriteItem:
        """Return the same item, made of parts that others have too."""
        data = item.tensor_data
        if data is None:
            return item
        offset = self.size(data.chunk.offsets)
        chunk = ChunkStorageMetadata(offset, self.size(data.chunk.sizes))
        data = TensorWriteData(chunk, self.properties(data.properties), self.size(data.size))
        return WriteItem(index_of(item.index.fqn, offset), item.type, tensor_data=data)
