"""What the core tells an observer. The core itself does not log.

An observer is any callable that takes an event. It is called on the thread where the event happened, must be quick,
and can never fail a save: what it raises is dropped by `tell`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

OTHER = "other"
"""Where an event has an error's code: what is no error of ours."""


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
class Point:
    """A checkpoint that a run can go back to.

    Args:
        seq: Its slot.
        global_step: Its step, if that was said.
        committed_at: When its record was made, by its writer's clock: ISO 8601 in UTC.
    """

    seq: int
    global_step: int | None
    committed_at: str


@dataclass(frozen=True, slots=True)
class RecoveryPoints(Event):
    """Another checkpoint is the newest of its kind. Told by every log that is read or appended to.

    Args:
        run: Identity of the run.
        committed: The newest that may be loaded.
        verified: The newest of them of which every byte was verified since.
        proved: The newest of them from which a resume was proved.
    """

    run: str
    committed: Point | None
    verified: Point | None
    proved: Point | None


Phase = Literal["stage", "plan", "upload", "gather", "verify", "commit"]
"""What a save does, in order. All ranks do the first three; the last three are rank 0's: the receipts of all come in,
parts are written and everything is listed, the record is appended."""


@dataclass(frozen=True, slots=True)
class SaveBegan(Event):
    """This rank was asked to save. One `SaveEnded` with the same `save` follows, unless the process dies.

    Args:
        save: Tells the saves of this process apart.
        background: The training goes on meanwhile.
    """

    save: int
    background: bool


@dataclass(frozen=True, slots=True)
class PhaseEnded(Event):
    """A phase of a save ended well on this rank.

    Args:
        save: As in `SaveBegan`.
        checkpoint_id: The checkpoint's name; None: the ranks have not agreed on it yet.
        phase: Which.
        seconds: How long it took; of `stage`, how long the training waited for it.
    """

    save: int
    checkpoint_id: str | None
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveEnded(Event):
    """A save ended on this rank, well or not.

    Args:
        save: As in `SaveBegan`.
        checkpoint_id: The checkpoint's name; None: the ranks never agreed on it.
        seconds: Since it was asked for.
        error: The code of what it failed with, `other` if that is none of ours; None: it ended well.
    """

    save: int
    checkpoint_id: str | None
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class AttemptBegan(Event):
    """A prefix was chosen; nothing is written yet. Told once the run is this incarnation's."""

    checkpoint_id: str
    prefix: str
    run: str


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
class RestoreFailed(Event):
    """A load or a resume failed, or a resume passed a damaged checkpoint over.

    Args:
        checkpoint_id: Which one, if that is known.
        error: The code of what it failed with; `other` if that is none of ours.
    """

    checkpoint_id: str | None
    error: str


@dataclass(frozen=True, slots=True)
class DamageFound(Event):
    """What a save, a load or a resume read is not what was written; of a scrub or a repair, what two readings found so.

    Args:
        key: Of the object, if it is one.
    """

    key: str | None


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """A training has done so many steps."""

    global_step: int


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A run goes on from a checkpoint. The load that is a part of it is not told by itself.

    Args:
        checkpoint_id, seq, global_step: Which one.
        steps_lost: See `ResumeReport`.
        seconds: From the call on.
        world_size_changed: Other ranks saved it, by number.
        samples_lost: See `ResumeReport`.
        committed_at: When it was committed. On rank 0, of a checkpoint of the run itself; else None.
    """

    checkpoint_id: str
    seq: int
    global_step: int | None
    steps_lost: int | None
    seconds: float
    world_size_changed: bool
    samples_lost: int | None = None
    committed_at: str | None = None


@dataclass(frozen=True, slots=True)
class ProofEnded(Event):
    """The first steps after a resume were compared with the run that went on."""

    checkpoint_id: str
    seq: int
    verdict: str
    resume_loss_delta: float | None


@dataclass(frozen=True, slots=True)
class TraceFailed(Event):
    """The steps after a checkpoint could not be recorded with it. The checkpoint is as good as before."""

    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """The run stops, because it was asked to or because something was raised.

    Args:
        reason: Which signal, or which exception, and on which rank.
        global_step: At which step.
        newest_seq: The newest commit, as far as this rank knows: those of this job are known to rank 0. None: none.
        saved: Whether the state of that step is saved.
    """

    reason: str
    global_step: int
    newest_seq: int | None
    saved: bool


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


@dataclass(frozen=True, slots=True)
class KeepFailed(Event):
    """Something could not be retired, deleted, pinned or let go of. The training goes on, and so does the next try."""

    reason: str


Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Observe nothing."""


def together(*observers: Observer) -> Observer:
    """Return an observer that hands each event to all of these, whatever one of them raises."""

    def hand(event: Event) -> None:
        for each in observers:
            tell(each, event)

    return hand


def tell(observer: Observer, event: Event) -> None:
    """Hand `event` to `observer`, dropping whatever it raises: an observer can never fail a save."""
    with contextlib.suppress(Exception):
        observer(event)
