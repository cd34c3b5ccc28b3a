"""What a drill is, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptstore.drills.place import Place

Status = Literal["passed", "failed", "refused", "not applicable"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a drill ended.

    Args:
        status: `refused`: the store may not be written to at all, or no rank can start here, so nothing was tried.
        seen: What was seen, or why nothing was.
        seconds: How long it took.
    """

    status: Status
    seen: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Drill:
    """One thing that goes wrong, and what must hold then.

    Args:
        number: Its place in the list.
        name: What it is called by.
        breaks: What goes wrong.
        promise: What must hold.
        run: Tries it; returns what was seen, and raises `NotAsPromised` where the promise was broken.
        not_on: Why it means nothing somewhere, by the scheme of a URL.
    """

    number: int
    name: str
    breaks: str
    promise: str
    run: Callable[[Place], str]
    not_on: Mapping[str, str] = field(default_factory=dict)
