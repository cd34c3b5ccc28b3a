"""What a collection would retire, delete and abort: decided by the log, and by no clock but the store's.

Only two kinds of data may ever go (I7, I8): those of retired checkpoints, which no record can make kept again, and
those of orphans, whose commit can never become valid. So a request that lands late under a checkpoint that was
collected, and that the fold has forgotten, is an orphan's: its term is fenced, or its term's tip is this attempt or a
later one. Age only says how long to wait, as a courtesy to whoever still reads.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from ckptstore.errors import (
    AccessDeniedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from ckptstore.format.canonical import canonical_json
from ckptstore.format.layout import DATA_PREFIX, LANES, Stem, lane_prefix, parse_data_key, slot_key
from ckptstore.format.records import MAX_RECORD_BYTES, Retire
from ckptstore.format.strict_json import parse_json
from ckptstore.maintenance.retention import Keep, retirable, unmatched
from ckptstore.maintenance.uploads import Found, judged, time_of
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PendingUpload
from ckptstore.options import MAX_SECONDS, check_kinds
from ckptstore.protocol.catalog import is_orphan
from ckptstore.protocol.fold import Fold
from ckptstore.protocol.log import RunLog

GRACE_SECONDS = 3600.0
"""How long after its retirement a checkpoint may still be read by whoever has not pinned it."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object that is to be deleted.

    Args:
        key: Exactly this one.
        size: In bytes.
        why: For people.
    """

    key: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """An attempt that may be deleted later.

    Args:
        prefix: Its stem.
        objects: How many it has.
        bytes: Of them together.
        why: What is waited for.
    """

    prefix: str
    objects: int
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a collection does. Two plans are the same if their digests are.

    Args:
        url: The run's root, without secrets.
        run: Its identity; None if there is no run.
        retire: Checkpoints, by seq.
        delete: Objects, by key.
        abort: Uploads that were begun and never ended, by key.
        gone: Retired checkpoints of which nothing is left, by seq: only that has to be recorded.
        waiting: What may be deleted later.
        foreign: Keys under `data/` that this run's writers never spell. They stay.
        notes: What could not be asked or told, for people.
    """

    url: str
    run: str | None
    retire: tuple[int, ...] = ()
    delete: tuple[Deletion, ...] = ()
    abort: tuple[PendingUpload, ...] = ()
    gone: tuple[int, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    foreign: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """BLAKE3 of what is retired, deleted and aborted. No age is in it, and no moment."""
        said = {
            "run": self.run,
            "retire": list(self.retire),
            "delete": [[each.key, each.size] for each in self.delete],
            "abort": [[each.key, each.upload_id] for each in self.abort],
        }
        return blake3(canonical_json(said, what="The plan")).hexdigest()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.retire or self.delete or self.abort or self.gone)


class _Listed:
    """What was found under `data/`, without the objects of what is kept, which may be many.

    Args:
        infos: A listing.
        spared: Prefixes of which it is enough to know that they are there.
    """

    def __init__(self, infos: Iterable[ObjectInfo], spared: Collection[str]) -> None:
        self.stems: dict[Stem, list[ObjectInfo]] = defaultdict(list)
        self.present: set[str] = set()
        self.foreign: list[str] = []
        for info in infos:
            parsed = parse_data_key(info.key)
            if parsed is None:
                self.foreign.append(info.key)
                continue
            prefix = str(parsed.stem)
            self.present.add(prefix)
            if prefix not in spared:
                self.stems[parsed.stem].append(info)


