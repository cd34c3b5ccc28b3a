"""What a training tells an observer, beside what saving and loading tell."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.events import Event


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A run goes on from a checkpoint."""

    checkpoint_id: str
    seq: int
    global_step: int | None
    steps_lost: int | None
    seconds: float
    world_size_changed: bool


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
class KeepFailed(Event):
    """Something could not be retired, deleted, pinned or let go of. The training goes on, and so does the next try."""

    reason: str
