"""What a command exits with: one table for the code, for `--help` and for scripts."""

from __future__ import annotations

from enum import IntEnum

from ckptstore.errors import (
    AccessDeniedError,
    BusyError,
    CkptStoreError,
    ConflictError,
    DisagreementError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    ResumeError,
    StalledError,
    SupersededError,
    UnavailableError,
    UncommittedError,
    UnsupportedError,
)


class Exit(IntEnum):
    """Exit codes. They are stable."""

    FINE = 0
    BAD = 1
    INPUT = 2
    ABSENT = 3
    STORE = 4
    CONFLICT = 5
    UNSUPPORTED = 6
    INTERNAL = 7
    STOPPED = 130
    PIPE = 141


MEANINGS = {
    Exit.FINE: "fine",
    Exit.BAD: "damage was found, nothing is there that may be selected, or a drill failed",
    Exit.INPUT: "bad usage or input",
    Exit.ABSENT: "what was named is not there, or never was committed",
    Exit.STORE: "the store is unavailable, denies access, or the outcome is unknown",
    Exit.CONFLICT: "somebody else was first, or took the run over",
    Exit.UNSUPPORTED: "this store cannot do it, or a newer version wrote this",
    Exit.INTERNAL: "a fault of the program itself",
    Exit.STOPPED: "stopped by you; what was asked for may not be done",
}

_BY_ERROR: dict[Exit, tuple[type[CkptStoreError], ...]] = {
    Exit.BAD: (IntegrityError, ResumeError),
    Exit.INPUT: (InvalidInputError,),
    Exit.ABSENT: (NotFoundError, UncommittedError),
    Exit.STORE: (UnavailableError, AccessDeniedError, OutcomeUnknownError, StalledError),
    Exit.CONFLICT: (ConflictError, FencedError, SupersededError, BusyError, DisagreementError),
    Exit.UNSUPPORTED: (UnsupportedError,),
}

EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code.value:3}  {meaning}" for code, meaning in MEANINGS.items())
"""What `--help` says. The first character keeps the lines as they are."""


def exit_for(error: CkptStoreError) -> Exit:
    """Return the exit code of an error."""
    return next((code for code, kinds in _BY_ERROR.items() if isinstance(error, kinds)), Exit.INTERNAL)
