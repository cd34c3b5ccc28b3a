"""Manifest parts: many shards in one small gzip object, columnar."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.columns import Fault, Fields, shard_from, shard_value, tensors_from
from ckptstore.format.shard import StoredShard, TensorMeta
from ckptstore.format.strict_json import dump_json, parse_json
from ckptstore.format.version import FORMAT, INSTALL_HINT
from ckptstore.units import MIB

MAX_SHARDS = 256
MAX_ITEMS = 131_072
MAX_DIRECT_PARTS = 128
"""Parts that one COMMIT record can name (64 KiB, names of 120 bytes); more hang under a root part."""
MAX_INFLATED_BYTES = 512 * MIB
MAX_PART_BYTES = MAX_INFLATED_BYTES + MIB
"""Of the gzip object: what does not shrink grows by less than a thousandth."""
_LEVEL = 6
_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # no name, no time, no system: RFC 1952


@dataclass(frozen=True, slots=True)
class PartRef:
    """How a commit, or a root part, names a part.

    Args:
        path: Key relative to the run's root, under the commit's own attempt.
        size: Of the gzip object in bytes.
        blake3: Of the gzip object.
        inflated: Size of the JSON in bytes.
        ranks: First and last rank it describes; `(0, 0)` if it describes none.
        is_root: It lists parts instead of shards.
    """

    path: str
    size: int
    blake3: str
    inflated: int
    ranks: tuple[int, int]
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The shards of a part, and (part 0) DCP's planner data as a JSON value."""

    shards: tuple[StoredShard, ...]
    planner: Any = None


def encode_part(part: Part) -> tuple[bytes, int]:
    """Return the gzip object (the same bytes for the same part, always) and the size of the JSON in it.

    Raises:
        InvalidInputError: Ranks do not ascend, one tensor's name has two shapes or dtypes, the planner data are no
            JSON, or the JSON would exceed 512 MiB.
    """
    ranks = [stored.shard.rank for stored in part.shards]
    if ranks != sorted(set(ranks)):
        raise InvalidInputError(f"The ranks of a part must ascend, not {ranks[:8]}.", hint="Sort the shards by rank.")
    tensors = _table(part.shards)
    if parse_json(dump_json(part.planner, what="Planner data"), what="Planner data") != part.planner:
        raise InvalidInputError(
            "Planner data hold a key that is no text, or a tuple: they would come back as something else.",
            hint="Encode them as JSON that says so.",
        )
    return _deflated(
        {
            "format": FORMAT,
            "kind": "part",
            "tensors": [[tensor.name, tensor.dtype, tensor.shape] for tensor in tensors],
            "shards": [shard_value(stored, tensors) for stored in part.shards],
            "planner": part.planner,
        }
    )


def decode_part(body: bytes, ref: PartRef) -> Part:
    """Return the part in `body` after checking size, hash and inflated size, and every number in it.

    Whether the paths are the attempt's own is for the caller to check, with `layout.own_key`.

    Raises:
        IntegrityError: Anything differs, or an item leaves its shard or tensor. Nothing larger than `ref.inflated` is
            ever held.
        UnsupportedError: A newer version wrote it.
    """
    value = inflate(body, ref, kind="part")
    try:
        fields = Fields(value)
        tensors: list[TensorMeta] = tensors_from(fields.list("tensors"))
        shards = tuple(shard_from(Fields(shard), tensors) for shard in fields.list("shards"))
    except (Fault, RecursionError) as fault:  # what is nested deeply cannot be shown
        raise bad(ref, str(fault)) from fault
    ranks = [stored.shard.rank for stored in shards]
    if ranks != sorted(set(ranks)) or (ranks and not ref.ranks[0] <= ranks[0] <= ranks[-1] <= ref.ranks[1]):
        raise bad(ref, f"has the ranks {ranks[:8]}, not ascending within {ref.ranks}")
    return Part(shards, value.get("planner"))


def encode_root(refs: Sequence[PartRef]) -> tuple[bytes, int]:
    """Return a root part that lists `refs`, and the size of the JSON in it. See `encode_part`."""
    return _deflated({"format": FORMAT, "kind": "root", "parts": [ref_value(ref) for ref in refs]})


def decode_root(body: bytes, ref: PartRef) -> tuple[PartRef, ...]:
    """Return the parts that a root part lists, after the same checks as `decode_part`.

    Raises:
        IntegrityError: Anything differs.
        UnsupportedError: A newer version wrote it.
    """
    value = inflate(body, ref, kind="root")
    try:
        refs = tuple(ref_from(each) for each in Fields(value).list("parts"))
    except (Fault, RecursionError) as fault:
        raise bad(ref, str(fault)) from fault
    if any(each.is_root for each in refs):
        raise bad(ref, "lists another root part")
    return refs


def ref_value(ref: PartRef) -> dict[str, Any]:
    """Return `ref` as JSON; `root` stands there only if it is true."""
    value: dict[str, Any] = {
        "path": ref.path,
        "size": ref.size,
        "blake3": ref.blake3,
        "inflated": ref.inflated,
        "ranks": list(ref.ranks),
    }
    return {**value, "root": True} if ref.is_root else value


