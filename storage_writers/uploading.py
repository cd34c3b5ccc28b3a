"""A shard on its way, watched: an engine that hangs (a file system that does not answer) does not hang the save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckptstore.clock import SystemClock
from ckptstore.errors import BusyError, StalledError
from ckptstore.events import Observer, ShardStored, UploadBegan, tell
from ckptstore.format.shard import Shard, ShardLayout, StoredShard
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.threads import OwnedThread
from ckptstore.transfer.upload import Piece, upload_shard
from ckptstore.units import MIB
from storage_writers.agreement import in_our_words
from storage_writers.planning import Contents, Ticket
from storage_writers.receipts import results_of

IMPATIENT = ("local", "memory", "fsspec")
"""Engines that do not try again by themselves, or not in a time that is known."""
LOOK_SECONDS = 0.2
ABORT_SECONDS = 5.0
"""How long an upload may take to be aborted when its save was interrupted."""
MAX_HUNG = 2
"""How many uploads into one store may hang at once, each with a thread and its part of the memory for transfers."""

_CLOCK = SystemClock()
_hung: list[tuple[str, threading.Thread]] = []


def write_shard(
    store: ObjectStore,
    plan: SavePlan,
    contents: Contents,
    *,
    options: TransferOptions,
    observer: Observer,
    check: Callable[[], None],
) -> list[WriteResult]:
    """Send a rank's shard and return its receipt.

    Args:
        store: Rooted at the run.
        plan: Of this rank.
        contents: What it is read from.
        options: How bytes are moved.
        observer: Hears of it.
        check: Raises if what is read may have changed since; asked before each chunk and after the last.

    Raises:
        CkptStoreError: It failed, and was aborted; what others raised is told by one of ours.

    If killed: see `upload_watched`.
    """
    began = _CLOCK.monotonic()
    ticket: Ticket = plan.storage_data
    key = ticket.stem.shard_key(ticket.rank)
    layout = contents.layout
    tell(observer, UploadBegan(key, layout.size))

    def bodies() -> Iterator[Iterable[Piece]]:
        for index in layout.order:
            check()
            yield contents.pieces(index)
        check()

    try:
        shard = upload_watched(
            store, key, layout, bodies(), rank=ticket.rank, options=options, lasting=contents.lasting
        )
    except Exception as error:
        if (ours := in_our_words(error, f"The upload of {key} failed")) is error:
            raise
        raise ours from error
    tell(observer, ShardStored(key, shard.size, _CLOCK.monotonic() - began))
    return results_of(plan, StoredShard(shard, layout.items))


def upload_watched(  # noqa: PLR0913  (what `upload_shard` takes)
    store: ObjectStore,
    key: str,
    layout: ShardLayout,
    bodies: Iterable[Iterable[Piece]],
    *,
    rank: int,
    options: TransferOptions,
    lasting: bool = False,
) -> Shard:
    """Stream a shard as `upload_shard` does, and give it up when nothing has moved for too long.

    It runs on a thread of its own, because a system call that hangs cannot be interrupted. That thread stays until the
    call returns, then aborts; should the shard become whole all the same, nothing refers to it.

    Raises:
        BusyError: Uploads that were given up hang in this store still.
        StalledError: Nothing moved for `stall_timeout_seconds`, what its bytes need at 1 MiB/s, and the time in which
            an engine tries again.
        CkptStoreError: What `upload_shard` raises.

    If killed: nothing under `key`, or the whole shard; perhaps an incomplete upload. Nothing refers to either.
    """
    _check_hung(store)
    moving = _Moving(layout.size, store.engine, options)
    shard: Future[Shard] = Future()

    def run() -> None:
        try:
            through = moving.through(bodies)
            shard.set_result(upload_shard(store, key, layout, through, rank=rank, options=options, lasting=lasting))
        except BaseException as error:  # noqa: BLE001  (handed over whole)
            shard.set_exception(error)

    thread = OwnedThread(run, "ckptstore-upload")
    try:
        thread.start()
        while not wait([shard], timeout=LOOK_SECONDS).done:
            moving.check(key)
    except BaseException as error:
        moving.give_up()
        if not thread.withdraw():
            _hung.append((store.url, thread))
            if not isinstance(error, StalledError):  # an interrupt: leave nothing behind
                thread.join(ABORT_SECONDS)
        raise
    thread.join()  # its frames hold the state, and can be let go of only when it has ended
    return shard.result()


def _check_hung(store: ObjectStore) -> None:
    _hung[:] = [(url, thread) for url, thread in _hung if thread.is_alive()]
    if sum(url == store.url for url, _ in _hung) >= MAX_HUNG:
        raise BusyError(
            "Uploads that were given up have not ended, and hold threads and memory.",
            hint="Restart this job: the store, or the file system under it, does not answer.",
        )


class _Moving:
    """What moves, as the engine takes it. While the engine waits for more, nothing is watched.

    Args:
        size: Of the object.
        engine: The store's.
        options: How bytes are moved.
    """

    def __init__(self, size: int, engine: str, options: TransferOptions) -> None:
        retry = options.retry
        self._part_bytes = options.part_bytes
        self._patience = retry.stall_timeout_seconds + (0 if engine in IMPATIENT else retry.deadline_seconds)
        self._in_flight = min(size, max(options.transfer_bytes, options.part_bytes_of(size)))
        self._size = size
        self._given_up = False
        self._since: tuple[float, float] | None = None
        self._moved(self._in_flight)

    def _moved(self, pending_bytes: int) -> None:
        self._since = _CLOCK.monotonic(), self._patience + pending_bytes / MIB

    def give_up(self) -> None:
        """Let the upload end at its next piece."""
        self._given_up = True

    def check(self, key: str) -> None:
        """Raise StalledError if nothing has moved for too long."""
        if (moved := self._since) is None:  # what is sent is still being copied, or computed, under limits of its own
            return
        since, limit = moved
        still = _CLOCK.monotonic() - since
        if still > limit:
            raise StalledError(
                f"The upload of {key} has not moved for {still:.1f} s and was given up.",
                hint="Look at whether the store answers, with `ckptstore doctor URL`, and save again.",
                key=key,
                seconds=still,
            )

    def through(self, bodies: Iterable[Iterable[Piece]]) -> Iterator[Iterator[memoryview]]:
        """Yield `bodies`, cut into parts, noting that they move."""
        for body in bodies:
            yield self._parts(body)
            self._since = None
        self._check_going_on()
        self._moved(self._size)  # from here on the engine publishes: what it still holds, or syncs, may be all

    def _check_going_on(self) -> None:
        if self._given_up:
            raise StalledError("This upload was given up before.")

    def _parts(self, body: Iterable[Piece]) -> Iterator[memoryview]:
        self._since = None
        for piece in body:
            view = memoryview(piece)
            if not view.nbytes:
                continue
            flat = view.cast("B")
            for start in range(0, flat.nbytes, self._part_bytes):
                self._check_going_on()
                self._moved(self._in_flight)
                yield flat[start : start + self._part_bytes]
            self._since = None
        self._moved(self._in_flight)
