"""What stands in a shard, and where: a valid safetensors file, laid out before its first byte is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.format.checksum import DIGEST_BYTES, digest, hexdigest
from ckptstore.format.dtypes import BYTES, Dtype, dtype_named
from ckptstore.format.strict_json import is_utf8
from ckptstore.units import KIB, MIB

LEAF_TABLE_NAME = "__ckptstore_leaves__"
MARK = "__ckptstore__"
ROOT_DOMAIN = b"ckptstore/1 shard root\n"
CODECS = ("torch.save", "ckptstore.json/1")
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000 + LENGTH_BYTES
LEAVES_PER_ITEM = 32
MIN_LEAF_BYTES = 64 * KIB
MAX_LEAF_BYTES = 4 * MIB
_NOTE = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A whole tensor, or a value stored as bytes.

    Args:
        name: Its fully qualified name in the state.
        dtype: torch's name without the module (`float32`, `bfloat16`), or `bytes`.
        shape: Global shape; `()` for a scalar, `(nbytes,)` for `bytes`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that one item holds, contiguous, little-endian, row-major.

    Args:
        tensor: The tensor it is a box of.
        offsets: Where the box begins, one number per dimension.
        lengths: The box's shape.
        nbytes: Its size in bytes.
        codec: For `bytes` only: `torch.save` or `ckptstore.json/1`.
        pickled: For `bytes` only: the user allowed a value that the restricted unpickler refuses.
    """

    tensor: TensorMeta
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    nbytes: int
    codec: str | None = None
    pickled: bool = False


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A chunk with its place in a shard.

    Args:
        chunk: What is stored.
        position: First byte, from the start of the object.
        leaf_bytes: Size of its leaves (the last may be shorter).
        first_leaf: Index of its first leaf in the shard's leaf table.
    """

    chunk: Chunk
    position: int
    leaf_bytes: int
    first_leaf: int

    @property
    def leaf_count(self) -> int:
        """How many leaves it has; none if it is empty."""
        return -(-self.chunk.nbytes // self.leaf_bytes)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Everything about a shard but its bytes.

    Args:
        header: The eight length bytes and the JSON header with its padding.
        items: In file order.
        order: `order[i]` is the index, in the sequence given to `lay_out`, of `items[i]`.
        leaf_table_offset: Where the leaf table begins; it ends the object.
        leaf_count: How many leaves it holds, 32 bytes each.
        size: Of the whole object.
    """

    header: bytes
    items: tuple[StoredItem, ...]
    order: tuple[int, ...]
    leaf_table_offset: int
    leaf_count: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What a receipt and a manifest part say of one shard as a whole. Hashes are BLAKE3 in hexadecimal.

    Args:
        rank: In the save's group.
        path: Key relative to the run's root.
        size: Of the object in bytes.
        etag: The store's own identity of the bytes, or None.
        root: The shard root.
        header_bytes: Length of the header with its eight length bytes and padding.
        header_blake3: Of these bytes.
        leaf_table_offset: Where the leaf table begins.
        leaf_table_blake3: Of the leaf table.
    """

    rank: int
    path: str
    size: int
    etag: str | None
    root: str
    header_bytes: int
    header_blake3: str
    leaf_table_offset: int
    leaf_table_blake3: str


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard with its items, in file order."""

    shard: Shard
    items: tuple[StoredItem, ...]


