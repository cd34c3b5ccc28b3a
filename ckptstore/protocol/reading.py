"""Reading the log: the same answer with and without hints (I10), and never one over a hole (I2)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blake3 import blake3

from ckptstore.clock import Clock
from ckptstore.errors import CkptStoreError, IntegrityError, NotFoundError, UnsupportedError
from ckptstore.format.layout import LATEST_KEY, LOG_PREFIX, RUN_KEY, parse_slot, slot_key, state_key
from ckptstore.format.records import (
    FOLD_EVERY,
    MAX_HINT_BYTES,
    MAX_RECORD_BYTES,
    RunFile,
    decode_latest,
    decode_record,
    decode_run,
)
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.fold import Fold, apply, apply_to_own
from ckptstore.protocol.snapshot import MAX_STATE_BYTES, fold_from_state
from ckptstore.signing import Signing

READS_IN_FLIGHT = 8
SNAPSHOTS_TRIED = 3
HOLE_REREADS = 3
HOLE_PAUSE_SECONDS = 0.2

_SPAN = 256  # slots read in one go: 16 MiB at most


@dataclass(frozen=True, slots=True)
class Opened:
    """A run as it was found.

    Args:
        fold: All of the log.
        lost_from: The slot that a hint names although the log ends before it, or None.
    """

    fold: Fold
    lost_from: int | None


def no_run() -> Fold:
    """Return the fold of a run that does not exist."""
    return Fold(run="", run_blake3="", last="")


def get_if_there(store: ObjectStore, key: str, *, max_bytes: int) -> bytes | None:
    """Return the object, or None if it is provably absent; a refusal or a time-out is never "absent"."""
    try:
        return store.get(key, max_bytes=max_bytes)
    except NotFoundError:
        return None


def open_fold(store: ObjectStore, clock: Clock, *, signing: Signing | None) -> Opened:
    """Read the whole log of the run in `store`, with as few requests as its hints allow.

    Raises:
        IntegrityError: A slot is damaged or missing, or not signed as it must be, or there are slots and no `run.json`.
        UnsupportedError: `run.json` is of a later release.
    """
    body = _run_file(store)
    if body is None:
        return Opened(_vouched(no_run(), signing), None)
    run, digest = read_run(store, body), blake3(body).hexdigest()
    hinted = hinted_seq(store)
    end = _listed_end(store, after=hinted)
    if hinted is not None and hinted >= end:
        end = _listed_end(store, after=None)
    start = _newest_snapshot(store, run, digest, end, signing) or Fold(run=run.run, run_blake3=digest, last=digest)
    fold = _vouched(advance(store, start, clock, known_end=end, signing=signing), signing)
    # A listing may be late, and what a later release wrote is listed and not read.
    return Opened(fold, hinted if hinted is not None and hinted >= max(end, fold.end) else None)


def _vouched(fold: Fold, signing: Signing | None) -> Fold:
    """Return `fold` if a signed record stands above what need not be signed: its `prev` vouches for all of that."""
    if signing is not None and signing.signed_from and fold.end <= signing.signed_from:
        raise IntegrityError(
            f"The log ends before slot {fold.end}, and is said to be signed from slot {signing.signed_from} on.",
            hint="Look for what was deleted; `ckptstore log URL` shows who signed what.",
            expected=signing.signed_from,
            found=fold.end,
        )
    return fold


def read_run(store: ObjectStore, body: bytes) -> RunFile:
    """Return what `run.json` says, where `body` is what stands there.

    Raises:
        IntegrityError: It is damaged.
        UnsupportedError: It is of a later release. One flipped bit can make it say so: slot 0 must vouch for it (I13).
    """
    try:
        return decode_run(body)
    except UnsupportedError:
        first, found = get_if_there(store, slot_key(0), max_bytes=MAX_RECORD_BYTES), blake3(body).hexdigest()
        if first is not None and found.encode() not in first:
            raise IntegrityError(
                f"{RUN_KEY} is not the one that {slot_key(0)} was written for: it has BLAKE3 {found}.",
                hint=f"Restore {RUN_KEY} from a backup or an earlier version of it.",
                key=RUN_KEY,
                found=found,
            ) from None
        raise


def advance(store: ObjectStore, fold: Fold, clock: Clock, *, known_end: int = 0, signing: Signing | None) -> Fold:
    """Return `fold` with the records that stand above it.

    Args:
        store: Where the run is.
        fold: Where to start.
        clock: For the pause before a hole is called one.
        known_end: Slots below this are known to be there.
        signing: Who must have signed them.

    Raises:
        IntegrityError: A slot is damaged or not signed as it must be, or absent below one that is there: a hole.
    """
    ahead, start = 1, fold
    while fold.stopped is None:
        slots = range(fold.end, min(max(known_end, fold.end + ahead), fold.end + _SPAN))
        found = dict(zip(slots, read_slots(store, slots), strict=True))
        dense_below = max(known_end, *(seq + 1 for seq, body in found.items() if body is not None), 0)
        for seq, body in found.items():
            there = _reread(store, clock, seq) if body is None and seq < dense_below else body
            if there is None:
                return fold
            put = apply if fold is start else apply_to_own  # the first copies the tables, and leaves `start` as it is
            fold = put(fold, *decode_record(there, seq=seq, run=fold.run, signing=signing))
            if fold.stopped is not None:
                return fold
        ahead = min(2 * ahead, READS_IN_FLIGHT)
    return fold


def slots_between(store: ObjectStore, clock: Clock, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield every slot from `start` below `end` with its bytes.

    Raises:
        IntegrityError: One is missing.
    """
    for first in range(start, end, _SPAN):
        slots = range(first, min(first + _SPAN, end))
        for seq, body in zip(slots, read_slots(store, slots), strict=True):
            yield seq, body if body is not None else _reread(store, clock, seq)


