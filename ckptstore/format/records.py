"""Records of the log, `run.json` and `latest.json`: canonical JSON with a seal.

A record is one JSON object with sorted keys, no spaces, UTF-8, one newline at the end, at most 64 KiB. Its last key is
`self`, the BLAKE3 of all bytes before it, so that the newest record is protected too, to which no other links yet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from blake3 import blake3

from ckptstore.errors import IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format import canonical
from ckptstore.format.canonical import canonical_json, read_fields
from ckptstore.format.codec import PartRef, ref_from, ref_value
from ckptstore.format.columns import Fault
from ckptstore.format.layout import LATEST_KEY, RUN_KEY, Stem, own_key, slot_key
from ckptstore.format.seal import SEAL_BYTES, check_signed, seal, signed, split_signature, unsealed
from ckptstore.format.strict_json import parse_json
from ckptstore.format.version import FORMAT, INSTALL_HINT
from ckptstore.signing import Signing
from ckptstore.units import KIB

MAX_RECORD_BYTES = 64 * KIB
MAX_HINT_BYTES = 16 * KIB
FOLD_EVERY = 64
"""Every record whose seq is a multiple of this carries the hash of the fold below it."""

QUARANTINED, ABANDONED = "quarantined", "abandoned"
"""Why a checkpoint is set aside: it is damaged, or the run went back to before it."""
LEVELS = ("chain", "exists", "etag", "full")
"""How far a verification goes, the weakest first."""

COMMITTED = "COMMITTED"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every record says beside its own fields.

    Args:
        format: Version of the record.
        run: Identity of the run.
        seq: The slot it was made for.
        writer: A nonce made for this record alone: equal bytes are the same record.
        written_at: For people; nothing is decided by it.
        prev: BLAKE3 of the record before; of `run.json` in slot 0.
        fold: BLAKE3 of the canonical fold below this slot, where seq is a multiple of 64.
    """

    format: int
    run: str
    seq: int
    writer: str
    written_at: str
    prev: str
    fold: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """An incarnation begins its reign."""

    KIND: ClassVar[str] = "CLAIM"
    term: int
    incarnation: str
    job: str
    host: str


@dataclass(frozen=True, slots=True)
class ShardTotals:
    """How many shards a commit has, and their bytes together."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The manifest that makes an attempt a checkpoint.

    Args:
        checkpoint_id: Its name, a label.
        global_step: Its step, a label.
        term: The committing incarnation's.
        attempt: Number of the attempt within the term.
        parent: seq of the checkpoint it goes on from.
        prefix: The attempt's stem as text.
        saved_world_size: Ranks in the save's group.
        parallelism: Degrees by name: dp, tp, pp and so on.
        training_state: Counters such as epoch and consumed_samples, as JSON.
        fingerprints: Digests by name.
        metrics: Numbers by name; non-finite ones are allowed.
        tags: Labels.
        shards: Totals.
        parts: Where the shards are described.
        documents: What stands behind the fingerprints.
        software: Versions by name.
    """

    KIND: ClassVar[str] = "COMMIT"
    checkpoint_id: str
    global_step: int | None
    term: int
    attempt: int
    parent: int | None
    prefix: str
    saved_world_size: int
    parallelism: dict[str, int]
    training_state: dict[str, Any]
    fingerprints: dict[str, str]
    metrics: dict[str, float]
    tags: tuple[str, ...]
    shards: ShardTotals
    parts: tuple[PartRef, ...]
    documents: PartRef | None
    software: dict[str, str]
    borrows: tuple[()] = ()
    status: str = COMMITTED

    @property
    def stem(self) -> Stem:
        """The attempt that it commits."""
        stem = Stem.parse(self.prefix)
        if stem is None:
            raise IntegrityError(f"{self.prefix[:200]!r} does not name an attempt.", found=self.prefix[:200])
        return stem


