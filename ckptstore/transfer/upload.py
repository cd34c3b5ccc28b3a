"""One rank's shard, streamed and hashed at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np

from ckptstore.errors import IntegrityError, InvalidInputError, OutcomeUnknownError, StalledError, UnavailableError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.shard import Shard, ShardLayout, StoredItem, shard_root
from ckptstore.objectstore.lent import ENGINES_THAT_KEEP
from ckptstore.objectstore.port import ObjectStore, Upload
from ckptstore.options import TransferOptions
from ckptstore.transfer.budget import Parts, budget
from ckptstore.transfer.hashing import LeafTable
from ckptstore.units import KIB, MIB

LONG_COPY_BYTES = 64 * KIB
JOINED_BYTES = MIB
DIRECT_WRITE_BYTES = 16 * MIB
RUNS_BEHIND = 4
"""So many runs of `RUN_BYTES` hashing may lag behind writing, so that neither waits for the other at every piece."""

Piece = bytes | bytearray | memoryview


def upload_shard(  # noqa: PLR0913  (what an upload needs, written out)
    store: ObjectStore,
    key: str,
    layout: ShardLayout,
    bodies: Iterable[Iterable[Piece]],
    *,
    rank: int,
    options: TransferOptions,
    lasting: bool = False,
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
        lasting: No piece is reused: its bytes stay what they are for as long as something refers to them.

    Raises:
        InvalidInputError: An item has more or fewer bytes than the layout says, or there are more or fewer items.
        IntegrityError: The store says that it holds another number of bytes.
        UnavailableError: The object may or may not be there: nothing refers to it, so nothing is lost by saving again.
        StalledError: The same, after a time in which nothing came.

    If killed: nothing under `key`, or the whole shard; perhaps an incomplete upload. Nothing refers to either.
    """
    with (
        _uncommitted(key),
        budget().parts(options) as parts,
        LeafTable(threads=options.hash_threads) as leaves,
        store.open_upload(key, size=layout.size) as upload,
    ):
        keeps = store.engine in ENGINES_THAT_KEEP
        filling = _Filling(
            upload,
            parts,
            size=layout.size,
            part_bytes=options.part_bytes_of(layout.size) if keeps else JOINED_BYTES,
            direct_bytes=None if keeps else JOINED_BYTES,
            runs_behind=RUNS_BEHIND if lasting else 0,
        )
        filling.add(memoryview(layout.header))
        _send_items(layout.items, bodies, filling, leaves)
        table = leaves.table()
        filling.add(memoryview(table))
        filling.flush()
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
    items: tuple[StoredItem, ...], bodies: Iterable[Iterable[Piece]], filling: _Filling, leaves: LeafTable
) -> None:
    remaining = iter(bodies)
    for item in items:
        body = next(remaining, None)
        if body is None:
            raise InvalidInputError(
                f"The shard ends before {item.chunk.tensor.name!r}: bodies are fewer than items.",
                hint="Give one body per item, in file order.",
            )
        leaves.begin(item.leaf_bytes)
        expected, sent = item.chunk.nbytes, 0
        for data in map(_flat, body):
            sent += data.nbytes
            if sent > expected:
                break
            filling.add(data, leaves)
        if sent != expected:
            many = "more" if sent > expected else sent
            raise InvalidInputError(
                f"{item.chunk.tensor.name!r} was planned with {expected} bytes and gave {many}.",
                hint="Do not change the state while it is being saved.",
                tensor=item.chunk.tensor.name,
                expected=expected,
            )
        leaves.finish()
    if next(remaining, None) is not None:
        raise InvalidInputError("Bodies are more than items.", hint="Give one body per item, in file order.")


class _Filling:
    """The part that is being filled, and passed on when it is full.

    Where the engine keeps a part until it has been sent, all is copied once, into memory that it may keep. What is
    hashed and sent is that copy. Other engines are done with what they get when `write` returns: small pieces are
    joined, because 50,000 writes cost an engine more than their bytes do; large ones are passed on as they are, and
    hashed meanwhile.

    Args:
        upload: Gets the parts.
        parts: Where their memory comes from.
        size: Of the whole object.
        part_bytes: Of each part.
        direct_bytes: Pieces from this size on are passed on without a copy; None: none.
        runs_behind: So many runs of these may still be hashed when the next piece is asked for.
    """

    def __init__(
        self,
        upload: Upload,
        parts: Parts,
        *,
        size: int,
        part_bytes: int,
        direct_bytes: int | None = None,
        runs_behind: int = 0,
    ) -> None:
        self._upload, self._parts = upload, parts
        self._part_bytes, self._direct_bytes, self._runs_behind = part_bytes, direct_bytes, runs_behind
        self._left = size
        self._part = memoryview(b"")
        self._filled = 0

    def add(self, data: memoryview, leaves: LeafTable | None = None) -> None:
        """Append `data`, which may change afterwards, unless `runs_behind`, and let `leaves` hash it."""
        if leaves is not None and self._direct_bytes is not None and len(data) >= self._direct_bytes:
            self._pass_on(data, leaves)
            return
        while data:
            data = self._fill(data, leaves)
            if self._filled == len(self._part):
                if leaves is not None:
                    leaves.flush()
                self.flush()

    def flush(self) -> None:
        """Pass on what has been filled."""
        # No reference to it stays here: the next one may be able to begin only when this one's memory is given back.
        full, self._part, self._filled = self._part[: self._filled], memoryview(b""), 0
        self._left -= len(full)
        if full:
            self._upload.write(full)

    def _pass_on(self, data: memoryview, leaves: LeafTable) -> None:
        leaves.flush()
        self.flush()
        for start in range(0, len(data), DIRECT_WRITE_BYTES):
            piece = data[start : start + DIRECT_WRITE_BYTES]
            self._left -= len(piece)
            leaves.update(piece)
            leaves.flush()
            self._upload.write(piece)
        leaves.wait(left=self._runs_behind)

    def _fill(self, data: memoryview, leaves: LeafTable | None) -> memoryview:
        """Copy what fits, and return the rest."""
        if not self._part:
            self._part = self._parts.take(min(self._part_bytes, self._left))
        taken = min(len(data), len(self._part) - self._filled)
        place = self._part[self._filled : self._filled + taken]
        _copy(data[:taken], place)
        self._filled += taken
        if leaves is not None:
            leaves.update(place)
        return data[taken:]


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < LONG_COPY_BYTES:
        target[:] = source
    else:  # NumPy lets other threads go on meanwhile
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _flat(piece: Piece) -> memoryview:
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")