def plan_collection(log: RunLog, *, keep: Keep | None = None, grace_seconds: float = GRACE_SECONDS) -> Plan:
    """Return what a collection would do now. Nothing is changed; all of `data/` is listed.

    Args:
        log: Open.
        keep: What is to be kept, where a policy retires; None: nothing is retired.
        grace_seconds: How long ago, by the store's clock, a checkpoint was retired before its bytes go, and an orphan's
            newest object was stored. 0: at once, and no clock is asked.

    Raises:
        InvalidInputError: An argument is outside of what is allowed.
        IntegrityError: The log is damaged, or was removed, or lost its tail: nothing can be called an orphan.
        UnsupportedError: A later release wrote to this log.
        CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...

    If killed: perhaps a small object under `probe/`, which nobody reads.
    """
    check_grace(grace_seconds)
    check_kinds(keep=(keep, Keep))
    store = log.store
    notes: list[str] = []
    if log.read().whole().run == "":  # nothing can be told of what lies there
        return Plan(store.url, None)
    now = time_of(store, log.clock, log.ids) if grace_seconds else None
    before = log.fold
    spared = {each.commit.prefix for each in before.kept} - _prefixes(before, keep)
    listed = _Listed(store.list(DATA_PREFIX), spared)
    uploads = _uploads(store, notes)
    fold = certain_fold(log)
    retire = tuple(retirable(fold, keep)) if keep else ()
    notes += unmatched(fold.selectable, keep) if keep else ()
    if grace_seconds and now is None:
        notes.append("The store does not tell its time here: what waits for the grace waits on (--grace 0 does not).")
    ripe = Ripe(log, fold, now, grace_seconds)
    retired = {prefix: seq for seq, prefix in fold.retired.items()}
    retired |= {fold.commits[seq].commit.prefix: seq for seq in retire}
    kept = {each.commit.prefix for each in fold.kept} - retired.keys()
    sorted_out = _Sorted(log, fold, ripe, retired)
    for stem, infos in listed.stems.items():
        if str(stem) not in kept:
            sorted_out.take(stem, infos)
    return Plan(
        url=store.url,
        run=log.run,
        retire=retire,
        delete=tuple(sorted(sorted_out.delete, key=lambda each: each.key)),
        abort=tuple(_abortable(judged(uploads, fold, now), grace_seconds)),
        gone=tuple(sorted(seq for seq, prefix in fold.retired.items() if prefix not in listed.present)),
        waiting=tuple(sorted(sorted_out.waiting, key=lambda each: each.prefix)),
        foreign=tuple(sorted(listed.foreign)),
        notes=tuple(notes),
    )


def check_grace(grace_seconds: object) -> None:
    """Check that a grace is a number of seconds, or 0.

    Raises:
        InvalidInputError: It is not.
    """
    is_number = isinstance(grace_seconds, int | float) and not isinstance(grace_seconds, bool)
    if not is_number or not 0 <= grace_seconds <= MAX_SECONDS:  # type: ignore[operator]
        raise InvalidInputError(
            f"grace_seconds must be a number of seconds from 0 to {MAX_SECONDS}, not {grace_seconds!r:.80}.",
            hint="Pass grace_seconds=3600, say.",
            option="grace_seconds",
        )


def certain_fold(log: RunLog) -> Fold:
    """Return the fold, if it may be the ground for deleting what was listed before.

    What was read last stands there still, so what was listed is of this very run (I2); and no hint says that the log
    lost records, whose checkpoints would look like orphans.

    Raises:
        IntegrityError: It may not be.
        UnsupportedError: A later release wrote to this log.
    """
    if log.run is not None:
        log.check_tail()
    fold = log.read().whole()
    if log.lost_from is not None:
        raise IntegrityError(
            f"latest.json names slot {log.lost_from}, and the log ended before it: checkpoints of the lost records "
            "would look like orphans. Nothing is deleted.",
            hint="Restore the log's objects from a backup or earlier versions; see `ckptstore log URL`.",
            slot=log.lost_from,
        )
    return fold


class Ripe:
    """Says what has waited long enough, by the store's clock.

    Args:
        log: Open.
        fold: What it says.
        now: The store's time, or less; None: it is not known, and nothing has.
        grace_seconds: How long. 0: everything has.
    """

    def __init__(self, log: RunLog, fold: Fold, now: float | None, grace_seconds: float) -> None:
        self._log, self._fold, self._grace = log, fold, grace_seconds
        self._moment = -math.inf if now is None else now - grace_seconds
        self._young: frozenset[int] | None = None

    @property
    def grace(self) -> str:
        """What is waited for, for people."""
        return f"waits for the grace of {self._grace:g} s"

    def retired(self, seq: int) -> bool:
        """Return whether the retirement of `seq` stands in the log for so long."""
        return not self._grace or (seq in self._fold.retired and seq not in self._recent)

    def stored(self, infos: Iterable[ObjectInfo]) -> bool:
        """Return whether the newest of these objects is so old."""
        times = [math.inf if info.modified is None else info.modified for info in infos]
        return not self._grace or max(times) <= self._moment

    @property
    def _recent(self) -> frozenset[int]:
        """What was retired since. Slots are filled in order, so that a few HEADs find where to begin to read."""
        if self._young is None and self._moment == -math.inf:
            self._young = frozenset(self._fold.retired)
        elif self._young is None:
            lowest = min(self._fold.retired, default=self._fold.end)
            first = bisect_right(range(self._fold.end), self._moment, lo=lowest, key=self._stored_at)
            records = (entry.record for entry in self._log.records(start=first))
            seqs = {seq for record in records if isinstance(record, Retire) for seq in record.seqs}
            self._young = frozenset(seqs)
        return self._young

    def _stored_at(self, seq: int) -> float:
        modified = self._log.store.head(slot_key(seq)).modified
        return math.inf if modified is None else modified


