"""Distributed training checkpoints in object stores: whole or absent, fenced, verified.

This menu needs neither torch nor a cloud client. `storage_writers` holds the faces for torch.distributed.checkpoint.
"""

from ckptstore.checkpoint import Checkpoint, Key
from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
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
from ckptstore.events import Observer
from ckptstore.format.records import Commit
from ckptstore.format.value_types import ValueTypes
from ckptstore.maintenance.repair import Repair
from ckptstore.maintenance.scrub import Scrub
from ckptstore.options import LogOptions, RetryOptions, TransferOptions
from ckptstore.protocol.catalog import Uncommitted
from ckptstore.protocol.fold import Committed, Ignored, Reign
from ckptstore.protocol.log import Entry
from ckptstore.protocol.verify import Finding, Verdict
from ckptstore.store import CheckpointStore

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "AlreadyExistsError",
    "Checkpoint",
    "CheckpointStore",
    "CkptStoreError",
    "Commit",
    "CommitUnknownError",
    "Committed",
    "ConflictError",
    "DisagreementError",
    "Entry",
    "FencedError",
    "Finding",
    "Ignored",
    "IncompatibleStateError",
    "IntegrityError",
    "InvalidInputError",
    "Key",
    "LogOptions",
    "NotFoundError",
    "Observer",
    "OutcomeUnknownError",
    "Reign",
    "Repair",
    "ResumeError",
    "RetryOptions",
    "Scrub",
    "StalledError",
    "SupersededError",
    "TransferOptions",
    "UnavailableError",
    "Uncommitted",
    "UncommittedError",
    "UnsafePickleError",
    "UnsupportedError",
    "ValueTypes",
    "Verdict",
]