def leaf_bytes_of(nbytes: int) -> int:
    """Return the leaf size of an item: nbytes / 32 rounded up to a power of two, within 64 KiB and 4 MiB."""
    wanted = -(-nbytes // LEAVES_PER_ITEM)
    return min(max(1 << max(wanted - 1, 0).bit_length(), MIN_LEAF_BYTES), MAX_LEAF_BYTES)


def item_name(chunk: Chunk) -> str:
    """Return what a chunk is called in its shard: the tensor's name, with `@o0,o1,...` if it is a part of it.

    `%`, `@` and a leading `__` of the tensor's own name are percent-encoded.
    """
    name = chunk.tensor.name.replace("%", "%25").replace("@", "%40")
    if name.startswith("__"):
        name = "%5F%5F" + name[2:]
    return name if chunk.lengths == chunk.tensor.shape else f"{name}@{','.join(map(str, chunk.offsets))}"


def lay_out(chunks: Sequence[Chunk]) -> ShardLayout:
    """Return the layout of a shard that holds `chunks`: largest element size first, bytes items last.

    Raises:
        InvalidInputError: Two chunks have one name, a chunk contradicts itself or its tensor, a name is no UTF-8, or
            the header would exceed safetensors' 100 MB.
        UnsupportedError: A dtype is unknown or cannot be stored.
    """
    widths = [_checked_width(chunk) for chunk in chunks]
    order = sorted(range(len(chunks)), key=widths.__getitem__, reverse=True)
    placed, position, leaves = [], 0, 0
    for index in order:
        item = StoredItem(chunks[index], position, leaf_bytes_of(chunks[index].nbytes), leaves)
        placed.append(item)
        position += item.chunk.nbytes
        leaves += item.leaf_count
    header = _header(placed, leaves)
    items = tuple(replace(item, position=item.position + len(header)) for item in placed)
    table_offset = len(header) + position
    return ShardLayout(header, items, tuple(order), table_offset, leaves, table_offset + leaves * DIGEST_BYTES)


def chunk_fault(chunk: Chunk) -> str | None:
    """Return what is wrong with a chunk whose dtype can be stored, or None."""
    tensor, itemsize = chunk.tensor, dtype_named(chunk.tensor.dtype, of=chunk.tensor.name).itemsize
    if not len(tensor.shape) == len(chunk.offsets) == len(chunk.lengths):
        return f"has {len(chunk.offsets)} offsets and {len(chunk.lengths)} lengths for the shape {tensor.shape}"
    for size, offset, length in zip(tensor.shape, chunk.offsets, chunk.lengths, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            return f"at {chunk.offsets} with lengths {chunk.lengths} leaves the shape {tensor.shape}"
    if chunk.nbytes != math.prod(chunk.lengths) * itemsize:
        return f"has {chunk.nbytes} bytes for {chunk.lengths} elements of {tensor.dtype}"
    if tensor.dtype == BYTES:
        return (
            None
            if chunk.lengths == tensor.shape == (chunk.nbytes,) and chunk.codec in CODECS
            else "is a part of a value"
        )
    return None if chunk.codec is None and not chunk.pickled else "is a tensor and has a codec"


def shard_root(header: bytes, leaf_table: bytes) -> str:
    """Return the shard root, in hexadecimal."""
    return hexdigest(b"".join((ROOT_DOMAIN, digest(header), leaf_table)))


def header_entries(items: Sequence[StoredItem], header_bytes: int, *, leaf_count: int) -> dict[str, dict[str, Any]]:
    """Return what a shard's JSON header says of its items and its leaf table, by name.

    Raises:
        InvalidInputError: Two items have one name.
    """
    entries: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {MARK: "1"}
    end = 0
    for item in items:
        chunk = item.chunk
        name, dtype = item_name(chunk), dtype_named(chunk.tensor.dtype)
        start = item.position - header_bytes
        end = start + chunk.nbytes
        shape = [*chunk.lengths] if dtype.code else [*chunk.lengths, dtype.itemsize]
        if name in entries:
            raise InvalidInputError(
                f"Two items of a shard are called {name!r}.", hint="Save each value once.", name=name
            )
        entries[name] = {"dtype": dtype.code or "U8", "shape": shape, "data_offsets": [start, end]}
        if note := _note(chunk, dtype):
            notes[name] = note
    table_end = end + leaf_count * DIGEST_BYTES
    table = {"dtype": "U8", "shape": [leaf_count, DIGEST_BYTES], "data_offsets": [end, table_end]}
    return {"__metadata__": notes, **entries, LEAF_TABLE_NAME: table}


def _note(chunk: Chunk, dtype: Dtype) -> str | None:
    """Return what safetensors' own entry cannot say of an item, as JSON in a string."""
    note: dict[str, Any] = {}
    if chunk.codec is not None:
        note["codec"] = chunk.codec
    if dtype.code is None:
        note["dtype"] = dtype.name
    if chunk.lengths != chunk.tensor.shape:
        note |= {"offsets": chunk.offsets, "shape": chunk.tensor.shape}
    return _NOTE.encode(note) if note else None


def _header(items: Sequence[StoredItem], leaf_count: int) -> bytes:
    entries = header_entries(items, 0, leaf_count=leaf_count)
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        name = next(item.chunk.tensor.name for item in items if not is_utf8(item.chunk.tensor.name))
        raise InvalidInputError(f"The name {name!r} cannot be written as UTF-8.", hint="Rename the value.") from error
    text += b" " * (-len(text) % 8)
    if LENGTH_BYTES + len(text) > MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"A shard of {len(items)} items needs a header of {len(text)} bytes, safetensors allows 100,000,000.",
            hint="Save with more ranks, or fewer and larger tensors.",
            items=len(items),
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _checked_width(chunk: Chunk) -> int:
    """Return what a chunk is ordered by: its element size, 0 for bytes."""
    dtype = dtype_named(chunk.tensor.dtype, of=chunk.tensor.name)
    if fault := chunk_fault(chunk):
        name = chunk.tensor.name
        raise InvalidInputError(f"The chunk of {name!r} {fault}.", hint="This is a fault of the planner.", tensor=name)
    return 0 if dtype.name == BYTES else dtype.itemsize
