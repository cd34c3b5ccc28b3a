"""Distributed training checkpoints in object stores: whole or absent, fenced, verified.

This menu needs neither torch nor a cloud client. `storage_writers` holds the faces for torch.distributed.checkpoint.
"""

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BusyError,
    CkptStoreError,
    CommitUnknownError,
    ConflictError,
    DisagreementError,
    FencedError,
    IncompatibleStateError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    ResumeError,
    StalledError,
    SupersededError,
    UnavailableError,
    UncommittedError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.store import Checkpoint, CheckpointStore, Key

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "AlreadyExistsError",
    "BusyError",
    "Checkpoint",
    "CheckpointStore",
    "CkptStoreError",
    "CommitUnknownError",
    "ConflictError",
    "DisagreementError",
    "FencedError",
    "IncompatibleStateError",
    "IntegrityError",
    "InvalidInputError",
    "Key",
    "LogOptions",
    "NotFoundError",
    "OutcomeUnknownError",
    "ResumeError",
    "StalledError",
    "SupersededError",
    "TransferOptions",
    "UnavailableError",
    "UncommittedError",
    "UnsafePickleError",
    "UnsupportedError",
]
