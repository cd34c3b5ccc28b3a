"""A log that was lost, or its tail: nothing is begun or called new there, and no operator appends to what is left.

A first record would stand in the way of the log that is rebuilt from the copies of commits, and a job that took this
place for a new one would train anew. A record at the end of a log without its tail takes the slot of a lost one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.errors import IntegrityError
from ckptstore.format.layout import LATEST_KEY, lane_prefix, parse_data_key
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.reading import hinted_seq

if TYPE_CHECKING:
    from ckptstore.protocol.fold import Fold
    from ckptstore.protocol.log import RunLog


def check_not_lost(log: RunLog) -> None:
    """Check that a log without commits has not lost any. Free of requests where there is a commit.

    Args:
        log: See `what_tells_of_lost_commits`.

    Raises:
        IntegrityError: It has lost some, or all.
        CkptStoreError: The store could not be read.
    """
    if (left := what_tells_of_lost_commits(log)) is None:
        return
    raise IntegrityError(
        f"{left} tells of a save and the log at {log.store.url} of no commit: the log was lost. Nothing was written.",
        hint=f"Restore run.json and the objects under log/, or {_moved(log.fold)}run `ckptstore repair URL "
        "--rebuild-log`. To begin anew, name another URL.",
        key=left,
    )


def what_tells_of_lost_commits(log: RunLog) -> str | None:
    """Return the key of what tells of commits where the log has none; None: it has some, or nothing tells of any.

    What tells of them: `latest.json`; a copy of a commit; and where there is no record at all, any object of an
    attempt, for a claim stands before the first. Of a log that goes on with records of a later release nothing is told.

    Args:
        log: It is read once more where something tells: somebody else may have begun in between.

    Raises:
        CkptStoreError: The store could not be read.
    """
    if _may_have_commits(log.fold):
        return None
    hinted = hinted_seq(log.store) is not None  # a hint that cannot be read fails nothing (I10): the data may tell, too
    left = LATEST_KEY if hinted else _of_an_attempt(log.store, only_copies=log.fold.end > 0)
    if left is None or _may_have_commits(log.refresh()) or (log.fold.end and not _tells_of_a_commit(left)):
        return None
    return left


def check_may_append(log: RunLog) -> None:
    """Check that no record is appended in the place of a lost one, if `LogOptions.refuse_lost_tail` says so.

    Raises:
        IntegrityError: A hint named a slot beyond the end of the log when it was opened.
    """
    if log.lost_from is None or log.fold.end > log.lost_from or not log.options.refuse_lost_tail:
        return
    raise IntegrityError(
        f"{LATEST_KEY} names slot {log.lost_from}, and the log at {log.store.url} ends before slot {log.fold.end}: its "
        "tail was lost, and what is appended now would take the place of a lost record. Nothing was written.",
        hint=f"Restore the log's objects from a backup or earlier versions. If there are none: {_moved(log.fold)}run "
        f"`ckptstore repair URL --rebuild-log`. If {LATEST_KEY} is of another run, delete it.",
        slot=log.lost_from,
        end=log.fold.end,
    )


def _moved(fold: Fold) -> str:
    """Return what is to be done first, for a log is never rebuilt over records."""
    return "stop every job, move all objects under log/ elsewhere, and " if fold.end else ""


def _may_have_commits(fold: Fold) -> bool:
    return bool(fold.ever_committed) or fold.stopped is not None


def _of_an_attempt(store: ObjectStore, *, only_copies: bool) -> str | None:
    """Return the key of an object of an attempt, of the lane where each has some."""
    keys = (info.key for info in store.list(lane_prefix(0)) if parse_data_key(info.key) is not None)
    return next((key for key in keys if not only_copies or _tells_of_a_commit(key)), None)


def _tells_of_a_commit(key: str) -> bool:
    parsed = parse_data_key(key)
    return key == (LATEST_KEY if parsed is None else parsed.stem.committed_key)
