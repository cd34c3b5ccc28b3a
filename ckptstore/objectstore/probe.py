"""Whether a store can be written to: asked of it, not configured.

The log needs two things of a store: that absent can be told from unknown, and that a key can be created once. There are
servers that answer 200 to a condition they do not know, and file systems without hard links.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Executor, ThreadPoolExecutor

from ckptstore.clock import Clock, IdSource, SystemClock
from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.objectstore.patience import Patience, tried
from ckptstore.objectstore.port import ObjectStore, PutMode
from ckptstore.options import RetryOptions

RACERS = 8
MAX_BYTES = 1024
RACE_SECONDS = 120.0
ENOUGH_ANSWERS = 2
"""Of racing creates: fewer prove nothing, and one more is sent until it is answered."""
TOO_MUCH = (429, 503)
"""What a store that is there, and takes no more at the moment, answers."""
PATIENCE = RetryOptions(attempts=8, first_pause_seconds=1.0, longest_pause_seconds=5.0, deadline_seconds=60.0)
ONE_STEP = ("local", "memory")
"""Engines whose create is one call of the system, or done under a lock: one race is enough for them."""
MAX_RACES = 150
MORE_RACES_SECONDS = 0.25
"""A file system that looks and then writes passes most races by luck, but it answers fast, and is asked often."""


def probe(store: ObjectStore, *, ids: IdSource, prefix: str) -> None:
    """Check that `store` can be written to: see `probe_absence` and `probe_creation`."""
    probe_absence(store, ids=ids, prefix=prefix)
    probe_creation(store, ids=ids, prefix=prefix)


def probe_absence(store: ObjectStore, *, ids: IdSource, prefix: str) -> None:
    """Check that an absent key reads as absent in `store`. It only reads.

    Raises:
        UnsupportedError: It does not, and what would be lost.
        CkptStoreError: The store could not be asked.
    """
    check_absence(store, f"{prefix}{ids.nonce()}/absent")


def probe_creation(store: ObjectStore, *, ids: IdSource, prefix: str) -> None:
    """Check that `store` creates a key once, also in a race.

    Args:
        store: The store, rooted at the run's root.
        ids: Where the probe's own place under `prefix` comes from.
        prefix: Where probes lie; ends in `/`.

    Raises:
        UnsupportedError: It cannot, and what would be lost.
        CkptStoreError: The store could not be asked.

    If killed: small objects under `prefix`, which nobody reads.
    """
    place = f"{prefix}{ids.nonce()}"
    keys = [f"{place}/once", f"{place}/race"]
    try:
        check_second_create(store, keys[0])
        check_race(store, keys[1])
    finally:
        for key in keys:
            with contextlib.suppress(CkptStoreError):  # best effort: a probe left behind harms nobody
                store.delete(key)


def check_absence(store: ObjectStore, key: str) -> None:
    """Check that `key`, which nobody ever wrote, reads as absent.

    Raises:
        UnsupportedError: It does not, and what would be lost. Its cause is the `AccessDeniedError`, if that is why.
        CkptStoreError: The store could not be asked.
    """
    try:
        store.get(key, max_bytes=MAX_BYTES)
    except NotFoundError:
        return
    except AccessDeniedError as error:
        raise UnsupportedError(
            f"{store.url} answers 'denied' for a key that does not exist: whether the log has ended could not be told, "
            "and a checkpoint could be overlooked.",
            hint="Allow listing (on S3: s3:ListBucket), so that an absent key is reported as absent.",
            key=key,
        ) from error
    raise _not_supported(store, "an object that was never written was found", key)


def check_second_create(store: ObjectStore, key: str, *, clock: Clock | None = None) -> None:
    """Check that a second create of `key`, which nobody else uses, fails and leaves what the first one wrote.

    A store that takes one write of an object per second, as Google's does, is asked again until it answers.

    Raises:
        UnsupportedError: It does not, and what would be lost.
        CkptStoreError: The store could not be asked.

    If killed: a small object under `key`, as after it.
    """
    with contextlib.suppress(CkptStoreError):  # what stands between and remembers that it is absent goes on saying so
        store.get(key, max_bytes=MAX_BYTES)
    _creates(store, key, b"first", clock)
    _held(store, key)  # a request that was lost says nothing about the store
    if _creates(store, key, b"second", clock):
        raise _not_supported(store, "a second create of a key succeeded", key)
    if _held(store, key) != b"first":
        raise _not_supported(store, "a second create of a key replaced the first", key)


def check_race(store: ObjectStore, key: str, *, clock: Clock | None = None) -> None:
    """Check that of several racing creates of `key`, which nobody else uses, at most one succeeds, and stays.

    Unless the engine is known to create in one step, further races follow, of keys that begin with `key`, until
    `MAX_RACES` were held or `MORE_RACES_SECONDS` are over.

    Args:
        store: The store.
        key: What is created, and left.
        clock: Where the limit's time comes from.

    Raises:
        UnsupportedError: They do not, and what would be lost.
        CkptStoreError: The store could not be asked.

    If killed: a small object under `key`, as after it; perhaps another beside it.
    """
    clock = clock or SystemClock()
    deadline = clock.monotonic() + MORE_RACES_SECONDS
    with ThreadPoolExecutor(RACERS, thread_name_prefix="ckptstore-probe") as threads:
        _race(store, key, threads, clock)
        for number in range(1, 1 if store.engine in ONE_STEP else MAX_RACES):
            if clock.monotonic() > deadline:
                return
            further = f"{key}-{number}"
            try:
                _race(store, further, threads, clock)
            finally:
                with contextlib.suppress(CkptStoreError):  # best effort: what is left behind harms nobody
                    store.delete(further)


def _race(store: ObjectStore, key: str, threads: Executor, clock: Clock) -> None:
    start = threading.Barrier(RACERS)
    bodies = [f"racer {number}".encode() for number in range(RACERS)]

    def run(body: bytes) -> bool | None:
        start.wait(RACE_SECONDS)
        try:
            return _created(store, key, body)
        except UnavailableError:  # not taken: it has not won, and has not been refused either
            return None

    answers = dict(zip(bodies, threads.map(run, bodies), strict=True))
    created = [body for body, won in answers.items() if won]
    if RACERS - list(answers.values()).count(None) < ENOUGH_ANSWERS and _creates(store, key, b"late", clock):
        created.append(b"late")
        bodies.append(b"late")
    held = _held(store, key)
    if len(created) > 1:
        raise _not_supported(store, f"{len(created)} of {RACERS} racing creates of one key succeeded", key)
    if held not in bodies or (created and created != [held]):
        raise _not_supported(store, "a create that succeeded was replaced by another", key)


def _created(store: ObjectStore, key: str, body: bytes) -> bool:
    """Send one create, and return whether the store said that it was carried out.

    A reply may be lost on the way: what stands there afterwards is what counts.
    """
    try:
        store.put(key, body, mode=PutMode.CREATE)
    except (AlreadyExistsError, OutcomeUnknownError):
        return False
    return True


def _creates(store: ObjectStore, key: str, body: bytes, clock: Clock | None) -> bool:
    """Do the same as `_created`, again and again while the store takes no requests."""
    return tried(
        lambda: _created(store, key, body),
        Patience(PATIENCE, clock=clock),
        hopeless=lambda error: error.facts.get("status") not in TOO_MUCH,
    )


def _held(store: ObjectStore, key: str) -> bytes:
    try:
        return store.get(key, max_bytes=MAX_BYTES)
    except NotFoundError as error:
        raise UnavailableError(
            f"{store.url} holds nothing of what was just written to {key}.",
            hint="Try again; if this goes on, take what caches answers out of the way between here and the store.",
            key=key,
        ) from error


def _not_supported(store: ObjectStore, seen: str, key: str) -> UnsupportedError:
    return UnsupportedError(
        f"{store.url} cannot be written to safely: {seen}. Two jobs could both believe that they committed, "
        "and one checkpoint would be lost.",
        hint="Use a store with conditional writes, or promise a single writer: assume_single_writer=True.",
        key=key,
    )
