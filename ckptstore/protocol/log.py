"""The open log, and the rule by which records are appended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from blake3 import blake3

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds, timestamp
from ckptstore.errors import (
    CommitUnknownError,
    IntegrityError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    safe_text,
)
from ckptstore.events import HintFailed, Observer, TailLost, silent, tell
from ckptstore.format.layout import RUN_KEY, slot_key, state_key
from ckptstore.format.records import (
    FOLD_EVERY,
    MAX_RECORD_BYTES,
    Envelope,
    Known,
    Record,
    RunFile,
    decode_record,
    encode_record,
    encode_run,
)
from ckptstore.format.version import CREATED_BY, FORMAT
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import LogOptions
from ckptstore.protocol.capable import check_signs, require_capable, signing_for
from ckptstore.protocol.fold import Fold, apply, fold_blake3
from ckptstore.protocol.interrupts import decided
from ckptstore.protocol.lost import check_may_append, check_not_lost
from ckptstore.protocol.once import Outcome, create_once
from ckptstore.protocol.reading import advance, get_if_there, no_run, open_fold, slots_between
from ckptstore.protocol.snapshot import MAX_STATE_BYTES
from ckptstore.protocol.told import tell_folded


@dataclass(frozen=True, slots=True)
class Entry:
    """A record that stands in the log, with its bytes."""

    seq: int
    envelope: Envelope
    record: Record
    blake3: str
    body: bytes


class RunLog:
    """One open log: the fold of what was read, and the way to append. Thread-safe.

    Use `open` to read and `create` to write; opening creates nothing. May be pickled if its store may: the copy goes on
    from what was read. A forked child may go on using it, if its store can be used there.
    """

    def __init__(
        self, store: ObjectStore, *, clock: Clock, ids: IdSource, options: LogOptions, observer: Observer = silent
    ) -> None:
        self.store, self.clock, self.ids = store, clock, ids
        self.options, self.observer = options, observer
        self.lost_from: int | None = None
        """A slot that a hint named although the log ended before it: the tail of the log was lost."""
        self._fold = no_run()
        self._locks: dict[int, threading.RLock] = {}  # by process: a fork may copy one while it is held

    @classmethod
    def open(
        cls,
        store: ObjectStore,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        options: LogOptions | None = None,
        observer: Observer = silent,
    ) -> Self:
        """Read the log; an absent run is an empty one.

        Raises:
            IntegrityError: The log is damaged.
            UnsupportedError: A later release wrote `run.json`.
            CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...
        """
        clock, ids = clock or SystemClock(), ids or SystemIds()
        log = cls(store, clock=clock, ids=ids, options=options or LogOptions(), observer=observer)
        log.refresh()
        return log

    @classmethod
    def create(
        cls,
        store: ObjectStore,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        options: LogOptions | None = None,
        observer: Observer = silent,
    ) -> Self:
        """Read the log, and begin the run if there is none.

        Raises:
            UnsupportedError: The store does not create only-if-absent; writing there could lose checkpoints.
            OutcomeUnknownError: Whether `run.json` was created is not known.
            IntegrityError: The log is damaged, or was lost; see `check_not_lost`.
            CkptStoreError: The store could not be read or asked: `UnavailableError`, `AccessDeniedError`, ...

        If killed: perhaps `run.json`; it says nothing but that the run exists. Perhaps keys under `probe/`.
        """
        log = cls.open(store, clock=clock, ids=ids, options=options, observer=observer)
        if log.run is None:
            log.begin_run()
        return log

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_locks": {}}

    @property
    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    @property
    def run(self) -> str | None:
        """The run's identity; None if there is none yet."""
        return self._fold.run or None

    @property
    def fold(self) -> Fold:
        """The fold of all that was read so far."""
        return self._fold

    def refresh(self) -> Fold:
        """Read what was appended since, and return the fold: one GET if nothing was.

        Raises:
            IntegrityError: The log is damaged.
            UnsupportedError: A later release wrote `run.json`; of a later record the fold tells: see `Fold.whole`.
            CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...
        """
        with self._lock:
            if self.run is None:
                opened = open_fold(self.store, self.clock, signing=self.options.signing)
                self._take(opened.fold)
                self.lost_from = opened.lost_from
                if opened.lost_from is not None:
                    tell(self.observer, TailLost(hinted_seq=opened.lost_from, log_end=opened.fold.end))
            else:
                self._take(advance(self.store, self._fold, self.clock, signing=self.options.signing))
            return self._fold

    def read(self) -> Fold:
        """Do as `refresh`, and call a log that lost its commits no empty one. For whoever says what there is.

        Raises:
            IntegrityError: The log is damaged, or was lost; see `check_not_lost`.
            UnsupportedError, CkptStoreError: See `refresh`.
        """
        self.refresh()
        check_not_lost(self)
        return self._fold

    def check_tail(self) -> bytes:
        """Check that what was read last stands there still, and return it: the last record, or `run.json`.

        A record above a log that was removed is lost (I2).

        Raises:
            IntegrityError: It is gone, or another stands there.
            CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...
        """
        with self._lock:
            key = slot_key(self._fold.end - 1) if self._fold.end else RUN_KEY
            body = get_if_there(self.store, key, max_bytes=MAX_RECORD_BYTES)
            if body is not None and blake3(body).hexdigest() == self._fold.last:
                return body
        what = "is gone" if body is None else "is another one now"
        raise IntegrityError(
            f"{key} was read before and {what}: the run at {self.store.url} was removed or emptied under this writer. "
            "Nothing was committed.",
            hint="Find out what deletes objects there; restore the log, or restart and save under another URL.",
            key=key,
        )

    def records(self, *, start: int = 0, end: int | None = None) -> Iterator[Entry]:
        """Yield every record from slot `start` to `end`, by default that of what was read, and nothing from a hint.

        Raises:
            IntegrityError: One is damaged or missing.
            CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...
        """
        for seq, body in slots_between(self.store, self.clock, start, self._fold.end if end is None else end):
            yield Entry(seq, *self._decoded(body, seq), body)

    def append(
        self, decide: Callable[[Fold], Known | None], *, same: Callable[[Record], bool] | None = None
    ) -> Entry | None:
        """Append the record that `decide` gives for the fold below the slot it will stand in.

        Nothing is read first: refresh before. Whoever is in the next slot already is folded, and `decide` is asked
        again, from the start.

        Args:
            decide: Returns the record, or None if the fold says already what it would say; or raises, and nothing is
                appended.
            same: Says whether other bytes in the slot are ours, too: of an earlier call whose outcome was unknown.

        Returns:
            What stands in the log now; None if `decide` returned None.

        Raises:
            NotFoundError: There is no run.
            InvalidInputError: The run is signed, or must be, and there is no key to sign with; nothing was appended.
            UnsupportedError: A later release wrote to this log, or the store cannot create only-if-absent.
            CommitUnknownError: Whether it was appended is not known. Delete nothing; the next append decides (I5, I7).
            UnavailableError: It was not appended within the deadline.
            IntegrityError: The log is damaged, or was removed since it was read, or lost its tail and the options say
                that nothing is appended then; nothing was written.

        If killed: the record stands in the log or not; nothing between. A request under way may still land in that
        slot, and in no other.
        """
        return decided(lambda: self._append(decide, same))

    def _append(self, decide: Callable[[Fold], Known | None], same: Callable[[Record], bool] | None) -> Entry | None:
        with self._lock:
            if self.run is None:
                raise NotFoundError(f"There is no run at {self.store.url}.", hint="Check the URL.")
            check_may_append(self)
            self._require_capable()
            deadline = self.clock.monotonic() + self.options.deadline_seconds
            while (record := decide(self._fold.whole())) is not None:
                left = deadline - self.clock.monotonic()
                if left <= 0:
                    raise UnavailableError(
                        f"Others append so often that no slot was free for {self.options.deadline_seconds} s.",
                        hint="Try again.",
                    )
                signing = signing_for(record, self.check_tail(), self._fold, self.options.signing)
                options = replace(self.options, deadline_seconds=left, signing=signing)
                appended = self._append_at_end(record, same, options)
                if appended is not None:
                    return appended
            return None

    def _append_at_end(self, record: Known, same: Callable[[Record], bool] | None, options: LogOptions) -> Entry | None:
        """Send `record` to the next slot. None: somebody else stands there, and is folded now."""
        below = self._fold
        seq, key = below.end, slot_key(below.end)
        envelope = Envelope(
            format=FORMAT,
            run=below.run,
            seq=seq,
            writer=self.ids.nonce(),
            written_at=timestamp(self.clock),
            prev=below.last,
            fold=fold_blake3(below) if seq % FOLD_EVERY == 0 else None,
        )

        def ours(holder: bytes) -> bool:
            return same is not None and same(self._decoded(holder, seq)[1])

        body = encode_record(record, envelope, signing=options.signing)  # made once for this slot (I16)
        outcome, holder = create_once(self.store, key, body, clock=self.clock, ids=self.ids, options=options, same=ours)
        if holder is None:
            raise CommitUnknownError(
                f"Whether this {record.KIND} stands in {key} is not known: no answer of the store tells.",
                hint="Delete nothing. Run `ckptstore log URL`, or save again: the next append decides.",
                key=key,
                kind=record.KIND,
            )
        found = self._decoded(holder, seq)
        self._take(apply(below, *found))
        if outcome is Outcome.OTHER:
            self.refresh()
            return None
        if seq % FOLD_EVERY == 0 and seq > 0:
            self._write_state(seq, below.encode())
        return Entry(seq, *found, holder)

    def _write_state(self, seq: int, body: bytes) -> None:
        if len(body) <= MAX_STATE_BYTES:
            self.write_hint(state_key(seq), body)
        else:  # nobody would read it
            tell(self.observer, HintFailed(key=state_key(seq), reason=f"{len(body)} bytes, {MAX_STATE_BYTES} allowed"))

    def write_hint(self, key: str, body: bytes) -> None:
        """Write a hint, best effort: an observer hears of a failure, nobody else (I10).

        If killed: the hint is missing, old or new.
        """
        try:
            self.store.put(key, body)
        except Exception as error:  # noqa: BLE001  (nothing depends on it)
            tell(self.observer, HintFailed(key=key, reason=safe_text(error)))

    def begin_run(self) -> None:
        """Create `run.json`, or adopt the run of whoever was first.

        Raises:
            InvalidInputError: It must be signed from its first record on, and there is no key to sign with.
            UnsupportedError: The store does not create only-if-absent.
            OutcomeUnknownError: Whether it was created is not known.
            IntegrityError: A run was here whose log was lost; see `check_not_lost`.
            CkptStoreError: The store refused, and it did not happen: `UnavailableError`, `AccessDeniedError`, ...

        If killed: perhaps `run.json`; it says nothing but that the run exists.
        """
        check_signs(b"", self._fold, self.options.signing)
        self._require_capable()
        check_not_lost(self)
        run = RunFile(run=self.ids.nonce(), created_at=timestamp(self.clock), created_by=CREATED_BY)
        body = encode_run(run)
        outcome, _ = create_once(self.store, RUN_KEY, body, clock=self.clock, ids=self.ids, options=self.options)
        if outcome is Outcome.UNKNOWN:
            raise OutcomeUnknownError(
                f"Whether {RUN_KEY} was created at {self.store.url} is not known.", hint="Start again.", key=RUN_KEY
            )
        self.refresh()  # whoever was first: adopt it

    def _decoded(self, body: bytes, seq: int) -> tuple[Envelope, Record, str]:
        return decode_record(body, seq=seq, run=self._fold.run, signing=self.options.signing)

    def _require_capable(self) -> None:
        require_capable(self.store, self.ids, single_writer=self.options.assume_single_writer)

    def _take(self, fold: Fold) -> None:
        before, self._fold = self._fold, fold
        tell_folded(self.observer, before, fold)
