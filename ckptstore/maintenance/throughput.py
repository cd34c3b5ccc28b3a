"""How fast bytes and requests go to a store and back, over one connection and over several.

It is bounded: each measurement ends after its seconds or its bytes, whichever is first, and what it wrote is deleted
before the next one begins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from ckptstore.clock import Clock
from ckptstore.errors import OutcomeUnknownError, StalledError, UnavailableError
from ckptstore.maintenance.noting import DELETE
from ckptstore.maintenance.report import Check
from ckptstore.maintenance.visit import Visit
from ckptstore.objectstore.port import ObjectStore
from ckptstore.units import KIB, MIB, format_bytes

CONNECTIONS = (1, 4, 16)
SECONDS, SMALL_SECONDS = 2.0, 1.0
MAX_BYTES = 64 * MIB
"""Of one measurement, one way. Together they move 200 MiB each way at most: three times as much, and a first few."""
LARGEST, SMALLEST, SMALL = 4 * MIB, 64 * KIB, KIB
MAX_SMALL = 128
_LONG_SECONDS = 0.5  # one request should not take longer than this, so that a measurement ends in time


@dataclass(frozen=True, slots=True)
class Speed:
    """What came of one measurement.

    Args:
        bytes: Payload that was moved.
        requests: How many were answered.
        seconds: How long it took.
    """

    bytes: int
    requests: int
    seconds: float

    @property
    def mib_per_second(self) -> float:
        """Of the payload."""
        return round(self.bytes / MIB / self.seconds, 1)

    @property
    def requests_per_second(self) -> float:
        """Of those that were answered."""
        return round(self.requests / self.seconds, 1)


def check_throughput(visit: Visit) -> None:
    """Measure both ways over 1, 4 and 16 connections.

    Nothing is measured where deleting was not seen to work: it would leave too much behind.

    Raises:
        UnavailableError: The store went away.

    If killed: objects of one measurement, 64 MiB at most, in the visit's place.
    """
    if DELETE not in visit.store.allowed:
        why = "Not measured: what it writes could not be deleted again."
        visit.tell(Check("network", "speed", "unknown", why, hint="Allow deleting under probe/."))
        return
    body = os.urandom(LARGEST)
    one: list[float] = []
    for connections in CONNECTIONS:
        large, small = _Objects(visit, f"{connections}/large"), _Objects(visit, f"{connections}/small")

        def up(connections: int = connections, large: _Objects = large, small: _Objects = small) -> Check:
            if not one:
                one.append(_bytes_per_second(large, body, visit.clock))
            piece = body[: _fitting(one[0], connections)]
            return _measured(
                "up", connections, visit.clock, (lambda: large.put(piece), len(piece)), lambda: small.put(body[:SMALL])
            )

        def down(connections: int = connections, large: _Objects = large, small: _Objects = small) -> Check:
            return _measured("down", connections, visit.clock, (large.get, max(large.sizes.values())), small.get)

        try:
            visit.look("network", _name("up", connections), up)
            if large.sizes and small.sizes:
                visit.look("network", _name("down", connections), down)
        finally:
            visit.delete({*large.sizes, *small.sizes} & visit.store.written)


def measure(act: Callable[[], int], connections: int, *, clock: Clock, seconds: float, max_requests: int) -> Speed:
    """Return how fast `act` goes when so many threads do it over and over again.

    Args:
        act: Returns how many bytes it moved.
        connections: How many threads.
        clock: What measures.
        seconds: After this long none begins again.
        max_requests: Nor after so many.

    Raises:
        CkptStoreError: What `act` raised first. The others come to their end before.
    """
    began, done = clock.monotonic(), Speed(0, 0, 0.0)
    lock, over, turns = threading.Lock(), threading.Event(), count()

    def work() -> None:
        nonlocal done
        while not over.is_set() and clock.monotonic() - began < seconds and next(turns) < max_requests:
            try:
                moved = act()
            except BaseException:
                over.set()
                raise
            with lock:
                done = Speed(done.bytes + moved, done.requests + 1, clock.monotonic() - began)

    with ThreadPoolExecutor(connections, thread_name_prefix="ckptstore-doctor") as threads:
        try:
            for future in [threads.submit(work) for _ in range(connections)]:
                future.result()
        finally:  # an interrupt too ends them
            over.set()
    return Speed(done.bytes, done.requests, max(done.seconds, 1e-6))


@dataclass
class _Objects:
    """What one measurement writes and reads again. Thread-safe."""

    visit: Visit
    name: str
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers, self._reads = count(), count()

    @property
    def store(self) -> ObjectStore:
        return self.visit.store

    def put(self, piece: bytes) -> int:
        key = self.visit.key(f"speed/{self.name}/{next(self._numbers)}")
        self.store.put(key, piece)  # nobody else uses this key
        self.sizes[key] = len(piece)
        return len(piece)

    def get(self) -> int:
        keys = list(self.sizes)
        key = keys[next(self._reads) % len(keys)]
        return len(self.store.get(key, max_bytes=self.sizes[key]))


def _bytes_per_second(objects: _Objects, body: bytes, clock: Clock) -> float:
    """Return roughly what one connection moves, from objects of growing size until one takes its time."""
    size = SMALLEST
    while True:
        began = clock.monotonic()
        objects.put(body[:size])
        took = max(clock.monotonic() - began, 1e-6)
        if size == LARGEST or took > _LONG_SECONDS / 2:
            return size / took
        size *= 2


def _fitting(bytes_per_second: float, connections: int) -> int:
    """Return the size of an object that takes half a second at most if the connections share what one moves."""
    return int(min(LARGEST, max(SMALLEST, bytes_per_second * _LONG_SECONDS / connections)))


def _measured(
    way: str, connections: int, clock: Clock, large: tuple[Callable[[], int], int], small: Callable[[], int]
) -> Check:
    try:
        bulk = measure(large[0], connections, clock=clock, seconds=SECONDS, max_requests=MAX_BYTES // large[1])
        quick = measure(small, connections, clock=clock, seconds=SMALL_SECONDS, max_requests=MAX_SMALL)
    except (UnavailableError, StalledError, OutcomeUnknownError) as error:
        if connections == 1:
            raise
        hint = "Use fewer connections: parts_in_flight and fetches_in_flight of TransferOptions."
        return Check("network", _name(way, connections), "warning", f"Too much for it: {error.message}", hint=hint)
    return Check(
        "network",
        _name(way, connections),
        "ok",
        f"{format_bytes(bulk.bytes)} in {bulk.requests} requests and {bulk.seconds:.2f} s; "
        f"{quick.requests_per_second:.0f} requests of {format_bytes(SMALL)} a second.",
        value=bulk.mib_per_second,
        unit="MiB/s",
        facts={
            "connections": connections,
            "bytes": bulk.bytes,
            "seconds": round(bulk.seconds, 3),
            "requests": bulk.requests,
            "small_requests_per_second": quick.requests_per_second,
        },
    )


def _name(way: str, connections: int) -> str:
    return f"{way}, {connections} connection{'s' if connections > 1 else ''}"
