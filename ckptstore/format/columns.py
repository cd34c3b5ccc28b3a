"""The inside of a manifest part: tensors once, then each shard's items as columns of integers."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ckptstore.errors import UnsupportedError
from ckptstore.format.checksum import DIGEST_BYTES
from ckptstore.format.dtypes import BYTES, dtype_named
from ckptstore.format.shard import (
    CODECS,
    MAX_HEADER_BYTES,
    Chunk,
    Shard,
    StoredItem,
    StoredShard,
    TensorMeta,
    chunk_fault,
    item_name,
    leaf_bytes_of,
)

MAX_INTEGER = 2**63 - 1
MAX_DIMENSIONS = 64
_DIGEST = re.compile("[0-9a-f]{64}")


class Fault(ValueError):  # noqa: N818  (becomes an IntegrityError that names the object)
    """What is wrong with a decoded value."""


class Fields:
    """A decoded JSON object whose fields are checked as they are taken. Every failure is a `Fault`."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise Fault(f"holds {str(value)[:40]!r} in place of an object")
        self.value: dict[str, Any] = value

    def integer(self, name: str) -> int:
        """Return a field that is an integer in [0, 2^63)."""
        return _integers([self.value.get(name)], name)[0]

    def integers(self, name: str, *, count: int) -> builtins.list[int]:
        """Return a field that is a list of `count` integers in [0, 2^63)."""
        values = self.list(name)
        if len(values) != count:
            raise Fault(f"has {len(values)} numbers in `{name}`, not {count}")
        return _integers(values, name)

    def text(self, name: str) -> str:
        """Return a field that is text."""
        value = self.value.get(name)
        if not isinstance(value, str):
            raise Fault(f"has {str(value)[:40]!r} as `{name}`, not text")
        return value

    def digest(self, name: str) -> str:
        """Return a field that is a BLAKE3 digest."""
        if not _DIGEST.fullmatch(self.text(name)):
            raise Fault(f"has a `{name}` that is no digest")
        return self.text(name)

    def list(self, name: str) -> builtins.list[Any]:
        """Return a field that is a list."""
        value = self.value.get(name)
        if not isinstance(value, list):
            raise Fault(f"has {str(value)[:40]!r} as `{name}`, not a list")
        return value


def shard_value(stored: StoredShard, tensors: Mapping[TensorMeta, int]) -> dict[str, Any]:
    """Return a shard as JSON; `tensors` says where each tensor stands in the part's table."""
    shard, items = stored.shard, stored.items
    chunks = [item.chunk for item in items]
    values = [chunk for chunk in chunks if chunk.codec is not None]
    return {
        "rank": shard.rank,
        "path": shard.path,
        "size": shard.size,
        "etag": shard.etag,
        "root": shard.root,
        "header_bytes": shard.header_bytes,
        "header_blake3": shard.header_blake3,
        "leaf_table": {"offset": shard.leaf_table_offset, "blake3": shard.leaf_table_blake3},
        "summary": summary(items),
        "tensor": [tensors[chunk.tensor] for chunk in chunks],
        "offsets": list(chain.from_iterable(chunk.offsets for chunk in chunks)),
        "lengths": list(chain.from_iterable(chunk.lengths for chunk in chunks)),
        "position": [item.position for item in items],
        "bytes": [chunk.nbytes for chunk in chunks],
        "leaf_bytes": [item.leaf_bytes for item in items],
        "first_leaf": [item.first_leaf for item in items],
        "codec": [chunk.codec for chunk in values],
        "pickled": [index for index, chunk in enumerate(values) if chunk.pickled],
    }


def summary(items: Sequence[StoredItem]) -> dict[str, Any]:
    """Return what a person wants to know of a shard: items, bytes, items by dtype and by the first part of the name."""
    return {
        "items": len(items),
        "bytes": sum(item.chunk.nbytes for item in items),
        "dtypes": dict(Counter(item.chunk.tensor.dtype for item in items)),
        "components": dict(Counter(item.chunk.tensor.name.partition(".")[0] for item in items)),
    }


def tensors_from(rows: list[Any]) -> list[TensorMeta]:
    """Return the part's table of tensors, checked."""
    tensors = []
    for row in rows:
        match row:
            case [str(name), str(dtype), list(shape)] if len(shape) <= MAX_DIMENSIONS:
                tensors.append(TensorMeta(name, dtype, tuple(_integers(shape, "shape"))))
            case _:
                raise Fault(f"lists the tensor {str(row)[:80]}")
        try:
            dtype_named(dtype, of=name)
        except UnsupportedError as error:
            raise Fault(f"names an element type: {error}") from error
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise Fault("lists a tensor twice")
    return tensors