@dataclass(frozen=True, slots=True)
class SetAside:
    """These are no longer selectable by default; nothing is deleted. `note` says what was seen."""

    KIND: ClassVar[str] = "SET_ASIDE"
    seqs: tuple[int, ...]
    reason: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Restore:
    """These are selectable again."""

    KIND: ClassVar[str] = "RESTORE"
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retire:
    """These will be deleted; final. A trainer's carries its term and is fenced like a commit."""

    KIND: ClassVar[str] = "RETIRE"
    seqs: tuple[int, ...]
    reason: str
    term: int | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """The bytes of these retired ones are gone."""

    KIND: ClassVar[str] = "COLLECTED"
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """This one is not to be retired while `holder` holds it."""

    KIND: ClassVar[str] = "PIN"
    target: int
    holder: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unpin:
    """`holder` lets go of it."""

    KIND: ClassVar[str] = "UNPIN"
    target: int
    holder: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A verification at this level found nothing wrong."""

    KIND: ClassVar[str] = "VERIFIED"
    target: int
    level: str


@dataclass(frozen=True, slots=True)
class Proved:
    """A resume from it was compared with the run that it continues."""

    KIND: ClassVar[str] = "PROVED"
    target: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A record of a later release. Only an optional one may be passed over."""

    kind: str
    optional: bool
    format: int = FORMAT


Known = Claim | Commit | SetAside | Restore | Retire | Collected | Pin | Unpin | Verified | Proved
Record = Known | Unknown

_KINDS: dict[str, type[Known]] = {
    kind.KIND: kind for kind in (Claim, Commit, SetAside, Restore, Retire, Collected, Pin, Unpin, Verified, Proved)
}


@dataclass(frozen=True, slots=True)
class RunFile:
    """`run.json`: which run this is."""

    run: str
    created_at: str
    created_by: str
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class LatestHint:
    """`latest.json`: where the newest commit was when this was written. Never believed."""

    seq: int
    record_blake3: str
    checkpoint_id: str
    global_step: int | None
    committed_at: str


def encode_record(record: Known, envelope: Envelope, *, signing: Signing | None = None) -> bytes:
    """Return the record's bytes, which are made once per slot and re-sent unchanged.

    Raises:
        InvalidInputError: A field is not what it must be, or the record is larger than 64 KiB.
    """
    value = {**record_fields(record), **{key: at for key, at in asdict(envelope).items() if at is not None}}
    value["kind"] = record.KIND
    head = signed(canonical_json(value)[:-1], signing)
    body = head + seal(head)
    if len(body) > MAX_RECORD_BYTES:
        raise InvalidInputError(
            f"The {record.KIND} record takes {len(body)} bytes, {MAX_RECORD_BYTES} are allowed.",
            hint="Shorten its texts, or name fewer checkpoints at once.",
            size=len(body),
        )
    try:
        decode_record(body, seq=envelope.seq, run=envelope.run)  # what is written can be read
    except IntegrityError as error:
        raise InvalidInputError(f"This {record.KIND} record cannot be written: {error.message}") from error
    return body


def decode_record(body: bytes, *, seq: int, run: str, signing: Signing | None = None) -> tuple[Envelope, Record, str]:
    """Return the envelope, the record and the BLAKE3 of the bytes that stand in slot `seq` of `run`.

    A higher format, an unknown kind and a commit that borrows come back as `Unknown`: what they do to an answer is the
    fold's business.

    Raises:
        IntegrityError: The bytes are not what was written there; slot, expected and found are named. Or they must be
            signed by a key that is trusted, and are not.
    """
    key = slot_key(seq)
    head = body[:-SEAL_BYTES]
    if len(body) > MAX_RECORD_BYTES or body[len(head) :] != seal(head):
        expected, found = blake3(head).hexdigest(), body[len(head) :][-67:-3].decode(errors="replace")
        raise _damaged(key, "is cut, altered or too long", expected=expected, found=found)
    head, signature = split_signature(head)
    if signing is not None and signing.requires(seq):  # before any of it is read
        check_signed(head, signature, signing, key=key)
    try:
        value = canonical.table(_parsed(head + b"}", key))
        envelope = read_fields(Envelope, value, prev=canonical.digest, fold=canonical.optional(canonical.digest))
        kind = canonical.text(value.get("kind"))
    except (InvalidInputError, IntegrityError) as error:
        raise _damaged(key, f"is no record: {error.message}") from error
    if envelope.run != run:
        raise _damaged(key, "is of another run", expected=run, found=envelope.run)
    if envelope.seq != seq:
        raise _damaged(key, "was written for another slot", expected=seq, found=envelope.seq)
    record: Record
    if envelope.format < 1:
        raise _damaged(key, "has no format", expected=FORMAT, found=envelope.format)
    if envelope.format > FORMAT or kind not in _KINDS or (kind == Commit.KIND and value.get("borrows") != []):
        record = Unknown(kind, value.get("optional") is True, envelope.format)
    else:
        try:
            record = read_record(kind, value)
        except (InvalidInputError, IntegrityError) as error:
            raise _damaged(key, f"is no {kind} of format {FORMAT}: {error.message}", **error.facts) from error
    return envelope, record, blake3(body).hexdigest()