def read_slots(store: ObjectStore, slots: range) -> list[bytes | None]:
    """Return what stands in `slots`, None where a slot is absent, with several reads in flight."""

    def read(seq: int) -> bytes | None:
        return get_if_there(store, slot_key(seq), max_bytes=MAX_RECORD_BYTES)

    if len(slots) == 1:
        return [read(slots[0])]
    with ThreadPoolExecutor(min(READS_IN_FLIGHT, len(slots))) as pool:
        return list(pool.map(read, slots))


def _reread(store: ObjectStore, clock: Clock, seq: int) -> bytes:
    """Read a slot again that was absent although a higher one is there: it may have come in between (I2)."""
    for _ in range(HOLE_REREADS):
        body = get_if_there(store, slot_key(seq), max_bytes=MAX_RECORD_BYTES)
        if body is not None:
            return body
        clock.sleep(HOLE_PAUSE_SECONDS)
    raise IntegrityError(
        f"{slot_key(seq)} is missing although a later slot is there: the log has a hole. Nothing was written.",
        hint="Restore the object from a backup or an earlier version of it; run `ckptstore verify URL --level chain`.",
        key=slot_key(seq),
        expected="a record",
        found=None,
    )


def _run_file(store: ObjectStore) -> bytes | None:
    """Return `run.json`, or None if there is no run; slots without it are damage, never a new run."""
    body = get_if_there(store, RUN_KEY, max_bytes=MAX_HINT_BYTES)
    if body is not None:
        return body
    slot = next((info.key for info in store.list(LOG_PREFIX) if parse_slot(info.key) is not None), None)
    if slot is None:
        return None
    body = get_if_there(store, RUN_KEY, max_bytes=MAX_HINT_BYTES)  # the run may have begun between the two looks
    if body is None:
        raise IntegrityError(
            f"{slot} is there, {RUN_KEY} is not: this is a damaged run, not a new one. Nothing was written.",
            hint=f"Restore {RUN_KEY} from a backup or an earlier version of it.",
            key=RUN_KEY,
            expected=RUN_KEY,
            found=None,
        )
    return body


def hinted_seq(store: ObjectStore) -> int | None:
    """Return the slot that `latest.json` names; None if it is missing, unreadable or not ours."""
    try:
        return decode_latest(store.get(LATEST_KEY, max_bytes=MAX_HINT_BYTES)).seq
    except CkptStoreError:  # missing, unreadable or nonsense: a hint is never needed (I10)
        return None


def _listed_end(store: ObjectStore, *, after: int | None) -> int:
    """Return the end of the log as listed from slot `after` on; 0 if nothing is listed."""
    key = slot_key(after - 1) if after else None
    slots = (parse_slot(info.key) for info in store.list(LOG_PREFIX, after=key))
    return max((seq + 1 for seq in slots if seq is not None), default=0)


def _newest_snapshot(
    store: ObjectStore, run: RunFile, run_blake3: str, end: int, signing: Signing | None
) -> Fold | None:
    """Return the newest fold under `state/` that its record vouches for, trying a few."""
    newest = (end - 1) // FOLD_EVERY * FOLD_EVERY
    for seq in range(newest, 0, -FOLD_EVERY)[:SNAPSHOTS_TRIED]:
        fold = _snapshot(store, run, seq, signing)
        if fold is not None and fold.run_blake3 == run_blake3:
            return fold
    return None


def _snapshot(store: ObjectStore, run: RunFile, seq: int, signing: Signing | None) -> Fold | None:
    try:
        body = store.get(state_key(seq), max_bytes=MAX_STATE_BYTES)
    except CkptStoreError:  # I10
        return None
    record = get_if_there(store, slot_key(seq), max_bytes=MAX_RECORD_BYTES)
    if record is None:
        return None
    envelope, _, _ = decode_record(record, seq=seq, run=run.run, signing=signing)
    try:
        return fold_from_state(body, envelope)
    except CkptStoreError:  # I10
        return None
