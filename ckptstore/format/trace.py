"""`trace.json`: what a run did right after a checkpoint. JSON with a seal, outside of the commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format import canonical
from ckptstore.format.canonical import canonical_json, read_fields
from ckptstore.format.seal import check_signed, seal, signed, split_signature, unsealed
from ckptstore.format.strict_json import parse_json
from ckptstore.format.version import FORMAT, INSTALL_HINT
from ckptstore.signing import TRACE, Signing
from ckptstore.units import MIB

MAX_TRACE_BYTES = 1 * MIB
KIND = "trace"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What stands in `trace.json`.

    Args:
        seq: Slot of the commit that it follows.
        record_blake3: Of that commit's record: a trace of another checkpoint is none of this one.
        trace: What was observed, as JSON.
        kind: Always `trace`.
        format: Version of the file.
    """

    seq: int
    record_blake3: str
    trace: dict[str, Any]
    kind: str = KIND
    format: int = FORMAT


def encode_trace(trace: Mapping[str, Any], *, seq: int, record_blake3: str, signing: Signing | None = None) -> bytes:
    """Return the bytes of `trace.json`: canonical JSON, perhaps a signature, and the seal.

    Raises:
        InvalidInputError: It holds something that is no JSON, is nested too deeply, or takes more than 1 MiB.
    """
    value = {"format": FORMAT, "kind": KIND, "record_blake3": record_blake3, "seq": seq, "trace": dict(trace)}
    head = canonical_json(value, what="The trace", max_depth=canonical.MAX_DEPTH - 1)[:-1]
    head = signed(head, signing, domain=TRACE)
    body = head + seal(head)
    if len(body) > MAX_TRACE_BYTES:
        raise InvalidInputError(
            f"The trace takes {len(body)} bytes, {MAX_TRACE_BYTES} are allowed.",
            hint="Observe fewer steps.",
            size=len(body),
        )
    return body


def decode_trace(
    body: bytes, *, seq: int, record_blake3: str, key: str, signing: Signing | None = None
) -> dict[str, Any]:
    """Return what was observed after the commit in slot `seq`; non-finite numbers are the texts that JSON holds.

    Raises:
        IntegrityError: It is damaged, is the trace of another commit, or must be signed and is not.
        UnsupportedError: A later release wrote it.
    """
    head = unsealed(body) if len(body) <= MAX_TRACE_BYTES else None
    if head is None:
        raise _damaged(key, "is cut, altered or too long")
    head, signature = split_signature(head)
    if signing is not None and signing.requires(seq):  # before any of it is read
        check_signed(head, signature, signing, key=key, domain=TRACE)
    try:
        plain = parse_json(head + b"}", what=key)
        canonical.check_written(plain)
        found = read_fields(TraceFile, plain, record_blake3=canonical.digest)
    except (InvalidInputError, IntegrityError) as error:
        raise _damaged(key, f"is not what was written: {error.message}") from error
    if found.format > FORMAT:
        raise UnsupportedError(
            f"{key} has format {found.format}, this release knows {FORMAT}.",
            hint=INSTALL_HINT,
            key=key,
            format=found.format,
        )
    right = (KIND, seq, record_blake3)
    if (found.kind, found.seq, found.record_blake3) != right:
        raise _damaged(
            key,
            f"is the {found.kind[:80]} of slot {found.seq} ({found.record_blake3}), not of {seq} ({record_blake3})",
            expected=record_blake3,
            found=found.record_blake3,
        )
    return found.trace


def _damaged(key: str, what: str, **facts: object) -> IntegrityError:
    hint = "Resume without it: a damaged trace proves nothing, and the checkpoint itself is not touched by it."
    return IntegrityError(f"{key} {what}.", hint=hint, key=key, **facts)
