"""The fold below a slot, read back from `state/`: a hint that counts only with the hash in the log."""

from __future__ import annotations

from blake3 import blake3

from ckptstore.errors import InvalidInputError
from ckptstore.format import canonical
from ckptstore.format.canonical import read_fields
from ckptstore.format.records import Commit, Envelope, read_record
from ckptstore.format.strict_json import parse_json
from ckptstore.format.version import FORMAT
from ckptstore.protocol.fold import Committed, Fold, Pinned, Reign, Tip
from ckptstore.units import MIB

MAX_STATE_BYTES = 64 * MIB
MAX_SLOT_DIGITS = 19


def fold_from_state(body: bytes, above: Envelope) -> Fold | None:
    """Return the fold in `body` if the record above it vouches for these very bytes, else None (I10).

    Args:
        body: What stands under `state/`, or anything else.
        above: Envelope of the record whose `fold` the body must have as its hash.
    """
    if above.fold is None or blake3(body).hexdigest() != above.fold:
        return None
    value = canonical.table(parse_json(body, what="A fold"))
    canonical.check_written(value)  # it is folded on
    if value.get("format") != FORMAT:
        return None
    fold = read_fields(
        Fold,
        {key: inner for key, inner in value.items() if key not in ("ignored", "stopped")},
        run_blake3=canonical.digest,
        last=canonical.digest,
        claim=canonical.optional(lambda claim: read_fields(Reign, claim)),
        tip=canonical.optional(lambda tip: read_fields(Tip, tip)),
        reigns=canonical.mapping(canonical.integer),
        commits=lambda commits: {each.seq: each for each in canonical.sequence(_committed)(commits)},
        retired=lambda retired: {_slot(seq): canonical.text(gone) for seq, gone in canonical.table(retired).items()},
    )
    return fold if (fold.end, fold.last, fold.run) == (above.seq, above.prev, above.run) else None


def _committed(value: object) -> Committed:
    return read_fields(
        Committed,
        value,
        commit=_commit,
        pins=canonical.sequence(lambda pin: read_fields(Pinned, pin)),
    )


def _slot(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_SLOT_DIGITS):
        raise InvalidInputError(f"expected a slot, found {text[:80]!r}.")
    return canonical.integer(int(text))


def _commit(value: object) -> Commit:
    commit = read_record(Commit.KIND, value)
    if not isinstance(commit, Commit):
        raise InvalidInputError("expected a commit.")
    return commit
