"""A log that was lost: where something tells of commits, and no record does, nothing is begun or called new.

A first record would stand in the way of the log that is rebuilt from the copies of commits, and a job that took this
place for a new one would train anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.errors import IntegrityError
from ckptstore.format.layout import LATEST_KEY, lane_prefix, parse_data_key
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.reading import hinted_seq

if TYPE_CHECKING:
    from ckptstore.protocol.log import RunLog


def check_not_lost(log: RunLog) -> None:
    """Check that a log without commits has not lost any. Free of requests where there is a commit.

    What tells of them: `latest.json`; a copy of a commit; and where there is no record at all, any object of an
    attempt, for a claim stands before the first.

    Args:
        log: It is read once more where something tells: somebody else may have begun in between.

    Raises:
        IntegrityError: It has lost some, or all.
        CkptStoreError: The store could not be read.
    """
    if log.fold.ever_committed:
        return
    hinted = hinted_seq(log.store) is not None  # a hint that cannot be read fails nothing (I10): the data may tell, too
    left = LATEST_KEY if hinted else _of_an_attempt(log.store, only_copies=log.fold.end > 0)
    if left is None or log.refresh().ever_committed or (log.fold.end and not _tells_of_a_commit(left)):
        return
    raise IntegrityError(
        f"{left} tells of a save and the log at {log.store.url} of no commit: the log was lost. Nothing was written.",
        hint="Restore run.json and the objects under log/, or run `ckptstore repair URL --rebuild-log`. To begin anew, "
        "name another URL.",
        key=left,
    )


def _of_an_attempt(store: ObjectStore, *, only_copies: bool) -> str | None:
    """Return the key of an object of an attempt, of the lane where each has some."""
    keys = (info.key for info in store.list(lane_prefix(0)) if parse_data_key(info.key) is not None)
    return next((key for key in keys if not only_copies or _tells_of_a_commit(key)), None)


def _tells_of_a_commit(key: str) -> bool:
    parsed = parse_data_key(key)
    return key == (LATEST_KEY if parsed is None else parsed.stem.committed_key)
