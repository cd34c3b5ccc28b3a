"""A job claims its run before it looks what is there: an older one that wakes commits nothing above the claim."""

from __future__ import annotations

from ckptstore.errors import ResumeError
from ckptstore.protocol.claim import Incarnation, Takeover
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.lost import check_not_lost
from ckptstore.training.asked import Asked
from ckptstore.units import counted
from storage_writers.incarnations import claim_at, has_loaded, reigning_at


def claim(asked: Asked, *, job: str | None, takeover: Takeover) -> int | None:
    """Claim the job's own run, and begin it if there is none. On rank 0.

    Returns:
        The slot from which on the log had lost records before, as far as is known: the claim may stand there now.

    Raises:
        IntegrityError: The run's log was lost. Nothing was written, so that it can be made again.
        CkptStoreError: See `storage_writers.incarnations.claim_at` and `RunLog.create`.

    If killed: perhaps a run without a checkpoint, perhaps a claim. If it stands, everybody older is fenced.
    """
    log = RunLog.create(asked.root(), options=asked.log, observer=asked.observer)
    claim_at(log, job=job, takeover=takeover)
    return log.lost_from


def check_goes_on(asked: Asked) -> None:
    """Check that what this process saves goes on from the run's checkpoints, if it has any. On rank 0.

    A process that loaded one of them goes on from it, whoever did so; and so does one whose own commits are above.

    Raises:
        ResumeError: There are checkpoints, and it would be the newest and go on from none of them.
        IntegrityError: The run's log was lost.
        CkptStoreError: The log could not be read.
    """
    log, own = RunLog.open(asked.root(), options=asked.log, observer=asked.observer), incarnation_at(asked)
    check_not_lost(log)
    kept = log.fold.kept
    if not kept or has_loaded(log.store.url, log.fold.run):
        return
    newest = kept[-1].commit
    if own is None or newest.term != log.fold.reigns.get(own.id):
        raise ResumeError(
            f"The run at {log.store.url} has {counted(len(kept), 'checkpoint')}, the newest of step "
            f"{newest.global_step}, and this process has resumed none: what is saved now would be the newest, and go "
            "on from none of them. Nothing was saved.",
            hint="Call resume() before the first step. To begin anew, name another URL.",
            newest_step=newest.global_step,
        )


def incarnation_at(asked: Asked) -> Incarnation | None:
    """Return as what this process saves to the run; None if that is not decided yet."""
    return reigning_at(asked.root().url)
