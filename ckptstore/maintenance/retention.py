"""What to keep: rules that compose, and what a log has that none of them keeps. Pure: no store, no clock.

Order is by seq alone. A checkpoint's step, its metrics and the time in its record are labels: they choose, they never
say what is newer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from ckptstore.errors import InvalidInputError
from ckptstore.format.canonical import MAX_TEXT_BYTES
from ckptstore.format.records import ABANDONED
from ckptstore.format.strict_json import is_utf8
from ckptstore.options import check_counts
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.retirement import MIN_KEEP

_HOUR, _DAY = len("2026-01-02T03"), len("2026-01-02")
_SHOWN, _SHOWN_AT_ONCE = 40, 8


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints are to be kept: what any part says is, and all that no policy may retire.

    That is: the two newest, the newest that was verified at level full, what is pinned, and what is quarantined. While
    no part says anything of any checkpoint (a metric or a tag that none has), all are kept.

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
        if (size := len(str(self).encode())) > MAX_TEXT_BYTES:  # it is the reason that a record gives
            raise InvalidInputError(
                f"A policy of {size} bytes cannot be recorded: it may have {MAX_TEXT_BYTES}.", hint="Name fewer tags."
            )

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

    A policy whose rules choose nothing lets go of nothing: a name in it is wrong, or what it waits for has not come.
    Of those set aside, quarantined ones are evidence and stay. Abandoned ones count for no rule, and go once as many
    selectable ones are newer as `last` says, two at least: until then a roll-back can be undone.
    """
    selectable = fold.selectable
    chosen = {each.seq for each in _chosen(selectable, keep)}
    if not chosen:
        return []
    kept = chosen | {each.seq for each in selectable[-MIN_KEEP:]}
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


def unmatched(selectable: Sequence[Committed], keep: Keep) -> list[str]:
    """Return a sentence for each name in a policy that none of these checkpoints has: a metric, a tag.

    It may be misspelt, and then what it was to keep is let go of.
    """
    said = []
    if keep.best is not None and not _best(selectable, *keep.best):
        metrics = {name for each in selectable for name in each.commit.metrics}
        said.append(f"No checkpoint has a finite metric {keep.best[0]!r:.80}; {_there_are('metrics', metrics)}.")
    tags = {tag for each in selectable for tag in each.commit.tags}
    said += [f"No checkpoint has the tag {tag!r:.80}; {_there_are('tags', tags)}." for tag in {*keep.tags} - tags]
    return sorted(said)


def _there_are(what: str, names: Collection[str]) -> str:
    some = ", ".join(repr(name)[:_SHOWN] for name in sorted(names)[:_SHOWN_AT_ONCE])
    more = f", and {len(names) - _SHOWN_AT_ONCE} more" if len(names) > _SHOWN_AT_ONCE else ""
    return f"there are the {what} {some}{more}" if names else f"there are no {what}"


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


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and is_utf8(value)


def _checked_tags(tags: object) -> tuple[str, ...]:
    given = (tags,) if isinstance(tags, str) else tags
    if not isinstance(given, list | tuple | set | frozenset) or not all(map(_is_name, given)):
        raise InvalidInputError(f"tags={tags!r:.80} are no tags.", hint="Pass tags=('release',), say.")
    return tuple(sorted(set(given)))


def _check_best(best: object) -> None:
    if not isinstance(best, tuple) or len(best) != 3:  # noqa: PLR2004  (name, mode, count)
        raise InvalidInputError(f"best={best!r:.80} is not (metric, 'min' or 'max', how many).")
    metric, mode, count = best
    if not _is_name(metric) or mode not in ("min", "max"):
        raise InvalidInputError(f"best={best!r:.80} is not (metric, 'min' or 'max', how many).")
    check_counts(best=count)


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
