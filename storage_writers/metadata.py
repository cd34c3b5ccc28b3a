"""DCP's `Metadata` and the manifest parts: one is rebuilt from the other, without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptstore.errors import IncompatibleStateError, IntegrityError, UnsupportedError
from ckptstore.format.codec import Part
from ckptstore.format.dtypes import BYTES
from ckptstore.format.shard import Shard, StoredItem, StoredShard
from storage_writers import tensors
from storage_writers.global_plan import boxes_of

Place = tuple[str, tuple[int, ...]]
"""A chunk by its key and offsets; the offsets of a value that is no tensor are `(0,)`."""
Planned = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]
"""What a chunk is to be: its dtype, the tensor's shape, its own."""

_properties: dict[torch.dtype, TensorProperties] = {}
"""Of the dtypes that were loaded: nobody changes them."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, as DCP sees it, and where each chunk lies."""

    metadata: Metadata
    places: dict[Place, tuple[Shard, StoredItem]] = field(default_factory=dict)

    def find(self, index: MetadataIndex) -> tuple[Shard, StoredItem]:
        """Return where the chunk that DCP asks for lies."""
        offsets = (0,) if index.offset is None else tuple(index.offset)
        try:
            return self.places[index.fqn, offsets]
        except KeyError:
            raise IncompatibleStateError(
                f"The checkpoint has no chunk of {index.fqn} at {offsets}.", hint="Run `ckptstore tree URL`."
            ) from None


def contents_of(parts: Sequence[Part], *, only: tuple[str, ...] | None) -> Contents:
    """Return what `parts` describe, or of it what lies under the prefixes `only`.

    Raises:
        IncompatibleStateError: `only` selects nothing.
        IntegrityError: The planner data are not what a writer wrote.
        UnsupportedError: This torch lacks a dtype.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[Place, tuple[Shard, StoredItem]] = {}
    components: set[str] = set()
    for stored in (stored for part in parts for stored in part.shards):
        for item in stored.items:
            key = item.chunk.tensor.name
            components.add(key.split(".", 1)[0])
            if only is None or _under(key, only):
                _describe(described, item)
                places[key, item.chunk.offsets] = (stored.shard, item)
    if only is not None and not described:
        raise IncompatibleStateError(
            f"The checkpoint has nothing under {', '.join(map(repr, only))}.",
            hint=f"It has: {', '.join(sorted(components)[:20])}.",
            only=only,
            components=sorted(components)[:100],
        )
    planner = decode_planner(parts[0].planner) if parts else None
    if isinstance(planner, dict):
        planner = {key: path for key, path in planner.items() if key in described}
    return Contents(Metadata(described, planner_data=planner), places)


def _under(key: str, only: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in only)


def _describe(described: dict[str, TensorStorageMetadata | BytesStorageMetadata], item: StoredItem) -> None:
    chunk, tensor = item.chunk, item.chunk.tensor
    if tensor.dtype == BYTES:
        described[tensor.name] = BytesStorageMetadata()
        return
    known = described.get(tensor.name)
    if known is None:
        dtype = tensors.dtype_of(tensor.dtype, key=tensor.name)
        properties = _properties.get(dtype) or _properties.setdefault(dtype, TensorProperties(dtype))
        known = described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), [])
    if not isinstance(known, TensorStorageMetadata):
        raise IntegrityError(f"{tensor.name} is a tensor here and a value there.", hint="Run `ckptstore verify URL`.")
    lengths = known.size if chunk.lengths == tensor.shape else torch.Size(chunk.lengths)
    known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), lengths))


def check_written(metadata: Metadata, shards: Iterable[StoredShard]) -> None:
    """Check that what the ranks wrote is exactly what was planned: every chunk once, and nothing else.

    Raises:
        IntegrityError: A chunk is missing, came twice, or was not planned.
    """
    planned: dict[Place, Planned] = {}
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            planned[key, (0,)] = BYTES, None, None
        else:
            dtype = tensors.dtype_name(value.properties.dtype, key=key)
            for offsets, lengths in boxes_of(value):
                planned[key, tuple(offsets)] = dtype, value.size, tuple(lengths)
    for stored in shards:
        for item in stored.items:
            chunk, tensor = item.chunk, item.chunk.tensor
            is_value = tensor.dtype == BYTES
            written = (BYTES, None, None) if is_value else (tensor.dtype, tensor.shape, chunk.lengths)
            if planned.pop((tensor.name, chunk.offsets), None) != written:
                said = BYTES if is_value else f"{tensor.dtype} {list(tensor.shape)} {list(chunk.lengths)}"
                raise _unplanned(tensor.name, chunk.offsets, f"rank {stored.shard.rank} wrote it as {said}")
    if planned:
        (key, offsets), _ = next(iter(planned.items()))
        raise _unplanned(key, tuple(offsets), f"it and {len(planned) - 1} more were not written")


def _unplanned(key: str, offsets: tuple[int, ...], what: str) -> IntegrityError:
    return IntegrityError(
        f"The chunk of {key} at {offsets} is not what was planned: {what}.",
        hint="Nothing was committed. This is a fault of the planner: save with DCP's default one.",
        key=key,
    )


_AS_THEY_ARE = {str, int}


def encode_planner(data: Any) -> Any:
    """Return DCP's planner data as a JSON value that keeps types: `1` and `"1"` differ, tuples stay tuples.

    Raises:
        UnsupportedError: They hold anything else than None, bool, int, float, str, list, tuple and dict.
    """
    if data is None or isinstance(data, bool | int | str):
        return data
    if isinstance(data, float):
        return {"float": repr(data)}
    if isinstance(data, list):
        return [encode_planner(each) for each in data]
    if isinstance(data, tuple):
        if all(type(each) in _AS_THEY_ARE for each in data):  # the path of a key
            return {"tuple": [*data]}
        return {"tuple": [encode_planner(each) for each in data]}
    if isinstance(data, Mapping):
        return {"dict": [[encode_planner(key), encode_planner(value)] for key, value in data.items()]}
    raise UnsupportedError(
        f"The planner keeps a {type(data).__name__} of its own with the checkpoint, which has no form without pickle.",
        hint="Let the planner keep None, bool, int, float, str, list, tuple and dict.",
    )


def decode_planner(value: Any) -> Any:
    """Return what `encode_planner` was given.

    Raises:
        IntegrityError: No writer wrote this.
    """
    try:
        return _decoded(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            "The planner data of the checkpoint are not what a writer writes.", hint="Run `ckptstore verify URL`."
        ) from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(_decoded(each) for each in inner)
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in inner}
    raise ValueError(kind)
