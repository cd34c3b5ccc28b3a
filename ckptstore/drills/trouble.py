"""Saves over a store that is in trouble; what each rank tells of them is how they ended."""

from __future__ import annotations

import contextlib
import itertools
import random
import resource
import threading
from collections.abc import Iterator
from typing import Any

from ckptstore.drills.marked import Saves, untouched
from ckptstore.drills.place import Place
from ckptstore.drills.told import Ended, Storm
from ckptstore.drills.worker import Voice
from ckptstore.errors import AccessDeniedError, AlreadyExistsError, OutcomeUnknownError, UnavailableError
from ckptstore.format.layout import DATA_PREFIX, LOG_PREFIX
from ckptstore.objectstore.wrappers.retrying import RetryingStore
from ckptstore.objectstore.wrappers.tapped import Act, Call, Tap
from ckptstore.options import RetryOptions

ROOM_BYTES = 1 << 16
"""Enough for records, not for a shard."""
STORMY = RetryOptions(attempts=12, first_pause_seconds=0.02, longest_pause_seconds=0.3, deadline_seconds=10.0)
REFUSED = 0.25
"""This share of requests: that one is refused as often as it may be tried happens once in ten million times."""
STORM_SAVES = 4
OF_UPLOADS = ("write", "complete", "abort")
"""Engines try these again themselves, below the tap."""


def _unsent(call: Call, act: Act) -> Any:
    del act
    raise OutcomeUnknownError(f"Nobody knows what became of {call.key}.", key=call.key)


def _lost(call: Call, act: Act) -> Any:
    act()
    raise OutcomeUnknownError(f"Nobody knows what became of {call.key}.", key=call.key)


def _sent_twice(call: Call, act: Act) -> Any:
    act()
    raise AlreadyExistsError(f"{call.key} exists.", key=call.key)


LOSSES: tuple[Tap, ...] = (_lost, _sent_twice, _unsent)
"""It arrived, and the reply was lost; a client sent it again and met it there; it never arrived."""


def save_without_replies(voice: Voice, place: Place) -> tuple[list[Ended], list[str]]:
    """Save once for each way to lose a record's reply; return how each ended, and what was told of as committed."""
    saves = Saves(voice, place)
    tried = set[str]()

    def once(loss: Tap) -> Tap:
        def tap(call: Call, act: Act) -> Any:
            if not call.creates or not call.key.startswith(LOG_PREFIX) or call.key in tried:
                return act()
            tried.add(call.key)
            return loss(call, act)

        return tap

    done = [saves.save(mark, once(loss)) for mark, loss in enumerate(LOSSES, 1)]
    return done, saves.committed


def save_as_credentials_end(voice: Voice, place: Place, *, rank: int) -> list[Ended]:
    """Save; save while the credentials of one rank end with the first bytes of its shard; log in, and save."""
    saves, over = Saves(voice, place), threading.Event()

    def tap(call: Call, act: Act) -> Any:
        if over.is_set() and call.operation == "abort":
            return None  # it is refused too, and never raises
        if over.is_set():
            raise AccessDeniedError(f"{call.operation} of {call.key} was refused: the token has expired.", key=call.key)
        result = act()
        if voice.rank == rank and call.operation == "write" and call.key.startswith(DATA_PREFIX):
            over.set()
        return result

    return [saves.save(1), saves.save(2, tap), saves.save(3)]


def save_without_room(voice: Voice, place: Place, *, rank: int) -> list[Ended]:
    """Save; save while one rank has no room, and again while its store says nothing of that; make room, and save."""
    saves = Saves(voice, place)
    suffers = voice.rank == rank

    def cut(call: Call, act: Act) -> Any:
        result = act()
        if suffers and call.operation == "complete":
            body = saves.store.inner.get(call.key, max_bytes=saves.store.inner.head(call.key).size)
            saves.store.inner.put(call.key, body[:ROOM_BYTES])
        return result

    done = [saves.save(1)]
    if suffers and saves.store.engine == "local":
        with _little_room():
            done.append(saves.save(2))
    else:
        done.append(saves.save(2, _full if suffers else untouched))
    return [*done, saves.save(3, cut), saves.save(4)]


def save_in_a_storm(voice: Voice, place: Place) -> Storm:
    """Save while some requests are refused, then while all are, then in calm weather."""
    saves = Saves(voice, place, wrap=lambda store: RetryingStore(store, options=STORMY))
    draw, tries, uploading = random.Random(voice.rank), itertools.count(), threading.Event()  # noqa: S311  (weather)

    def stormy(call: Call, act: Act) -> Any:
        if call.operation not in OF_UPLOADS and draw.random() < REFUSED:
            raise _slow_down(call)
        return act()

    def shut(call: Call, act: Act) -> Any:
        if call.operation == "write":
            uploading.set()
        if call.operation in OF_UPLOADS or not uploading.is_set():
            return act()
        next(tries)
        raise _slow_down(call)

    in_storm = [saves.save(mark, stormy) for mark in range(1, STORM_SAVES + 1)]
    before = threading.active_count()
    given_up = saves.save(STORM_SAVES + 1, shut)
    left = threading.active_count() - before
    return Storm(in_storm, given_up, next(tries), left, saves.save(STORM_SAVES + 2))


def _slow_down(call: Call) -> UnavailableError:
    return UnavailableError(f"{call.operation} of {call.key} was refused: slow down.", key=call.key)


def _full(call: Call, act: Act) -> Any:
    if call.operation == "write":
        raise UnavailableError(f"There is no room for {call.key}.", hint="Make room, and save again.", key=call.key)
    return act()


@contextlib.contextmanager
def _little_room() -> Iterator[None]:
    """Let the kernel refuse files of this process that are larger than a record, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
