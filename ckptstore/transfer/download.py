"""Verified ranged reads, straight into the arrays that want them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from ckptstore.errors import CkptStoreError, IntegrityError, NotFoundError
from ckptstore.format.checksum import DIGEST_BYTES, digest, hexdigest
from ckptstore.format.shard import LENGTH_BYTES, Shard, StoredShard, header_entries, shard_root
from ckptstore.format.strict_json import parse_json
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.boxes import as_elements, scatter
from ckptstore.transfer.budget import budget
from ckptstore.transfer.spans import BoxRead, Leaf, Span, Wanted, spans_of, wanted_by_shard

__all__ = ["BoxRead", "ReadStats", "check_shard", "check_size", "read_boxes", "verify_shard"]

MAX_NAMED = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What a read cost at the port."""

    bytes_fetched: int
    requests: int


def read_boxes(
    store: ObjectStore,
    reads: Sequence[BoxRead],
    *,
    options: TransferOptions,
    on_verified: Callable[[int], None] | None = None,
) -> ReadStats:
    """Fill every `out`, verifying each leaf before a byte of it gets there (I13).

    The leaf table of each touched shard is fetched once and checked first, before any `out` is touched; then exactly
    the touched leaves are fetched, each once, a few ranged reads at a time. The first error stops everything, and no
    thread survives the call.

    Args:
        store: Rooted at the run.
        reads: Boxes of stored chunks. Several may touch one item; their `out` must not overlap.
        options: How bytes are moved. What `fetches_in_flight` reads bring is held, and what is hashed meanwhile, never
            more than `transfer_bytes` together with all else that this process moves.
        on_verified: Told how many bytes of leaves have just been verified and written; called on worker threads.

    Raises:
        InvalidInputError: A box leaves its chunk, or its `out` does not fit. Nothing was touched.
        IntegrityError: Bytes are not what was written. As with every error of a store, the facts `written` and
            `written_count` say which tensors had received bytes by then.
    """
    shards = wanted_by_shard(reads)
    tables: dict[str, bytes] = {}
    written: dict[str, None] = {}

    def fetch_table(shard: Shard) -> None:
        tables[shard.path] = leaf_table(store, shard)

    def take(span: Span, verified: memoryview) -> None:
        for leaf in span.leaves:
            written[leaf.wanted.item.chunk.tensor.name] = None
        write_out(span, verified)
        if on_verified is not None:
            on_verified(sum(leaf.nbytes for leaf in span.leaves))

    try:
        in_flight([shard for shard, _ in shards], fetch_table, limit=options.fetches_in_flight)
        spans = [span for shard, wanted in shards for span in _spans(shard, wanted, options)]
        _each_verified(store, spans, tables, options, take)
    except CkptStoreError as error:
        error.facts["written"] = [*list(written)[:MAX_NAMED]]
        error.facts["written_count"] = len(written)
        raise
    return ReadStats(
        bytes_fetched=sum(map(len, tables.values())) + sum(span.length for span in spans),
        requests=sum(1 for table in tables.values() if table) + len(spans),
    )


def _spans(shard: Shard, wanted: Iterable[Wanted], options: TransferOptions) -> Iterator[Span]:
    return spans_of(shard, wanted, fetch_bytes=min(options.fetch_bytes, options.transfer_bytes))


def _each_verified(
    store: ObjectStore,
    spans: Sequence[Span],
    tables: Mapping[str, bytes],
    options: TransferOptions,
    take: Callable[[Span, memoryview], object],
) -> None:
    """Fetch and verify `spans`, within the budget, and let `take` have the bytes of each, on worker threads.

    There are so many threads that as many fetch as are allowed to, while others hash.

    Args:
        store: Rooted at the run.
        spans: Of any shards.
        tables: The leaf table of each, by path.
        options: How bytes are moved.
        take: Keeps nothing of what it is given.
    """
    fetches = options.fetches_in_flight
    fetching = threading.Semaphore(fetches)

    def work(span: Span) -> None:
        with budget().taken(span.length, options=options):
            take(span, fetch_verified(store, span, tables[span.shard.path], fetching))

    in_flight(spans, work, limit=fetches + max(2, options.hash_threads) if fetches > 1 else 1)


