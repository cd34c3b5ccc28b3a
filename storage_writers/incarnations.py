"""One incarnation per process and run root, however many writers there are: a process never fences itself (I15)."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.claim import Incarnation, Takeover, claim
from ckptstore.protocol.log import RunLog
from storage_writers import environment
from storage_writers.roots import open_root

UNNAMED = "unnamed"
"""What a claim says of a job without a name. It is nobody's name: two such jobs are not the same."""


@dataclass
class Reign:
    """This process at one run root.

    Args:
        incarnation: As which it saves there.
        run: The run's identity; None until it was read.
    """

    incarnation: Incarnation
    run: str | None = None


_reigns: dict[str, Reign] = {}
_loaded: dict[str, tuple[str, int]] = {}
_lock = threading.Lock()


def reign_at(root: str, run: str | None, *, job: str | None = None) -> Reign:
    """Return as what this process saves at a root, deciding it at the first call.

    Args:
        root: The store's URL.
        run: The run's identity there, if it is known. If it is another one than before, the run was made anew.
        job: What the scheduler calls this job; by default what it says in the environment.

    Raises:
        InvalidInputError: This process saves there as another job.
    """
    with _lock:
        reign = _reigns.get(root)
        if reign is None or (run is not None and reign.run not in (None, run)):
            reign = _reigns[root] = Reign(Incarnation.new(job=job or environment.job_name() or UNNAMED))
        elif job is not None and job != reign.incarnation.job:
            raise InvalidInputError(
                f"This process saves to {root} as job {reign.incarnation.job!r} and cannot be job {job!r} too.",
                hint="Give all writers of a process the same job=, or call begin_incarnation(url) in between.",
                job=job,
                reigning=reign.incarnation.job,
            )
        reign.run = run or reign.run
        loaded = _loaded.get(root)
        if loaded is not None and loaded[0] == reign.run:
            reign.incarnation.loaded = loaded[1]
        return reign


def adopt(root: str, reign: Reign) -> None:
    """Let this process save as what a writer brought along from the process that started it."""
    with _lock:
        _reigns.setdefault(root, reign)


def begin_incarnation(root: str | os.PathLike[str] | ObjectStore) -> None:
    """Let this process save at a root as a new incarnation: after a roll-back, what it saved before is another lineage.

    Its next save claims the run anew, which fences its saves that are still under way.

    Args:
        root: What the writers are given: the URL or path, or the open store.

    Raises:
        InvalidInputError: It is no root.
    """
    with _lock:
        _reigns.pop(open_root(root).url, None)


def claim_at(log: RunLog, *, job: str | None = None, takeover: Takeover = "always") -> Incarnation:
    """Let this process reign at a run before it saves there: who reigned before commits nothing above the claim.

    Args:
        log: Open for writing, just now.
        job: As the writers are given it.
        takeover: The same.

    Raises:
        FencedError: A newer incarnation has claimed the run.
        ConflictError: `takeover` is `same_job` and another job holds the run.
        InvalidInputError: This process saves there as another job.
        CommitUnknownError: Whether the claim stands is not known; the next call finds out.
        CkptStoreError: The log is damaged or was lost, or the store could not be read or written.

    If killed: perhaps a claim. If it stands, everybody older is fenced.
    """
    incarnation = reign_at(log.store.url, log.run, job=job).incarnation
    incarnation.check()
    log.fold.whole()
    log.check_tail()
    claim(log, incarnation, takeover=takeover)
    return incarnation


def reigning_at(root: str) -> Incarnation | None:
    """Return as what this process saves at a root; None if that is not decided yet."""
    with _lock:
        reign = _reigns.get(root)
        return reign.incarnation if reign else None


def note_loaded(root: str, run: str, seq: int) -> None:
    """Remember what this process loaded: the parent of its first commit."""
    with _lock:
        _loaded[root] = (run, seq)


def has_loaded(root: str, run: str) -> bool:
    """Say whether this process has loaded a checkpoint of this very run."""
    with _lock:
        return root in _loaded and _loaded[root][0] == run


def check_named(job: str | None, takeover: Takeover) -> None:
    """Check that `same_job` has a name to compare.

    Raises:
        InvalidInputError: Neither the user nor the scheduler says what this job is called.
    """
    if takeover == "same_job" and not (job or environment.job_name()):
        raise InvalidInputError(
            "takeover='same_job' compares jobs by name, and this one has none.",
            hint="Pass job='...', the same at every start of this job, or start it with torchrun --rdzv-id.",
            option="job",
        )
