"""What stands in a shard, and where: a valid safetensors file, laid out before its first byte is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    raise NotImplementedError


def lay_out(chunks: Sequence[Chunk]) -> ShardLayout:
    """Return the layout of a shard that holds `chunks`: largest element size first, bytes items last.

    Raises:
        InvalidInputError: Two chunks have one name, or the header would exceed safetensors' 100 MB.
        UnsupportedError: A dtype is unknown.
    """
    raise NotImplementedError


def shard_root(header: bytes, leaf_table: bytes) -> str:
    """Return the shard root, in hexadecimal."""
    raise NotImplementedError
