"""The trace of a checkpoint: written once by its own writer after the commit. Nothing depends on it but a proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptstore.errors import ConflictError, IntegrityError, NotFoundError, OutcomeUnknownError
from ckptstore.format.trace import MAX_TRACE_BYTES, decode_trace, encode_trace
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.capable import require_capable
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.once import Outcome, create_once
from ckptstore.protocol.reading import get_if_there
from ckptstore.signing import Signing


def write_trace(
    log: RunLog, committed: Committed, trace: Mapping[str, Any], *, deadline_seconds: float | None = None
) -> None:
    """Create the trace of `committed`, once; the same trace again changes nothing.

    Args:
        log: Open for writing.
        committed: Whose run goes on. Only whoever wrote it knows what came after.
        trace: What was observed, as JSON.
        deadline_seconds: How long it is tried; by default as long as an append to the log is.

    Raises:
        InvalidInputError: The trace is no JSON, or takes more than 1 MiB.
        NotFoundError: The checkpoint is not kept any more.
        ConflictError: It has another trace. That one stays (I6).
        OutcomeUnknownError: Whether it was stored is not known; try again with the same trace.
        UnsupportedError: A later release wrote to this log, or the store cannot create only-if-absent.
        UnavailableError: It was not stored. AccessDeniedError: the store refused.

    If killed: the whole trace is there or none; a request under way may still land. The checkpoint is the same.
    """
    signing = log.options.signing
    body = encode_trace(trace, seq=committed.seq, record_blake3=committed.blake3, signing=signing)
    key = committed.commit.stem.trace_key
    kept = log.refresh().whole().commits.get(committed.seq)
    if kept is None or kept.blake3 != committed.blake3:  # nothing is written under what a collection may have seen (I7)
        raise NotFoundError(
            f"{committed.exact_name} is not kept any more: its trace is dropped.",
            hint="Nothing is lost but the proof of a resume from it.",
            seq=committed.seq,
        )
    require_capable(log.store, log.ids, single_writer=log.options.assume_single_writer)
    options = log.options if deadline_seconds is None else replace(log.options, deadline_seconds=deadline_seconds)
    try:
        outcome, _ = create_once(log.store, key, body, clock=log.clock, ids=log.ids, options=options)
    except IntegrityError:  # what stands there is longer than ours
        outcome = Outcome.OTHER
    if outcome is Outcome.OTHER:  # I6
        raise ConflictError(
            f"{key} holds another trace already.", hint="Leave it: a checkpoint has one trace, the first.", key=key
        )
    if outcome is Outcome.UNKNOWN:
        raise OutcomeUnknownError(
            f"Whether {key} was stored is not known.", hint="Write the same trace again, or go on without.", key=key
        )


def read_trace(store: ObjectStore, committed: Committed, *, signing: Signing | None = None) -> dict[str, Any] | None:
    """Return the trace of `committed`; None if it has none.

    Raises:
        IntegrityError: It is damaged, or must be signed and is not. The checkpoint is none the worse.
        UnsupportedError: A later release wrote it.
        CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ...
    """
    key = committed.commit.stem.trace_key
    body = get_if_there(store, key, max_bytes=MAX_TRACE_BYTES)
    if body is None:
        return None
    return decode_trace(body, seq=committed.seq, record_blake3=committed.blake3, key=key, signing=signing)
