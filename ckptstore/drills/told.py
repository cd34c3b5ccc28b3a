"""What ranks tell of saves, loads and collections: plain values, so that who hears them does without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.errors import CkptStoreError

FINE = "fine"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a save or a load ended.

    Args:
        kind: The name of the error's class, or `fine`.
        message: What it says.
        hint: What it says to do.
        seconds: How long it took.
    """

    kind: str
    message: str = ""
    hint: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def ended(act: Callable[[], object]) -> Ended:
    """Do something, and return how it ended."""
    began = time.monotonic()
    try:
        act()
    except CkptStoreError as error:
        return Ended(type(error).__name__, error.message, error.hint, time.monotonic() - began)
    except TimeoutError as error:  # of a future
        return Ended(type(error).__name__, str(error), seconds=time.monotonic() - began)
    return Ended(FINE, seconds=time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class Storm:
    """Saves while a store refused.

    Args:
        some: How those ended that began while some requests were refused.
        all: How the one ended during which all were.
        tries: How many requests that one sent in vain.
        threads: How many more there were after it.
        calm: How the one after it ended.
    """

    some: list[Ended]
    all: Ended
    tries: int
    threads: int
    calm: Ended


@dataclass(frozen=True, slots=True)
class Restored:
    """A load that was interrupted for a while, and one after it.

    Args:
        ended: How it ended.
        marks: What was loaded.
        latest: How the load of the latest after it ended.
        latest_marks: What that one loaded.
    """

    ended: Ended
    marks: frozenset[int]
    latest: Ended
    latest_marks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Gone:
    """What a collection did.

    Args:
        retired: Checkpoints, by name.
        deleted: How many objects.
        failed: What could not be deleted, and why.
    """

    retired: list[str]
    deleted: int
    failed: list[str]
