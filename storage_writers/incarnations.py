"""One incarnation per process and run, however many writers there are: a process never fences itself (I15)."""

from __future__ import annotations

import os
import threading

from ckptstore.protocol.claim import Incarnation

_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")

_by_run: dict[str, Incarnation] = {}
_loaded: dict[str, int] = {}
_lock = threading.Lock()


def incarnation_of(run: str, *, job: str | None = None) -> Incarnation:
    """Return this process's incarnation for a run, making it at the first call.

    Args:
        run: The run's identity, from its `run.json`.
        job: What the scheduler calls this job; by default what it says in the environment.
    """
    with _lock:
        if run not in _by_run:
            _by_run[run] = _new(run, job)
        return _by_run[run]


def adopt(run: str, incarnation: Incarnation) -> None:
    """Let this process save as `incarnation`, which a writer brought from the process that started it."""
    with _lock:
        _by_run.setdefault(run, incarnation)


def begin_incarnation(run: str, *, job: str | None = None) -> Incarnation:
    """Begin a new incarnation of this process for a run: after a roll-back, what it saved before is another lineage.

    Its next save claims the run anew, which fences saves of this process that are still under way.
    """
    with _lock:
        _by_run[run] = _new(run, job)
        return _by_run[run]


def _new(run: str, job: str | None) -> Incarnation:
    incarnation = Incarnation.new(job=job or job_name())
    incarnation.loaded = _loaded.get(run)
    return incarnation


def note_loaded(run: str, seq: int) -> None:
    """Remember what this process loaded: the parent of its first commit."""
    with _lock:
        _loaded[run] = seq
        if run in _by_run:
            _by_run[run].loaded = seq


def job_name() -> str:
    """Return what the scheduler calls this job, or `unnamed`."""
    return next((name for variable in _JOB_NAMES if (name := os.environ.get(variable))), "unnamed")