def shard_from(fields: Fields, tensors: list[TensorMeta]) -> StoredShard:
    """Return a shard whose items tile it exactly, each inside its tensor."""
    table = Fields(fields.value.get("leaf_table"))
    etag = fields.value.get("etag")
    shard = Shard(
        rank=fields.integer("rank"),
        path=fields.text("path"),
        size=fields.integer("size"),
        etag=None if etag is None else fields.text("etag"),
        root=fields.digest("root"),
        header_bytes=fields.integer("header_bytes"),
        header_blake3=fields.digest("header_blake3"),
        leaf_table_offset=table.integer("offset"),
        leaf_table_blake3=table.digest("blake3"),
    )
    items = tuple(_placed(fields, _chunks(fields, tensors)))
    if len({item_name(item.chunk) for item in items}) != len(items):
        raise Fault(f"lists an item of {shard.path} twice")
    _check_tiling(shard, items)
    given, counted = fields.value.get("summary"), summary(items)
    if not isinstance(given, dict) or {name: given.get(name) for name in counted} != counted:
        raise Fault(f"has a summary of {shard.path} that its items do not have")
    return StoredShard(shard, items)


def _chunks(fields: Fields, tensors: list[TensorMeta]) -> list[Chunk]:
    indices = _integers(fields.list("tensor"), "tensor")
    if indices and max(indices) >= len(tensors):
        raise Fault(f"names the tensor {max(indices)} of {len(tensors)}")
    metas = [tensors[index] for index in indices]
    ranks = sum(len(meta.shape) for meta in metas)
    offsets = iter(fields.integers("offsets", count=ranks))
    lengths = iter(fields.integers("lengths", count=ranks))
    values = sum(meta.dtype == BYTES for meta in metas)
    codecs = _codecs(fields, values)
    chunks = []
    for meta, nbytes in zip(metas, fields.integers("bytes", count=len(metas)), strict=True):
        box = tuple(next(offsets) for _ in meta.shape), tuple(next(lengths) for _ in meta.shape)
        codec, pickled = next(codecs) if meta.dtype == BYTES else (None, False)
        chunk = Chunk(meta, *box, nbytes, codec, pickled)
        if fault := chunk_fault(chunk):
            raise Fault(f"has a chunk of {meta.name!r} that {fault}")
        chunks.append(chunk)
    return chunks


def _codecs(fields: Fields, values: int) -> Iterator[tuple[str, bool]]:
    codecs, pickled = fields.list("codec"), set(_integers(fields.list("pickled"), "pickled"))
    if len(codecs) != values or not all(codec in CODECS for codec in codecs):
        raise Fault(f"has the codecs {str(codecs)[:80]} for {values} values")
    if pickled and max(pickled) >= values:
        raise Fault(f"calls the value {max(pickled)} of {values} pickled")
    return iter([(codec, index in pickled) for index, codec in enumerate(codecs)])


def _placed(fields: Fields, chunks: list[Chunk]) -> Iterator[StoredItem]:
    columns = [fields.integers(name, count=len(chunks)) for name in ("position", "leaf_bytes", "first_leaf")]
    return map(StoredItem, chunks, *columns)


def _check_tiling(shard: Shard, items: Sequence[StoredItem]) -> None:
    """Refuse a shard with a byte that no hash covers, or that two items share (I13)."""
    position, leaves = shard.header_bytes, 0
    for item in items:
        name, nbytes = item.chunk.tensor.name, item.chunk.nbytes
        if item.position != position:
            raise Fault(f"places {name!r} in {shard.path} at {item.position}, not at {position}")
        if item.leaf_bytes != leaf_bytes_of(nbytes) or item.first_leaf != leaves:
            raise Fault(f"gives {name!r} of {nbytes} bytes leaves of {item.leaf_bytes} from leaf {item.first_leaf}")
        position += nbytes
        leaves += item.leaf_count
    end = position + leaves * DIGEST_BYTES
    if (shard.leaf_table_offset, shard.size) != (position, end) or not 16 <= shard.header_bytes <= MAX_HEADER_BYTES:  # noqa: PLR2004
        raise Fault(
            f"has a header of {shard.header_bytes} bytes, a leaf table at {shard.leaf_table_offset} and {shard.size} "
            f"bytes for {shard.path}, whose items end at {position} and at {end} with their leaves"
        )


def _integers(values: list[Any], name: str) -> list[int]:
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_INTEGER):
        raise Fault(f"has a `{name}` that is no integer from 0 to 2^63 - 1")
    return values
