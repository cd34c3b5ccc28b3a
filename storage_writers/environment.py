"""What the launcher says in the environment. Nothing else here reads it."""

from __future__ import annotations

import os
import re

from ckptstore.errors import InvalidInputError

_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


def job_name() -> str | None:
    """Return what the scheduler calls this job; None if it has no name.

    torchrun without `--rdzv-id` calls every job `none`.
    """
    names = (os.environ.get(variable, "").strip() for variable in _JOB_NAMES)
    return next((name for name in names if name not in {"", "none"}), None)


def started() -> int:
    """Return how many processes the launcher says that it started.

    Raises:
        InvalidInputError: It says something that is no number.
    """
    said = os.environ.get("WORLD_SIZE") or "1"
    if re.fullmatch("[1-9][0-9]{0,8}", said) is None:
        raise InvalidInputError(
            f"WORLD_SIZE is {said!r:.80} in the environment, which is no number of processes.",
            hint="Unset it, or set it to what the launcher started; allow_one_rank=True saves from this process alone.",
        )
    return int(said)


def ranks_here() -> int:
    """Return how many ranks the launcher says share this machine's memory; 1 if it says nothing that is a number."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    return int(said) if re.fullmatch("[1-9][0-9]{0,4}", said) else 1
