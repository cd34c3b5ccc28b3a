"""What the core tells an observer. The core itself does not log.

An observer is any callable that takes an event. It is called on the thread where the event happened, must be quick,
and can never fail a save: what it raises is dropped by `tell`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """The root of all events."""


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """This incarnation began its reign."""

    run: str
    seq: int
    term: int
    took_over_from: str | None


@dataclass(frozen=True, slots=True)
class AttemptBegan(Event):
    """A prefix was chosen; nothing is written yet."""

    checkpoint_id: str
    prefix: str


@dataclass(frozen=True, slots=True)
class UploadBegan(Event):
    """This rank is about to send the first byte of its shard."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class ShardStored(Event):
    """One rank's shard is durable."""

    path: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveSkipped(Event):
    """A background save was not begun, because the one before has not ended on some rank."""

    checkpoint_id: str | None


@dataclass(frozen=True, slots=True)
class SaveAbandoned(Event):
    """A background save was given up after its time: on this rank it may still hold a thread and memory."""

    checkpoint_id: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The commit record stands in the log."""

    checkpoint_id: str
    global_step: int | None
    seq: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HintFailed(Event):
    """A hint could not be written. Nothing depends on it."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordIgnored(Event):
    """A record that was invalid at its slot was passed over."""

    seq: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class TailLost(Event):
    """A hint points beyond the end of the log: records were lost. The hint is not obeyed."""

    hinted_seq: int
    log_end: int


@dataclass(frozen=True, slots=True)
class PassedOver(Event):
    """Something newer than the newest checkpoint that may be loaded, and why it is not that one."""

    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """A load ended well."""

    checkpoint_id: str
    seq: int
    bytes_fetched: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Retired(Event):
    """These are no longer kept; their bytes may be deleted."""

    seqs: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Deleted(Event):
    """An object was deleted by a collection."""

    key: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Collected(Event):
    """Nothing is left of these retired ones."""

    seqs: tuple[int, ...]


Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Observe nothing."""


def tell(observer: Observer, event: Event) -> None:
    """Hand `event` to `observer`, dropping whatever it raises: an observer can never fail a save."""
    with contextlib.suppress(Exception):
        observer(event)
