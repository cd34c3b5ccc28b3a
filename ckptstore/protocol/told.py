"""What an observer hears of a log that was read or appended to."""

from __future__ import annotations

from ckptstore.events import Observer, Point, RecordIgnored, RecoveryPoints, silent, tell
from ckptstore.protocol.fold import Committed, Fold


def tell_folded(observer: Observer, before: Fold, after: Fold) -> None:
    """Tell of records that were passed over since `before`, and of the newest checkpoints if they are others now."""
    if observer is silent or before is after:
        return
    for ignored in after.ignored:
        if ignored.seq >= before.end:
            tell(observer, RecordIgnored(seq=ignored.seq, kind=ignored.kind, reason=ignored.reason))
    if _points(before) != _points(after):
        tell(observer, recovery_points(after))


def recovery_points(fold: Fold) -> RecoveryPoints:
    """Return the newest checkpoints of each kind that a run can go back to."""
    return RecoveryPoints(fold.run, *_points(fold))


def _points(fold: Fold) -> tuple[Point | None, Point | None, Point | None]:
    return _point(fold.newest), _point(fold.newest_verified), _point(fold.newest_proved)


def _point(committed: Committed | None) -> Point | None:
    if committed is None:
        return None
    return Point(committed.seq, committed.commit.global_step, committed.written_at)