def record_fields(record: Known) -> dict[str, Any]:
    """Return the record's own fields as JSON values, without kind and envelope."""
    return {each.name: _plain(getattr(record, each.name)) for each in fields(record)}


def read_record(kind: str, value: object) -> Known:
    """Return the record of `kind` whose fields stand in `value`; unknown keys are ignored.

    Raises:
        InvalidInputError: A field is missing or wrong.
        IntegrityError: A path does not lie under the commit's own attempt.
    """
    if kind != Commit.KIND:
        record = read_fields(_KINDS[kind], value)
        if isinstance(record, SetAside) and record.reason not in (QUARANTINED, ABANDONED):
            raise InvalidInputError(f"{record.reason[:80]!r} is no reason to set a checkpoint aside.")
        if isinstance(record, Verified) and record.level not in LEVELS:
            raise InvalidInputError(f"{record.level[:80]!r} is no level of verification.")
        return record
    commit = read_fields(
        Commit,
        value,
        shards=lambda shards: read_fields(ShardTotals, shards),
        parts=canonical.sequence(_part_ref),
        documents=canonical.optional(_part_ref),
        borrows=lambda _: (),
    )
    _check_commit(commit)
    return commit


def _part_ref(value: object) -> PartRef:
    try:
        return ref_from(value)
    except Fault as fault:
        raise InvalidInputError(f"a part {fault}.") from fault


def _check_commit(commit: Commit) -> None:
    stem = commit.stem
    if commit.status != COMMITTED or commit.saved_world_size < 1 or commit.attempt < 1 or not commit.parts:
        raise InvalidInputError("status, saved_world_size, attempt or parts are not those of a commit.")
    if (stem.name, stem.term, stem.attempt) != (commit.checkpoint_id, commit.term, commit.attempt):
        raise InvalidInputError(f"the attempt {stem} is not the one that the fields name.")
    for ref in commit.parts:
        if own_key(ref.path, stem=stem, what="The commit").part is None:
            raise InvalidInputError(f"{ref.path} is no part.")
    if commit.documents is not None and commit.documents.path != stem.fingerprints_key:
        own_key(commit.documents.path, stem=stem, what="The commit")
        raise InvalidInputError(f"{commit.documents.path} does not hold documents.")


def _plain(value: Any) -> Any:
    if isinstance(value, PartRef):
        return ref_value(value)
    if isinstance(value, ShardTotals):
        return asdict(value)
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def _parsed(body: bytes, key: str) -> Any:
    value = parse_json(body, what=key)
    canonical.check_written(value)  # first: what is read of it may be shown, and shall be folded
    return value


def _damaged(key: str, what: str, **facts: object) -> IntegrityError:
    shown = "".join(f", {name} {facts[name]}" for name in ("expected", "found") if name in facts)
    return IntegrityError(f"{key} {what}{shown}.", hint="Run `ckptstore verify URL --level chain`.", key=key, **facts)


def encode_run(run: RunFile) -> bytes:
    """Return the bytes of `run.json`."""
    return canonical_json(asdict(run)) + b"\n"


def decode_run(body: bytes) -> RunFile:
    """Return what `run.json` says; that not one bit of it changed is shown by `prev` of slot 0.

    Raises:
        IntegrityError: It is damaged.
        UnsupportedError: A newer release wrote it.
    """
    try:
        run = read_fields(RunFile, _parsed(body, RUN_KEY))
    except (InvalidInputError, IntegrityError) as error:
        raise _damaged(RUN_KEY, f"is not what was written: {error.message}") from error
    if run.format > FORMAT:
        raise UnsupportedError(
            f"The run has format {run.format}, this release knows {FORMAT}.", hint=INSTALL_HINT, format=run.format
        )
    return run


def encode_latest(hint: LatestHint) -> bytes:
    """Return the bytes of `latest.json`, sealed like a record: a damaged one must not look like a lost tail (I10)."""
    head = canonical_json(asdict(hint))[:-1]
    return head + seal(head)


def decode_latest(body: bytes) -> LatestHint:
    """Return what `latest.json` says.

    Raises:
        CkptStoreError: It says nothing that could be followed.
    """
    head = unsealed(body)
    if head is None:
        raise _damaged(LATEST_KEY, "is cut or altered")
    return read_fields(LatestHint, _parsed(head + b"}", LATEST_KEY), record_blake3=canonical.digest)