def ref_from(value: object) -> PartRef:
    """Return the reference that `ref_value` wrote.

    Raises:
        Fault: A field is missing or is not what it must be.
    """
    fields = Fields(value)
    first, last = fields.integers("ranks", count=2)
    if first > last:
        raise Fault(f"has the ranks {first} to {last}")
    root = fields.value.get("root", False)
    if not isinstance(root, bool):
        raise Fault("has a `root` that is neither true nor false")
    path, size, inflated = fields.text("path"), fields.integer("size"), fields.integer("inflated")
    if size > MAX_PART_BYTES or inflated > MAX_INFLATED_BYTES:  # nobody makes room for what cannot be
        raise Fault(f"has {size} bytes that hold {inflated}; {MAX_PART_BYTES} that hold {MAX_INFLATED_BYTES} may be")
    return PartRef(
        path=path,
        size=size,
        blake3=fields.digest("blake3"),
        inflated=inflated,
        ranks=(first, last),
        is_root=root,
    )


def split(shards: Sequence[StoredShard]) -> list[tuple[StoredShard, ...]]:
    """Return `shards` (by rank) cut into parts of at most 256 shards and 131,072 items (one shard may exceed it)."""
    parts: list[list[StoredShard]] = []
    items = 0
    for stored in shards:
        if not parts or len(parts[-1]) == MAX_SHARDS or items + len(stored.items) > MAX_ITEMS:
            parts.append([])
            items = 0
        parts[-1].append(stored)
        items += len(stored.items)
    return [tuple(part) for part in parts]


def _table(shards: Sequence[StoredShard]) -> dict[TensorMeta, int]:
    """Return every tensor of `shards` with its place in the part's table."""
    tensors = dict.fromkeys(item.chunk.tensor for stored in shards for item in stored.items)
    by_name: dict[str, TensorMeta] = {}
    for tensor in tensors:
        other = by_name.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise InvalidInputError(
                f"{tensor.name!r} is {other.dtype} {other.shape} here, {tensor.dtype} {tensor.shape} there.",
                hint="Give every rank the same state.",
                tensor=tensor.name,
            )
    return {tensor: index for index, tensor in enumerate(tensors)}


def deflate(text: bytes) -> bytes:
    """Return `text` as a gzip object, the same bytes for the same text."""
    deflated = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    tail = struct.pack("<II", zlib.crc32(text), len(text))
    return _GZIP_HEAD + deflated.compress(text) + deflated.flush() + tail


def inflate(body: bytes, ref: PartRef, *, kind: str) -> dict[str, Any]:
    """Return the object of JSON in `body`, of this kind, after checking size, hash and inflated size.

    Raises:
        IntegrityError: Anything differs. Nothing larger than `ref.inflated` is ever held.
        UnsupportedError: A newer version wrote it.
    """
    if len(body) != ref.size:
        raise bad(ref, f"has {len(body)} bytes, recorded were {ref.size}", expected=ref.size, found=len(body))
    if (found := hexdigest(body)) != ref.blake3:
        raise bad(ref, f"has BLAKE3 {found}, recorded was {ref.blake3}", expected=ref.blake3, found=found)
    if ref.inflated > MAX_INFLATED_BYTES:
        raise bad(ref, f"is said to hold {ref.inflated} bytes, {MAX_INFLATED_BYTES} are allowed")
    inflated = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        text = inflated.decompress(body, ref.inflated + 1)
    except zlib.error as error:
        raise bad(ref, f"is no gzip: {error}") from error
    if len(text) != ref.inflated or not inflated.eof or inflated.unused_data:
        raise bad(ref, f"does not hold the recorded {ref.inflated} bytes")
    value = parse_json(text, what=ref.path)
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        raise bad(ref, "does not say its format")
    if value["format"] > FORMAT:
        raise UnsupportedError(
            f"{ref.path} has the format {value['format']}, this version reads {FORMAT}.",
            hint=INSTALL_HINT,
            path=ref.path,
            format=value["format"],
        )
    if value["format"] != FORMAT or value.get("kind") != kind:
        raise bad(ref, f"is {value.get('kind')!r} of the format {value['format']}, not {kind!r} of {FORMAT}")
    return value


def bad(ref: PartRef, fault: str, **facts: object) -> IntegrityError:
    """Return the error that names what `ref` names, and what is wrong with it."""
    return IntegrityError(
        f"{ref.path} {fault}.",
        hint="Run `ckptstore verify URL` and load an older checkpoint.",
        key=ref.path,
        **facts,
    )


def _deflated(value: dict[str, Any]) -> tuple[bytes, int]:
    text = dump_json(value, what="A manifest part") + b"\n"
    if len(text) > MAX_INFLATED_BYTES:
        raise InvalidInputError(
            f"A manifest part would have {len(text)} bytes, {MAX_INFLATED_BYTES} are allowed.",
            hint="Save with more ranks, or fewer and larger tensors.",
        )
    return deflate(text), len(text)
