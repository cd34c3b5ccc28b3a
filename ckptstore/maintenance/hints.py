"""Hints, made again from the log: what they ought to say, and which do not (I10: no answer changes by it)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from ckptstore.errors import IntegrityError, InvalidInputError, NotFoundError
from ckptstore.format.layout import LATEST_KEY, state_key
from ckptstore.format.records import FOLD_EVERY, MAX_HINT_BYTES, MAX_RECORD_BYTES, decode_latest, encode_latest
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.commit import latest_hint
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.snapshot import MAX_STATE_BYTES
from ckptstore.protocol.verify import fold_below


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint that is missing, or does not say what the log says.

    Args:
        key: Where it stands.
        why: `missing` or `stale`.
        body: What it ought to be.
    """

    key: str
    why: str
    body: bytes


def stale_hints(log: RunLog) -> Iterator[Hint]:
    """Yield the hints that a reader or an operator would miss, with what they ought to be.

    `latest.json` is left as it is where it names a slot beyond the end of the log: it is the only witness of a lost
    tail.

    Raises:
        IntegrityError: The log is damaged.
        UnsupportedError: A later release wrote to it.
        CkptStoreError: The store could not be read.
    """
    fold = log.refresh().whole()
    if fold.kept and log.lost_from is None:
        newest = fold.kept[-1]
        why = _why_not(log.store, LATEST_KEY, MAX_HINT_BYTES, partial(_names, newest, fold.end))
        if why:
            yield Hint(LATEST_KEY, why, encode_latest(latest_hint(newest)))
    yield from _stale_state(log, fold)
    for committed in reversed(fold.kept):
        key, right = committed.commit.stem.committed_key, committed.blake3
        why = _why_not(log.store, key, MAX_RECORD_BYTES, partial(_has_blake3, right))
        if why:
            yield Hint(key, why, _entry(log, committed.seq).body)


def _stale_state(log: RunLog, fold: Fold) -> Iterator[Hint]:
    seq = (fold.end - 1) // FOLD_EVERY * FOLD_EVERY
    if seq <= 0:
        return
    right = _entry(log, seq).envelope.fold
    key = state_key(seq)
    why = _why_not(log.store, key, MAX_STATE_BYTES, partial(_has_blake3, right))
    if why:
        body = fold_below(log, seq).encode()
        if len(body) <= MAX_STATE_BYTES:  # else nobody would read it
            yield Hint(key, why, body)


def _why_not(store: ObjectStore, key: str, max_bytes: int, right: Callable[[bytes], bool]) -> str | None:
    """Return why a hint is of no use; None if it says what it ought to."""
    try:
        return None if right(store.get(key, max_bytes=max_bytes)) else "stale"
    except NotFoundError:
        return "missing"
    except (IntegrityError, InvalidInputError):  # longer than any hint, its seal is broken, or it says nonsense
        return "stale"


def _names(newest: Committed, end: int, body: bytes) -> bool:
    """Say whether `latest.json` names the newest kept checkpoint, or a later record: it may be retired."""
    hint = decode_latest(body)
    return newest.seq < hint.seq < end or (hint.seq, hint.record_blake3) == (newest.seq, newest.blake3)


def _has_blake3(right: str | None, body: bytes) -> bool:
    return blake3(body).hexdigest() == right


def _entry(log: RunLog, seq: int) -> Entry:
    return next(log.records(start=seq, end=seq + 1))


def write_hints(store: ObjectStore, hints: Iterable[Hint]) -> None:
    """Write hints.

    Raises:
        CkptStoreError: One was not written, or perhaps not.

    If killed: some are new, the others as they were; each is whole.
    """
    for hint in hints:
        store.put(hint.key, hint.body)
