"""What `--json` prints, as plain values. People see the same values, so the two cannot differ.

The keys are stable: README.md beside this file lists them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ckptstore.checkpoint import Checkpoint, Key
from ckptstore.cli.access import pointed
from ckptstore.errors import CkptStoreError
from ckptstore.protocol.catalog import Uncommitted
from ckptstore.protocol.log import Entry
from ckptstore.protocol.verify import Verdict
from ckptstore.store import CheckpointStore

Document = dict[str, Any]

MAX_TENSORS = 20
"""So many of those that damage hits are named."""


def run_document(store: CheckpointStore) -> Document:
    """Return what every answer about a run begins with."""
    return {"url": store.url, "run": store.run, "lost_tail": store.lost_from}


def checkpoint_document(checkpoint: Checkpoint) -> Document:
    """Return one line of a list of checkpoints."""
    commit, committed = checkpoint.commit, checkpoint.committed
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "seq": checkpoint.seq,
        "global_step": checkpoint.global_step,
        "committed_at": checkpoint.committed_at,
        "saved_world_size": checkpoint.saved_world_size,
        "shards": commit.shards.count,
        "bytes": commit.shards.bytes,
        "term": commit.term,
        "attempt": commit.attempt,
        "parent": commit.parent,
        "set_aside": committed.set_aside,
        "pins": [{"holder": pin.holder, "reason": pin.reason} for pin in committed.pins],
        "verified": committed.verified,
        "proved": committed.proved,
        "metrics": commit.metrics,
    }


def details_document(checkpoint: Checkpoint) -> Document:
    """Return all that the commit record of a checkpoint says."""
    commit = checkpoint.commit
    return {
        **checkpoint_document(checkpoint),
        "record_blake3": checkpoint.committed.blake3,
        "prefix": commit.prefix,
        "parallelism": commit.parallelism,
        "training_state": commit.training_state,
        "fingerprints": commit.fingerprints,
        "tags": list(commit.tags),
        "software": commit.software,
        "parts": [ref.path for ref in commit.parts],
        "documents": None if commit.documents is None else commit.documents.path,
    }


def key_document(key: Key) -> Document:
    """Return what a checkpoint says of one key."""
    return {
        "name": key.name,
        "dtype": key.dtype,
        "shape": list(key.shape),
        "bytes": key.nbytes,
        "codec": key.codec,
    }


def attempt_document(attempt: Uncommitted) -> Document:
    """Return what is known of data without a commit."""
    modified = None if attempt.modified is None else datetime.fromtimestamp(attempt.modified, UTC)
    return {
        "checkpoint_id": attempt.stem.name,
        "attempt": attempt.stem.attempt,
        "term": attempt.stem.term,
        "prefix": str(attempt.stem),
        "state": attempt.state,
        "objects": attempt.objects,
        "bytes": attempt.bytes,
        "last_write": None if modified is None else modified.isoformat(timespec="seconds"),
    }


def reign_document(store: CheckpointStore) -> Document | None:
    """Return who claimed the run last, or None."""
    reign = store.reign
    if reign is None:
        return None
    return {
        "seq": reign.seq,
        "term": reign.term,
        "job": reign.job,
        "host": reign.host,
        "claimed_at": reign.written_at,
        "committed_since": store.reign_has_committed,
    }


def record_document(entry: Entry, ignored: Mapping[int, str]) -> Document:
    """Return a record with its bytes' own words."""
    return {
        "seq": entry.seq,
        "written_at": entry.envelope.written_at,
        "blake3": entry.blake3,
        "ignored": ignored.get(entry.seq),
        "record": json.loads(entry.body),
    }


def findings_of(verdict: Verdict, *, of_log: bool) -> list[Document]:
    """Return what a verification found in the log, or what it found in the data."""
    names = ("level", "kind", "key", "expected", "found", "message", "confirmed")
    return [
        {
            **{name: getattr(each, name) for name in names},
            "tensors": list(each.tensors[:MAX_TENSORS]),
            "tensor_count": len(each.tensors),
        }
        for each in verdict.findings
        if (each.level == "chain") is of_log
    ]


def error_document(error: CkptStoreError) -> Document:
    """Return an error as it is printed."""
    return {"error": error.code, "message": error.message, "hint": pointed(error.hint), "facts": error.facts}
