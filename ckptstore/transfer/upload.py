"""One rank's shard, streamed and hashed at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ckptstore.errors import IntegrityError, InvalidInputError, OutcomeUnknownError, StalledError, UnavailableError
from ckptstore.format.checksum import LeafHasher, hexdigest
from ckptstore.format.shard import Shard, ShardLayout, StoredItem, shard_root
from ckptstore.objectstore.port import ObjectStore, Upload
from ckptstore.options import TransferOptions
from ckptstore.units import KIB

SMALL_WRITE_BYTES = 256 * KIB

Piece = bytes | bytearray | memoryview


def upload_shard(
    store: ObjectStore,
    key: str,
    layout: ShardLayout,
    bodies: Iterable[Iterable[Piece]],
    *,
    rank: int,
    options: TransferOptions,
) -> Shard:
    """Stream a shard and return its receipt.

    Args:
        store: Rooted at the run.
        key: Of a shard that nobody has ever written (I6).
        layout: What `lay_out` returned.
        bodies: For each item **in file order** its bytes, in pieces of any size. Consumed one after the other, so that
            a generator may copy the next item from its device only when it is asked for. A piece may be reused as soon
            as the next one is asked for.
        rank: In the save's group.
        options: How bytes are moved.

    Raises:
        InvalidInputError: An item has more or fewer bytes than the layout says, or there are more or fewer items.
        IntegrityError: The store says that it holds another number of bytes.
        UnavailableError: The object may or may not be there: nothing refers to it, so nothing is lost by saving again.
        StalledError: The same, after a time in which nothing came.

    If killed: nothing under `key`, or the whole shard; perhaps an incomplete upload. Nothing refers to either.
    """
    hasher = LeafHasher()
    with _uncommitted(key), store.open_upload(key, size=layout.size) as upload:
        sink = _Joined(upload)
        sink.write(memoryview(layout.header))
        _send_items(layout.items, _cut(bodies, options.part_bytes), hasher, sink)
        table = bytes(hasher.table)
        sink.write(memoryview(table))
        sink.flush()
        info = upload.complete()
    if info.size != layout.size:
        raise IntegrityError(
            f"{key} was written with {layout.size} bytes and the store says {info.size}.",
            hint="Look for a proxy or a second writer in front of this bucket.",
            key=key,
            size=info.size,
            expected=layout.size,
        )
    return Shard(
        rank=rank,
        path=key,
        size=layout.size,
        etag=info.etag,
        root=shard_root(layout.header, table),
        header_bytes=len(layout.header),
        header_blake3=hexdigest(layout.header),
        leaf_table_offset=layout.leaf_table_offset,
        leaf_table_blake3=hexdigest(table),
    )


@contextlib.contextmanager
def _uncommitted(key: str) -> Iterator[None]:
    try:
        yield
    except OutcomeUnknownError as error:  # only of a record does it matter: this key is the attempt's own (I6)
        kind = StalledError if error.facts.get("stalled") else UnavailableError
        raise kind(
            f"Whether {key} was stored is not known. Nothing was committed: {error.message}",
            hint="Save again." if error.hint == error.usual_hint else error.hint,
            **{**error.facts, "key": key},
        ) from error


def _send_items(
    items: tuple[StoredItem, ...], bodies: Iterator[Iterator[memoryview]], hasher: LeafHasher, sink: _Joined
) -> None:
    for item in items:
        body = next(bodies, None)
        if body is None:
            raise InvalidInputError(
                f"The shard ends before {item.chunk.tensor.name!r}: bodies are fewer than items.",
                hint="Give one body per item, in file order.",
            )
        hasher.begin(item.leaf_bytes)
        expected, sent = item.chunk.nbytes, 0
        for data in body:
            sent += data.nbytes
            if sent > expected:
                break
            hasher.update(data)
            sink.write(data)
        if sent != expected:
            many = "more" if sent > expected else sent
            raise InvalidInputError(
                f"{item.chunk.tensor.name!r} was planned with {expected} bytes and gave {many}.",
                hint="Do not change the state while it is being saved.",
                tensor=item.chunk.tensor.name,
                expected=expected,
            )
        hasher.finish()
    if next(bodies, None) is not None:
        raise InvalidInputError("Bodies are more than items.", hint="Give one body per item, in file order.")


class _Joined:
    """Joins small writes, because 50,000 of them cost an engine more than their bytes do."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._small = bytearray()

    def write(self, data: memoryview) -> None:
        if data.nbytes >= SMALL_WRITE_BYTES:
            self.flush()
            self._upload.write(data)
            return
        self._small += data
        if len(self._small) >= SMALL_WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._small:
            self._upload.write(self._small)
            self._small = bytearray()


def _cut(bodies: Iterable[Iterable[Piece]], part_bytes: int) -> Iterator[Iterator[memoryview]]:
    """Yield each item's bytes in pieces of at most a part, so that one is sent while the next is hashed."""
    for body in bodies:
        yield (
            flat[start : start + part_bytes] for flat in map(_flat, body) for start in range(0, flat.nbytes, part_bytes)
        )


def _flat(piece: Piece) -> memoryview:
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")
