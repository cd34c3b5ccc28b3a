"""One incarnation per process and run root, however many writers there are: a process never fences itself (I15)."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.claim import Incarnation

_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


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
    """
    with _lock:
        reign = _reigns.get(root)
        if reign is None or (run is not None and reign.run not in (None, run)):
            reign = _reigns[root] = Reign(Incarnation.new(job=job or job_name()))
        reign.run = run or reign.run
        loaded = _loaded.get(root)
        if loaded is not None and loaded[0] == reign.run:
            reign.incarnation.loaded = loaded[1]
        return reign


def adopt(root: str, reign: Reign) -> None:
    """Let this process save as what a writer brought along from the process that started it."""
    with _lock:
        _reigns.setdefault(root, reign)


def begin_incarnation(root: str | os.PathLike[str]) -> None:
    """Let this process save at a root as a new incarnation: after a roll-back, what it saved before is another lineage.

    Its next save claims the run anew, which fences its saves that are still under way.

    Args:
        root: The URL or path that the writers are given.

    Raises:
        InvalidInputError: It is no root.
    """
    with _lock:
        _reigns.pop(open_store(root).url, None)


def note_loaded(root: str, run: str, seq: int) -> None:
    """Remember what this process loaded: the parent of its first commit."""
    with _lock:
        _loaded[root] = (run, seq)


def job_name() -> str:
    """Return what the scheduler calls this job, or `unnamed`."""
    return next((name for variable in _JOB_NAMES if (name := os.environ.get(variable))), "unnamed")