def in_flight(tasks: Iterable[T], work: Callable[[T], object], *, limit: int) -> None:
    """Do `work` for every task, `limit` at a time. The first failure stops the others and is raised."""
    tasks = list(tasks)
    if min(limit, len(tasks)) <= 1:
        for task in tasks:
            work(task)
        return
    pending, changed, failures, working = iter(tasks), threading.Condition(), list[BaseException](), 0

    def worker() -> None:
        nonlocal working
        while True:
            with changed:
                task = None if failures else next(pending, None)
                if task is None:
                    return
                working += 1
            try:
                work(task)
            except BaseException as error:  # noqa: BLE001  (raised on the caller's thread)
                failures.append(error)
            finally:
                with changed:
                    working -= 1
                    changed.notify_all()

    with ThreadPoolExecutor(min(limit, len(tasks)), thread_name_prefix="ckptstore-fetch") as pool:
        try:
            for future in [pool.submit(worker) for _ in range(min(limit, len(tasks)))]:
                future.result()
        except BaseException as error:
            with changed:
                failures.append(error)  # an interrupt of this thread stops the workers too
                # One that `submit` was just starting is none of the pool's, and may be writing into a target.
                changed.wait_for(lambda: not working)
            raise
    if failures:
        raise failures[0]


def leaf_table(store: ObjectStore, shard: Shard) -> bytes:
    """Return a shard's leaf table.

    Raises:
        IntegrityError: Its hash is not the recorded one.
    """
    length = shard.size - shard.leaf_table_offset
    table = bytes(_range(store, shard, shard.leaf_table_offset, length)) if length else b""
    expect(shard, "leaf table", hexdigest(table), shard.leaf_table_blake3)
    return table


def expect(shard: Shard, what: str, found: object, expected: object) -> None:
    """Raise IntegrityError, naming both, if `found` is not `expected`."""
    if found != expected:
        raise IntegrityError(
            f"The {what} of {shard.path} is {found}, recorded was {expected}.",
            hint="Run `ckptstore verify URL --level full` and load an older checkpoint.",
            key=shard.path,
            shard_rank=shard.rank,
            what=what,
            found=found,
            expected=expected,
        )


@contextlib.contextmanager
def _there(shard: Shard) -> Iterator[None]:
    """Let "not found" out as damage: a commit says that the object is there (I4), so it is no absent checkpoint."""
    try:
        yield
    except NotFoundError as error:
        raise IntegrityError(
            f"{shard.path} is missing; {shard.size} bytes were recorded.",
            hint="Run `ckptstore verify URL --all` and load an older checkpoint.",
            key=shard.path,
            shard_rank=shard.rank,
            what="object",
            found=None,
            expected=shard.size,
        ) from error


def _range(store: ObjectStore, shard: Shard, start: int, length: int) -> memoryview:
    with _there(shard):
        return memoryview(store.get_range(shard.path, start=start, length=length))


def fetch_verified(store: ObjectStore, span: Span, table: bytes, fetching: threading.Semaphore) -> memoryview:
    """Return a span's bytes, after verifying each of its leaves. Only while it is fetched `fetching` is held.

    Raises:
        IntegrityError: A leaf is not what was written. The facts name it.
    """
    with fetching:  # whoever holds it waits for a request, which has limits of its own
        data = fetch(store, span)
    for error in damaged_leaves(span, data, table):
        raise error
    return data


def fetch(store: ObjectStore, span: Span) -> memoryview:
    """Return a span's bytes, of which nothing is verified but how many they are.

    Raises:
        IntegrityError: They are fewer, or the object is missing.
    """
    data = _range(store, span.shard, span.start, span.length)
    expect(span.shard, "length of a ranged read", data.nbytes, span.length)
    return data


def damaged_leaves(span: Span, data: memoryview, table: bytes) -> Iterator[IntegrityError]:
    """Yield an error for each leaf of a span that is not what was written; the facts name it."""
    for leaf in span.leaves:
        at = (leaf.wanted.item.first_leaf + leaf.number) * DIGEST_BYTES
        offset = leaf.start - span.start
        found, expected = digest(data[offset : offset + leaf.nbytes]), table[at : at + DIGEST_BYTES]
        if found != expected:
            yield _damaged(span.shard, leaf, found, expected)