class _Sorted:
    """What of the data that no kept checkpoint has is to be deleted, and what waits."""

    def __init__(self, log: RunLog, fold: Fold, ripe: Ripe, retired: Mapping[str, int]) -> None:
        self._log, self._fold, self._ripe, self._retired = log, fold, ripe, retired
        self.delete: list[Deletion] = []
        self.waiting: list[Waiting] = []

    def take(self, stem: Stem, infos: list[ObjectInfo]) -> None:
        """Sort an attempt that is not kept."""
        seq = self._retired.get(str(stem))
        if seq is not None:
            is_ripe, why = self._ripe.retired(seq), f"{stem.name}@{seq} is retired"
            if not is_ripe:  # the copy of its commit goes at once: a log that is rebuilt leaves it out
                copy = f"copy of the commit of {stem.name}@{seq}, which is retired"
                self.delete += [Deletion(info.key, info.size, copy) for info in infos if info.key == stem.committed_key]
                infos = [info for info in infos if info.key != stem.committed_key]
                why += f"; {self._ripe.grace} since its retirement"
        elif not is_orphan(self._fold, stem):  # I7
            return
        elif stem.committed_key in {info.key for info in infos} and not self._is_vouched_for(stem):
            is_ripe = False
            why = "it holds a COMMITTED copy of no record here: of another run, or of a log that was lost"
        else:
            is_ripe, why = self._ripe.stored(infos), "it can never commit"
            why += "" if is_ripe else f"; {self._ripe.grace} since its newest object was stored"
        if is_ripe:
            self.delete += [Deletion(info.key, info.size, why) for info in infos]
        elif infos:
            self.waiting.append(Waiting(str(stem), len(infos), sum(info.size for info in infos), why))

    def _is_vouched_for(self, stem: Stem) -> bool:
        """Return whether the copy of a commit that lies there is of a record of this log: of one long collected."""
        store = self._log.store
        try:
            copy = store.get(stem.committed_key, max_bytes=MAX_RECORD_BYTES)
        except NotFoundError:  # somebody else collects, too
            return True
        except IntegrityError:
            return False
        try:
            value = parse_json(copy, what=stem.committed_key)
            seq = value.get("seq") if isinstance(value, dict) else None
            if not isinstance(seq, int) or not 0 <= seq < self._fold.end:
                return False
            return copy == store.get(slot_key(seq), max_bytes=MAX_RECORD_BYTES)
        except (IntegrityError, NotFoundError):  # a record that is gone vouches for nothing
            return False


def _prefixes(fold: Fold, keep: Keep | None) -> set[str]:
    return {fold.commits[seq].commit.prefix for seq in (retirable(fold, keep) if keep else ())}


def keys_under(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    """Return the objects of an attempt, as they are listed now in every lane under exactly its own prefix."""
    found = [info for lane in range(LANES) for info in store.list(f"{lane_prefix(lane)}{prefix}/")]
    return [info for info in found if parse_data_key(info.key) is not None]  # what does not parse is foreign, and stays


def _uploads(store: ObjectStore, notes: list[str]) -> list[PendingUpload]:
    try:
        return list(store.list_uploads(""))
    except (UnsupportedError, AccessDeniedError) as error:
        notes.append(f"Uploads that never ended are not looked for: {error}")
        return []


def _abortable(uploads: Iterable[Found], grace_seconds: float) -> list[PendingUpload]:
    """Return the dead ones that are old enough. What is foreign, or may have a living writer, is never in it (I7)."""
    return [
        each.upload
        for each in uploads
        if each.state == "dead"
        and (not grace_seconds or (each.age_seconds is not None and each.age_seconds >= grace_seconds))
    ]
