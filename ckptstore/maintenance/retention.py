"""What to keep: rules that compose, and what a log has that none of them keeps. Pure: no store, no clock.

Order is by seq alone. A checkpoint's step, its metrics and the time in its record are labels: they choose, they never
say what is newer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from ckptstore.errors import InvalidInputError
from ckptstore.format.records import ABANDONED
from ckptstore.options import check_counts
from ckptstore.protocol.fold import MIN_KEEP, Committed, Fold

_HOUR, _DAY = len("2026-01-02T03"), len("2026-01-02")


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints are to be kept: what any part says is, and all that no policy may retire.

    That is: the two newest, the newest that was verified at level full, what is pinned, and what is quarantined.

    Args:
        last: The newest so many.
        best: A metric's name, whether the least (`min`) or the largest (`max`) is best, and how many. One without the
            metric, or of which it is not finite, is none of the best.
        every: Those whose global step is a multiple.
        hourly: The newest of each of the last so many hours in which there is one, in UTC, by the commits' own time.
        daily: The same of days.
        tags: Those that have one of these tags.

    Raises:
        InvalidInputError: A part is not what it must be, or there is none.
    """

    last: int | None = None
    best: tuple[str, Literal["min", "max"], int] | None = None
    every: int | None = None
    hourly: int | None = None
    daily: int | None = None
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        counts = {"last": self.last, "every": self.every, "hourly": self.hourly, "daily": self.daily}
        check_counts(**{name: value for name, value in counts.items() if value is not None})
        if self.best is not None:
            _check_best(self.best)
        object.__setattr__(self, "tags", _checked_tags(self.tags))
        if not self.as_json:
            raise InvalidInputError("Keep() keeps nothing.", hint="Say Keep(last=3), for instance.")

    @property
    def as_json(self) -> dict[str, Any]:
        """What a save records of it."""
        said = {
            "last": self.last,
            "best": None if self.best is None else list(self.best),
            "every": self.every,
            "hourly": self.hourly,
            "daily": self.daily,
            "tags": list(self.tags) or None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def __str__(self) -> str:
        """Return it in a line, as the reason that a record gives."""
        parts = (f"{name} {_spelled(value)}" for name, value in self.as_json.items())
        return f"keep {', '.join(parts)}"


def retirable(fold: Fold, keep: Keep) -> list[int]:
    """Return what a policy lets go of, by seq: what no rule keeps, and what may be retired at all (I14).

    Of those set aside, quarantined ones are evidence and stay. Abandoned ones count for no rule, and go once as many
    selectable ones are newer as `last` says, two at least: until then a roll-back can be undone.
    """
    selectable = fold.selectable
    kept = {each.seq for each in (*_chosen(selectable, keep), *selectable[-MIN_KEEP:])}
    if fold.newest_verified is not None:
        kept.add(fold.newest_verified.seq)
    newer = selectable[-max(keep.last or 0, MIN_KEEP) :]
    undone_below = newer[0].seq if len(newer) >= max(keep.last or 0, MIN_KEEP) else 0
    return [
        each.seq
        for each in fold.kept
        if not each.pins
        and (
            each.seq not in kept if each.set_aside is None else each.set_aside == ABANDONED and each.seq < undone_below
        )
    ]


def _chosen(selectable: Sequence[Committed], keep: Keep) -> Iterator[Committed]:
    """Yield what the rules keep, some of it more than once. Each rule looks at all of `selectable` (by seq)."""
    newest_first = selectable[::-1]
    yield from newest_first[: keep.last or 0]
    if keep.best is not None:
        yield from _best(newest_first, *keep.best)
    if keep.every is not None:
        steps = ((each, each.commit.global_step) for each in selectable)
        yield from (each for each, step in steps if step is not None and step % keep.every == 0)
    yield from islice(_first_of_each(newest_first, _HOUR), keep.hourly or 0)
    yield from islice(_first_of_each(newest_first, _DAY), keep.daily or 0)
    yield from (each for each in selectable if not {*each.commit.tags}.isdisjoint(keep.tags))


def _best(newest_first: Sequence[Committed], metric: str, mode: str, count: int) -> list[Committed]:
    """Return the best by a metric; of equal ones the newest."""
    measured = [each for each in newest_first if math.isfinite(each.commit.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return sorted(measured, key=lambda each: sign * each.commit.metrics[metric])[:count]  # which is stable


def _first_of_each(newest_first: Iterable[Committed], length: int) -> Iterator[Committed]:
    """Yield the newest of each hour or day, as the first `length` letters of a commit's time name it.

    A clock that goes back names an hour again, and orders nothing.
    """
    seen: set[str] = set()
    for each in newest_first:
        if (moment := each.written_at[:length]) not in seen:
            seen.add(moment)
            yield each


def _checked_tags(tags: object) -> tuple[str, ...]:
    given = (tags,) if isinstance(tags, str) else tags
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(tag, str) and tag for tag in given):
        raise InvalidInputError(f"tags={tags!r:.80} are no tags.", hint="Pass tags=('release',), say.")
    return tuple(sorted(set(given)))


def _check_best(best: object) -> None:
    if not isinstance(best, tuple) or len(best) != 3:  # noqa: PLR2004  (name, mode, count)
        raise InvalidInputError(f"best={best!r:.80} is not (metric, 'min' or 'max', how many).")
    metric, mode, count = best
    if not isinstance(metric, str) or not metric or mode not in ("min", "max"):
        raise InvalidInputError(f"best={best!r:.80} is not (metric, 'min' or 'max', how many).")
    check_counts(best=count)


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
