"""A job claims its run before it looks what is there: an older one that wakes commits nothing above the claim."""

from __future__ import annotations

from ckptstore.protocol.claim import Incarnation, Takeover
from ckptstore.protocol.log import RunLog
from ckptstore.training.asked import Asked
from storage_writers.incarnations import claim_at, reigning_at


def claim(asked: Asked, *, job: str | None, takeover: Takeover) -> None:
    """Claim the job's own run, and begin it if there is none. On rank 0.

    Raises:
        CkptStoreError: See `storage_writers.incarnations.claim_at` and `RunLog.create`.

    If killed: perhaps a run without a checkpoint, perhaps a claim. If it stands, everybody older is fenced.
    """
    log = RunLog.create(asked.root(), options=asked.log, observer=asked.observer)
    claim_at(log, job=job, takeover=takeover)


def incarnation_at(asked: Asked) -> Incarnation | None:
    """Return as what this process saves to the run; None if that is not decided yet."""
    return reigning_at(asked.root().url)