def write_out(span: Span, data: memoryview) -> None:
    """Lay the verified bytes of a span into what wants them, all leaves of an item at once."""
    for _, leaves in groupby(span.leaves, key=lambda leaf: leaf.wanted.item.first_leaf):
        run = list(leaves)
        wanted, offset = run[0].wanted, run[0].start - span.start
        nbytes = run[-1].start + run[-1].nbytes - run[0].start
        elements = np.frombuffer(data[offset : offset + nbytes], np.uint8).reshape(-1, wanted.itemsize)
        first = run[0].number * wanted.item.leaf_bytes // wanted.itemsize
        for target in wanted.targets:
            window = as_elements(elements) if target.out.ndim == len(target.box[0]) else elements
            scatter(window, first, wanted.item.chunk.lengths, target.box, target.out)


def _damaged(shard: Shard, leaf: Leaf, found: bytes, expected: bytes) -> IntegrityError:
    chunk = leaf.wanted.item.chunk
    return IntegrityError(
        f"Leaf {leaf.number} of {chunk.tensor.name!r} in {shard.path} has BLAKE3 {found.hex()}, "
        f"written was {expected.hex()}.",
        hint="Run `ckptstore verify URL --level full` and load an older checkpoint.",
        tensor=chunk.tensor.name,
        offsets=list(chunk.offsets),
        key=shard.path,
        shard_rank=shard.rank,
        leaf=leaf.number,
        start=leaf.start,
        nbytes=leaf.nbytes,
        found=found.hex(),
        expected=expected.hex(),
    )


def check_shard(store: ObjectStore, shard: Shard) -> None:
    """Check a shard's structure before anything of it is loaded: size, header, leaf table, root.

    Raises:
        IntegrityError: One of them is not what was recorded, or the object is missing.
    """
    structure(store, shard)


def check_size(store: ObjectStore, shard: Shard) -> None:
    """Check that a shard has the recorded size, before room is made for anything of it.

    Raises:
        IntegrityError: It has another, or is missing.
    """
    with _there(shard):
        expect(shard, "size", store.head(shard.path).size, shard.size)


def structure(store: ObjectStore, shard: Shard) -> tuple[bytes, bytes]:
    """Return a shard's header and leaf table, after all the checks of `check_shard`; raises as it does."""
    check_size(store, shard)
    header = bytes(_range(store, shard, 0, shard.header_bytes))
    expect(shard, "header", hexdigest(header), shard.header_blake3)
    table = leaf_table(store, shard)
    expect(shard, "root", shard_root(header, table), shard.root)
    return header, table


def verify_shard(store: ObjectStore, stored: StoredShard, *, options: TransferOptions) -> int:
    """Hash every byte of a shard, padding included, and return how many were read (I13).

    Raises:
        IntegrityError: Any byte is not what was written, the header contradicts the manifest, or the object is missing.
    """
    shard, table = stored.shard, checked_table(store, stored)
    spans = list(spans_of_shard(stored, options))
    _each_verified(store, spans, {shard.path: table}, options, lambda *_: None)
    return shard.header_bytes + len(table) + sum(span.length for span in spans)


def checked_table(store: ObjectStore, stored: StoredShard) -> bytes:
    """Return a shard's leaf table, after the checks of `check_shard`; and its header says what the manifest says.

    Raises:
        IntegrityError: One of them is not what was recorded, or the object is missing.
    """
    header, table = structure(store, stored.shard)
    leaf_count = len(table) // DIGEST_BYTES
    _check_header(stored.shard, header, header_entries(stored.items, len(header), leaf_count=leaf_count))
    return table


def spans_of_shard(stored: StoredShard, options: TransferOptions) -> Iterator[Span]:
    """Yield the ranged reads that fetch all items of a shard, in file order, without a gap."""
    return _spans(stored.shard, [Wanted(each, 1, leaves=range(each.leaf_count)) for each in stored.items], options)


def _check_header(shard: Shard, header: bytes, entries: dict[str, dict[str, Any]]) -> None:
    """Compare a shard's header with the one that its items make. Further notes in `__metadata__` are ignored."""
    said = parse_json(header[LENGTH_BYTES:], what=f"The header of {shard.path}")
    notes = said.get("__metadata__") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(notes, dict):
        raise IntegrityError(f"The header of {shard.path} is none of ours.", key=shard.path, rank=shard.rank)
    expect(shard, "header's length", int.from_bytes(header[:LENGTH_BYTES], "little"), len(header) - LENGTH_BYTES)
    expected_notes = entries.pop("__metadata__")
    for name, note in expected_notes.items():
        expect(shard, f"header's note on {name!r}", notes.get(name), note)
    for name in {**entries, **said}.keys() - {"__metadata__"}:
        expect(shard, f"header's entry {name!r}", said.get(name), entries.get(name))
