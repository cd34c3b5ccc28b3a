"""Uploads that were begun and never ended: whose they are, how old, and which may be aborted.

An upload of an attempt that can never commit is garbage for ever; the log says so, without a clock (I7). Age only says
how long to wait before anything is called garbage, for whoever is not in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.errors import AccessDeniedError, CkptStoreError, UnsupportedError
from ckptstore.format.layout import DATA_PREFIX, Stem
from ckptstore.maintenance.report import unwatched
from ckptstore.maintenance.visit import Visit
from ckptstore.objectstore.durable import TEMPORARY
from ckptstore.objectstore.port import ObjectStore, PendingUpload
from ckptstore.options import LogOptions
from ckptstore.protocol.catalog import is_orphan
from ckptstore.protocol.fold import Fold
from ckptstore.protocol.log import RunLog

State = Literal["may be living", "dead", "foreign"]

SMALL_WRITE_SECONDS = 3600.0
"""Records, hints and probes are written in seconds; whatever is older than this has no writer."""
_DATA_PIECES = 4
# Keys that this run's own small writes have, and where its temporaries lie: another run may lie below `log/`.
_SMALL = re.compile(r"(log|state)/\d{12,}\.json|probe/[^/]+/[^/]+")
_PLACE = re.compile(r"log|state|probe/[^/]+|")


@dataclass(frozen=True, slots=True)
class Found:
    """An upload that has not ended.

    Args:
        upload: The store's own words.
        state: `dead`: what it is a part of can never become a checkpoint. `foreign`: it is none of this run's.
        why: Of the state, for people.
        stem: The attempt that it belongs to, or None.
        age_seconds: Since it began, or None.
    """

    upload: PendingUpload
    state: State
    why: str
    stem: Stem | None = None
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Uploads:
    """All uploads under a run's root.

    Args:
        url: The run's root, without secrets.
        engine: What asked.
        run: Its identity; None if there is no run.
        by_store: The ages are by the store's clock; else by this machine's, because nothing may be written there.
        found: Sorted by key.
    """

    url: str
    engine: str
    run: str | None
    by_store: bool
    found: tuple[Found, ...]

    def abortable(self, *, older_than_seconds: float, living: bool = False) -> list[Found]:
        """Return what may be aborted: what is dead and older, and with `living` what may have a living writer, too.

        What is foreign is never in it.
        """
        states: tuple[State, ...] = ("dead", "may be living") if living else ("dead",)
        return [
            each
            for each in self.found
            if each.state in states and (living if each.age_seconds is None else each.age_seconds >= older_than_seconds)
        ]


def find_uploads(
    store: ObjectStore,
    *,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    log_options: LogOptions | None = None,
) -> Uploads:
    """Return the incomplete uploads of the run in `store`.

    The store is asked for its time, by a small object that is deleted again.

    Raises:
        UnsupportedError: The engine or the service does not tell; the hint says what removes them.
        IntegrityError: The log is damaged, or was lost: nothing can be called dead.
        CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...

    If killed: perhaps a small object under `probe/`, which nobody reads.
    """
    clock, ids = clock or SystemClock(), ids or SystemIds()
    uploads = list(store.list_uploads(""))
    log = RunLog.open(store, clock=clock, ids=ids, options=log_options)
    log.read()
    asked = time_of(store, clock, ids)
    now = clock.now().timestamp() if asked is None else asked
    return Uploads(store.url, store.engine, log.run, asked is not None, judged(uploads, log.fold, now))


def judged(uploads: Iterable[PendingUpload], fold: Fold, now: float | None) -> tuple[Found, ...]:
    """Return what each upload is.

    Args:
        uploads: Listed before the fold was read: what has no commit in it then never will have one, or may be living.
        fold: What the log says.
        now: By the clock that they have their times from; None: it is not known.
    """
    return tuple(_judged(upload, fold, now) for upload in uploads)


def abort(store: ObjectStore, chosen: Sequence[Found]) -> list[tuple[Found, CkptStoreError | None]]:
    """Abort each upload, and return it with what went wrong, or None.

    If killed: some are gone, the others are there.
    """
    ended: list[tuple[Found, CkptStoreError | None]] = []
    for each in chosen:
        try:
            store.abort_upload(each.upload)
        except CkptStoreError as error:
            ended.append((each, error))
        else:
            ended.append((each, None))
    return ended


def time_of(store: ObjectStore, clock: Clock, ids: IdSource) -> float | None:
    """Return the store's time, or None where nothing may be written or it does not say.

    If killed: perhaps a small object under `probe/`, which nobody reads.
    """
    visit = Visit(store, clock=clock, ids=ids, watch=unwatched)
    try:
        visit.store.put(visit.key("now"), b"now")
        return visit.store.head(visit.key("now")).modified
    except (AccessDeniedError, UnsupportedError):
        return None
    finally:
        visit.leave_even_if_interrupted()


def _judged(upload: PendingUpload, fold: Fold, now: float | None) -> Found:
    age = None if upload.began is None or now is None else max(now - upload.began, 0.0)
    stem = _stem_of(upload.key)
    if stem is not None:
        state, why = _state_of(stem, fold)
        return Found(upload, state, why, stem, age)
    place, _, name = upload.key.rpartition("/")
    if not (name.startswith(TEMPORARY) and _PLACE.fullmatch(place)) and not _SMALL.fullmatch(upload.key):
        return Found(upload, "foreign", "its key is none of this run's", None, age)
    if age is not None and age >= SMALL_WRITE_SECONDS:
        return Found(upload, "dead", "a small write takes seconds; whoever made it is gone", None, age)
    return Found(upload, "may be living", "a small write that may be under way", None, age)


def _state_of(stem: Stem, fold: Fold) -> tuple[State, str]:
    if fold.committed_at(str(stem)) is not None:
        return "dead", "its attempt is committed without it"
    if is_orphan(fold, stem):  # I7
        fenced = fold.fences(stem.term)
        return (
            "dead",
            f"term {fold.term} has claimed the run since" if fenced else "a later attempt has committed since",
        )
    return "may be living", "its attempt may still commit"


def _stem_of(key: str) -> Stem | None:
    """Return the attempt that a key, or a temporary's path, lies under."""
    pieces = key.split("/")
    if len(pieces) != _DATA_PIECES or f"{pieces[0]}/" != DATA_PREFIX:
        return None
    return Stem.parse(pieces[2])
