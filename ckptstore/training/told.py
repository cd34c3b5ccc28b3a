"""What is told of a resume that ended well, and of where a run is."""

from __future__ import annotations

import logging

from ckptstore.events import Observer, Resumed, Stepped, silent, tell
from ckptstore.protocol.fold import Committed
from ckptstore.training.progress import Progress
from ckptstore.training.report import ResumeReport

_log = logging.getLogger("ckptstore.training")

LOST = (
    "latest.json named slot %d, and the log of %s ended before it: its tail was lost. Newer checkpoints were "
    "committed and cannot be seen, and what this job writes takes the place of their records. To get them back, stop "
    "it now and restore the log's objects from a backup or earlier versions."
)


def tell_resumed(observer: Observer, report: ResumeReport, seconds: float, *, rank: int, is_own: bool) -> None:
    """Tell the observer what a run goes on from; on rank 0 log the report.

    Args:
        observer: Hears of it.
        report: Of a resume that was no fresh start.
        seconds: How long it took.
        rank: This one.
        is_own: The checkpoint is one of the run that goes on.
    """
    name, seq, changed = report.checkpoint_id, report.seq, report.saved_world_size != report.world_size
    if name is not None and seq is not None:  # it is not fresh
        event = Resumed(
            name,
            seq,
            report.global_step,
            report.steps_lost,
            seconds,
            changed,
            samples_lost=report.samples_lost if is_own else 0,
            committed_at=report.committed_at if is_own and rank == 0 else None,
        )
        tell(observer, event)
    if rank == 0:
        if report.lost_from is not None:
            _log.warning(LOST, report.lost_from, report.url)
        _log.info("%s", report.table())


def consumed(committed: Committed) -> int | None:
    """Return how many samples the run had trained on at a checkpoint; None if the run does not count them."""
    progress = committed.commit.training_state.get("progress")
    samples = progress.get("consumed_samples") if isinstance(progress, dict) else None
    return samples if isinstance(samples, int) and samples > 0 else None


def tell_step(observer: Observer, progress: Progress) -> None:
    """Tell the observer at which step the run is."""
    if observer is not silent:
        tell(observer, Stepped(progress.global_step))
