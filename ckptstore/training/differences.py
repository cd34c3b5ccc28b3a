"""What two plain values differ in, named by where it stands, with what it was and what it is."""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.training.plain import path_of

MAX_DIFFERENCES = 1000
MAX_NAMED = 20
"""In a message."""
_WHOLE = 8
"""A list of at most so many plain values is one value: a shape, say, or Adam's betas."""
_SHOWN = 100


class Absence(enum.Enum):
    """Nothing stands there."""

    ABSENT = "absent"


ABSENT = Absence.ABSENT


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it was.

    Args:
        path: Where it stands.
        saved: What the checkpoint says; ABSENT if it says nothing.
        now: What the program says; ABSENT if it says nothing.
    """

    path: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.saved, self.now)} → {_shown(self.now, self.saved)}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; what is absent is left out."""
        sides = {"saved": self.saved, "now": self.now}
        return {"path": self.path, **{name: value for name, value in sides.items() if value is not ABSENT}}


def differences(saved: Any, now: Any, *, at: Sequence[str | int] = ()) -> list[Difference]:
    """Return what differs, in the order of its names: at most 1,000.

    A short list of plain values is one value; longer ones are compared entry by entry.

    Args:
        saved: A plain value.
        now: Another one.
        at: Where they stand.
    """
    return list(itertools.islice(_differing(saved, now, tuple(at)), MAX_DIFFERENCES))


def named(found: Iterable[object]) -> str:
    """Return differences as text for a message: the first ones, and how many more there are."""
    texts = [str(each) for each in found]
    more = len(texts) - MAX_NAMED
    return "; ".join(texts[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _differing(saved: Any, now: Any, steps: tuple[str | int, ...]) -> Iterator[Difference]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for name in sorted({*saved, *now}):
            yield from _differing(saved.get(name, ABSENT), now.get(name, ABSENT), (*steps, name))
    elif isinstance(saved, list) and isinstance(now, list) and not (_is_one(saved) and _is_one(now)):
        for place in range(max(len(saved), len(now))):
            was, is_now = (side[place] if place < len(side) else ABSENT for side in (saved, now))
            yield from _differing(was, is_now, (*steps, place))
    elif not _same(saved, now):
        yield Difference(path_of(steps), saved, now)


def _is_one(value: list[Any]) -> bool:
    """Say whether a list is a single value for people, with a shape in it perhaps."""
    inner = [each for entry in value for each in (entry if isinstance(entry, list) else [entry])]
    return len(value) <= _WHOLE and len(inner) <= _WHOLE and not any(isinstance(each, list | dict) for each in inner)


def _same(saved: Any, now: Any) -> bool:
    """Say whether two values are the same; `True` is not `1`."""
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_same, saved, now))
    return type(saved) is type(now) and bool(saved == now)


def _shown(value: Any, other: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(text) <= _SHOWN:
        return text
    if not isinstance(value, str) or not isinstance(other, str):
        return f"{text[:_SHOWN]}…"
    alike = next((place for place, pair in enumerate(zip(value, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, alike - _SHOWN // 4)  # what differs shall be seen
    return f"{'…' if start else ''}{json.dumps(value[start : start + _SHOWN], ensure_ascii=False)}…"
