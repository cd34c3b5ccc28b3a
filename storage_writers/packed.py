"""Plans and what they say as columns: on their way between ranks, and on the coordinator, which holds those of all.

A rank's plan is a list of DCP's items. Pickled, it becomes columns, and stays so on the coordinator: an item of DCP's
takes 1 KB, five values in columns take 40 bytes. Whoever asks for an item gets it, made then.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Path = tuple[str | int, ...]


class Row(NamedTuple):
    """An item: its key and, of a tensor, where its piece begins, how long that is, the whole size, the properties."""

    key: str
    kind: WriteItemType
    offset: torch.Size | None
    lengths: torch.Size | None
    size: torch.Size | None
    properties: TensorProperties | None


def row_of(item: WriteItem) -> Row:
    """Return an item as a row."""
    data = item.tensor_data
    if data is None:
        return Row(item.index.fqn, item.type, item.index.offset, None, None, None)
    return Row(item.index.fqn, item.type, item.index.offset, data.chunk.sizes, data.size, data.properties)


def index_of(key: str, offset: torch.Size | None) -> MetadataIndex:
    """Return an index that has this very offset, which its constructor would copy."""
    index = MetadataIndex(key)
    object.__setattr__(index, "offset", offset)
    return index


def rows_of(items: Sequence[WriteItem]) -> Iterator[Row]:
    """Yield the items of a plan as rows."""
    return items.rows() if isinstance(items, PackedItems) else map(row_of, items)


class Items(list[WriteItem]):
    """The items of a local plan; `PackedItems` once it has been pickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return PackedItems, tuple(zip(*map(row_of, self), strict=True))


class PackedItems(Sequence[WriteItem]):
    """Items in columns, each made when somebody asks for it.

    Args:
        columns: Those of `Row`; none at all for no items.
    """

    def __init__(self, *columns: tuple[Any, ...]) -> None:
        if columns:
            columns = (tuple(map(sys.intern, columns[0])), *columns[1:])  # the same keys on all ranks
        self._columns = columns
        self._made: list[WriteItem] | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return PackedItems, self._columns

    def __len__(self) -> int:
        return len(self._columns[0]) if self._columns else 0

    def rows(self) -> Iterator[Row]:
        """Yield them as rows."""
        return map(Row._make, zip(*self._columns, strict=True))

    def chosen(self, indices: Sequence[int]) -> PackedItems:
        """Return the items at `indices`."""
        if len(indices) == len(self):
            return self
        return PackedItems(*(tuple(column[index] for index in indices) for column in self._columns if indices))

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        return self._all()[index]

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == [*other]

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> list[WriteItem]:
        if self._made is None:
            self._made = [_item(*row) for row in self.rows()]
        return self._made


def _item(
    key: str,
    kind: WriteItemType,
    offset: torch.Size | None,
    lengths: torch.Size | None,
    size: torch.Size | None,
    properties: TensorProperties | None,
) -> WriteItem:
    index = index_of(key, offset)
    if offset is None or lengths is None or size is None or properties is None:
        return WriteItem(index, kind)
    return WriteItem(index, kind, tensor_data=TensorWriteData(ChunkStorageMetadata(offset, lengths), properties, size))


class Paths(dict[str, Path]):
    """Where each key of a state stands in it; `PackedPaths` once it has been pickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        odd = {key: path for key, path in self.items() if path != tuple(key.split("."))}
        return PackedPaths, (tuple(self), odd)


class PackedPaths:
    """Keys, and the paths of those that are not the key cut at its dots: numbers in lists, dots in names.

    Args:
        keys: All of them.
        odd: The paths of those.
    """

    def __init__(self, keys: tuple[str, ...], odd: Mapping[str, Path]) -> None:
        self._keys, self._odd = tuple(map(sys.intern, keys)), odd

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return PackedPaths, (self._keys, self._odd)

    def add_to(self, paths: dict[str, Path]) -> None:
        """Put the paths into `paths`, over what is there."""
        for key in self._keys:
            if key not in paths or key in self._odd or paths[key] != tuple(key.split(".")):
                paths[key] = self._odd.get(key) or tuple(key.split("."))


class Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor, in arrays. Append only."""

    def __init__(self, dimensions: int, offsets: bytes = b"", lengths: bytes = b"", count: int = 0) -> None:
        self._dimensions, self._count = dimensions, count
        self._offsets, self._lengths = array("q", offsets), array("q", lengths)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return Chunks, (self._dimensions, self._offsets.tobytes(), self._lengths.tobytes(), self._count)

    def append(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Add one."""
        self._offsets.extend(offsets)
        self._lengths.extend(lengths)
        self._count += 1

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield offsets and lengths."""
        return map(self._box, range(self._count))

    def _box(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        at = slice(index * self._dimensions, (index + 1) * self._dimensions)
        return tuple(self._offsets[at]), tuple(self._lengths[at])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        offsets, lengths = self._box(range(self._count)[index])
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])
