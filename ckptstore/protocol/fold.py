"""What all records up to a slot say together. Pure: no store, no clock.

A record is valid only against the fold of all slots below its own. A fold passes over a record that was not valid at
its slot, and says so, so that a faulty tool is harmless; a record that does not link is damage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from blake3 import blake3

from ckptstore.errors import IntegrityError, UnsupportedError
from ckptstore.format.canonical import canonical_json
from ckptstore.format.layout import RUN_KEY, slot_key
from ckptstore.format.records import (
    FOLD_EVERY,
    LEVELS,
    QUARANTINED,
    Claim,
    Collected,
    Commit,
    Envelope,
    Known,
    Pin,
    Proved,
    Record,
    Restore,
    Retire,
    SetAside,
    Unknown,
    Unpin,
    Verified,
    record_fields,
)
from ckptstore.format.version import FORMAT, INSTALL_HINT
from ckptstore.protocol.retirement import refusals

MAX_IGNORED = 100


@dataclass(frozen=True, slots=True)
class Pinned:
    """Who holds a checkpoint, and why."""

    holder: str
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A kept checkpoint: its commit, and what later records say of it.

    Args:
        seq: Its identity: the slot of its commit.
        blake3: Of the record. All ranks of a load must agree on seq and this (I12).
        written_at: For people.
        commit: The manifest.
        set_aside: Why it is not selectable, or None.
        pins: Who holds it, by holder.
        verified: The strongest level at which it was verified since, or None.
        proved: The verdict of the last resume that was proved, or None.
    """

    seq: int
    blake3: str
    written_at: str
    commit: Commit
    set_aside: str | None = None
    pins: tuple[Pinned, ...] = ()
    verified: str | None = None
    proved: str | None = None
    _encoded: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def exact_name(self) -> str:
        """What finds this very one: `name@seq`."""
        return f"{self.commit.checkpoint_id}@{self.seq}"

    def encode(self) -> bytes:
        """Return its value in the canonical fold. Made once: every 64th record has the hash of all of them."""
        if not self._encoded:
            self._encoded.append(canonical_json(_committed_value(self)))
        return self._encoded[0]


@dataclass(frozen=True, slots=True)
class Reign:
    """The newest claim."""

    seq: int
    term: int
    incarnation: str
    job: str
    host: str
    written_at: str


@dataclass(frozen=True, slots=True)
class Tip:
    """The last commit of the newest term."""

    seq: int
    attempt: int
    prefix: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """A record that was not valid at its slot."""

    seq: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fold:
    """The state of a run below slot `end`.

    Args:
        run: Identity of the run; empty if there is none yet.
        run_blake3: Of `run.json`.
        last: BLAKE3 of the record in slot `end - 1`, or of `run.json`.
        end: The next free slot.
        claim: The newest claim.
        reigns: Every incarnation that ever claimed, and the last term it had.
        tip: The last commit of the newest term.
        commits: The kept checkpoints by seq: committed, not retired.
        retired: Prefixes by seq of those whose bytes may not be gone yet.
        ever_committed: Valid commits ever; a run that had some is never "fresh".
        ignored: The newest 100 records that were passed over. For people; not part of the canonical fold.
        stopped: The record of a later release at `end`, past which this release cannot read.
    """

    run: str
    run_blake3: str
    last: str
    end: int = 0
    claim: Reign | None = None
    reigns: Mapping[str, int] = field(default_factory=dict)
    tip: Tip | None = None
    commits: Mapping[int, Committed] = field(default_factory=dict)
    retired: Mapping[int, str] = field(default_factory=dict)
    ever_committed: int = 0
    ignored: tuple[Ignored, ...] = ()
    stopped: Unknown | None = None

    @property
    def term(self) -> int:
        """The newest term; 0 before the first claim."""
        return self.claim.term if self.claim else 0

    @property
    def kept(self) -> list[Committed]:
        """What collection respects, by seq."""
        return [self.commits[seq] for seq in sorted(self.commits)]

    @property
    def selectable(self) -> list[Committed]:
        """What may be loaded by default, by seq."""
        return [committed for committed in self.kept if committed.set_aside is None]

    @property
    def newest(self) -> Committed | None:
        """The selectable checkpoint of the highest seq, whatever its step (I11)."""
        return max(self.selectable, key=lambda committed: committed.seq, default=None)

    @property
    def newest_verified(self) -> Committed | None:
        """The newest selectable checkpoint of which every byte was verified since its commit."""
        verified = [committed for committed in self.selectable if committed.verified == LEVELS[-1]]
        return verified[-1] if verified else None

    @property
    def newest_proved(self) -> Committed | None:
        """The newest selectable checkpoint from which a resume was proved: its last verdict says so first of all."""
        return next((each for each in reversed(self.selectable) if is_proved(each.proved)), None)

    def fences(self, term: int) -> bool:
        """Say whether a newer incarnation has claimed since `term` (I3)."""
        return term < self.term

    def supersedes(self, attempt: int) -> bool:
        """Say whether the newest term has committed this attempt or a later one (I7: such an attempt is an orphan)."""
        return self.tip is not None and attempt <= self.tip.attempt

    def committed_at(self, prefix: str) -> int | None:
        """Return the seq under which the attempt `prefix` stands committed, or None."""
        kept = (seq for seq, committed in self.commits.items() if committed.commit.prefix == prefix)
        retired = (seq for seq, gone in self.retired.items() if gone == prefix)
        return next(kept, next(retired, None))

    def whole(self) -> Fold:
        """Return this fold if it knows all records.

        Raises:
            UnsupportedError: A record of a later release stands in the log; answers may depend on it.
        """
        if self.stopped is None:
            return self
        raise UnsupportedError(
            f"{slot_key(self.end)} holds a record {self.stopped.kind!r} of format {self.stopped.format}; "
            f"this release knows format {FORMAT}.",
            hint=INSTALL_HINT,
            key=slot_key(self.end),
            kind=self.stopped.kind,
            format=self.stopped.format,
        )

    def encode(self) -> bytes:
        """Return the canonical fold's bytes: what stands under `state/`, and whose BLAKE3 stands in every 64th record.

        A release that folds a record which version 1 must not pass over writes a higher `format` here.
        """
        rest = {
            "format": FORMAT,
            "run": self.run,
            "run_blake3": self.run_blake3,
            "end": self.end,
            "last": self.last,
            "claim": asdict(self.claim) if self.claim else None,
            "reigns": dict(self.reigns),
            "tip": asdict(self.tip) if self.tip else None,
            "retired": {str(seq): prefix for seq, prefix in self.retired.items()},
            "ever_committed": self.ever_committed,
        }
        values = {name: canonical_json(value) for name, value in rest.items()}
        values["commits"] = b"[%s]" % b",".join(committed.encode() for committed in self.kept)
        return b"{%s}\n" % b",".join(b'"%s":%s' % (name.encode(), values[name]) for name in sorted(values))


def is_proved(verdict: str | None) -> bool:
    """Say whether a recorded verdict is `proved`; what was compared may follow it after a colon."""
    return verdict is not None and verdict.partition(":")[0] == "proved"


def fold_blake3(fold: Fold) -> str:
    """Return the hash that the record at slot `fold.end` carries if that is a multiple of 64."""
    return blake3(fold.encode()).hexdigest()


def apply(fold: Fold, envelope: Envelope, record: Record, digest: str) -> Fold:
    """Return the fold with one more record, whose BLAKE3 is `digest`.

    Raises:
        IntegrityError: The record does not link to the one before, or carries the hash of another fold (I1, I2).
    """
    return apply_to_own(own(fold), envelope, record, digest)


def own(fold: Fold) -> Fold:
    """Return the same fold, with tables that nobody else has: `apply_to_own` may change them."""
    return replace(fold, commits=dict(fold.commits), reigns=dict(fold.reigns), retired=dict(fold.retired))


def apply_to_own(fold: Fold, envelope: Envelope, record: Record, digest: str) -> Fold:
    """Do what `apply` does, with the tables of `fold` itself, so that a long log costs no copy of them per record.

    Args:
        fold: From `own` or from here, and of no use to anybody afterwards, whether this returns or raises.
        envelope: Of the record.
        record: The record.
        digest: Its BLAKE3.

    Raises:
        IntegrityError: See `apply`.
    """
    _check_link(fold, envelope)
    if isinstance(record, Unknown):
        if not record.optional:
            return replace(fold, stopped=record)
    elif (reason := rejection(fold, envelope.seq, record)) is not None:
        ignored = Ignored(envelope.seq, record.KIND, reason)
        fold = replace(fold, ignored=(*fold.ignored, ignored)[-MAX_IGNORED:])
    else:
        fold = _with(fold, envelope, record, digest)
    return replace(fold, end=envelope.seq + 1, last=digest)


def rejection(fold: Fold, seq: int, record: Known) -> str | None:
    """Return why `record` is not valid at slot `seq`, above `fold`; None if it is."""
    match record:
        case Claim():
            return None if record.term > fold.term else f"term {record.term} is not above {fold.term}"  # I3
        case Commit():
            return _commit_rejection(fold, seq, record)
        case Retire():
            return _retire_rejection(fold, record)
        case Collected():
            strange = [target for target in record.seqs if target not in fold.retired]
            return f"{strange} are not retired" if strange else None
        case SetAside() | Restore():
            return _not_kept(fold, record.seqs)
        case Pin() | Unpin() | Verified() | Proved():
            return _not_kept(fold, (record.target,))


def _commit_rejection(fold: Fold, seq: int, commit: Commit) -> str | None:
    if fold.fences(commit.term):  # I3, I15
        return f"term {commit.term} is fenced by term {fold.term}"
    if commit.term > fold.term:
        return f"term {commit.term} was never claimed"
    if commit.term == fold.term and fold.supersedes(commit.attempt):  # I7, I16
        return f"attempt {commit.attempt} comes after a later one, or twice"
    if commit.parent is not None and commit.parent >= seq:
        return f"its parent {commit.parent} is not before it"
    return None


def _retire_rejection(fold: Fold, retire: Retire) -> str | None:
    if retire.term is not None and retire.term != fold.term:  # I3
        return f"term {retire.term} is not the newest, {fold.term}"
    refused = refusals(fold, retire.seqs)  # I14
    return f"{refused[0].name}: {refused[0].why}" if refused else None


def _not_kept(fold: Fold, seqs: tuple[int, ...]) -> str | None:
    strange = [seq for seq in seqs if seq not in fold.commits]
    return f"{strange[:8]} are not kept checkpoints" if strange else None


def _with(fold: Fold, envelope: Envelope, record: Known, digest: str) -> Fold:
    seq, at = envelope.seq, envelope.written_at
    commits = cast("dict[int, Committed]", fold.commits)  # its own: see `apply_to_own`
    reigns, retired = cast("dict[str, int]", fold.reigns), cast("dict[int, str]", fold.retired)
    match record:
        case Claim():
            reigns[record.incarnation] = record.term
            reign = Reign(seq, record.term, record.incarnation, record.job, record.host, at)
            return replace(fold, claim=reign, tip=None)
        case Commit():
            commits[seq] = Committed(seq, digest, at, record)
            tip = Tip(seq, record.attempt, record.prefix)
            return replace(fold, tip=tip, ever_committed=fold.ever_committed + 1)
        case Retire():
            retired.update({target: commits.pop(target).commit.prefix for target in set(record.seqs)})
        case Collected():
            for target in set(record.seqs):
                del retired[target]
        case SetAside() | Restore():
            commits.update({target: _marked(commits[target], record) for target in record.seqs})
        case Pin() | Unpin() | Verified() | Proved():
            commits[record.target] = _marked(commits[record.target], record)
    return fold


def _marked(committed: Committed, record: SetAside | Restore | Pin | Unpin | Verified | Proved) -> Committed:
    match record:
        case SetAside():  # what is known to be damaged stays so until it is restored
            damaged = committed.set_aside == QUARANTINED
            return committed if damaged else replace(committed, set_aside=record.reason)
        case Restore():
            return replace(committed, set_aside=None)
        case Pin() | Unpin():
            pins = {pin.holder: pin for pin in committed.pins if pin.holder != record.holder}
            if isinstance(record, Pin):
                pins[record.holder] = Pinned(record.holder, record.reason)
            return replace(committed, pins=tuple(pins[holder] for holder in sorted(pins)))
        case Verified():
            return replace(committed, verified=max(committed.verified or LEVELS[0], record.level, key=LEVELS.index))
        case Proved():
            return replace(committed, proved=record.verdict)


def _check_link(fold: Fold, envelope: Envelope) -> None:
    """I1, I2: this very record follows that very one."""
    expected = {"run": fold.run, "seq": fold.end, "prev": fold.last}
    if fold.end % FOLD_EVERY == 0:
        expected["fold"] = fold_blake3(fold)
    for name, right in expected.items():
        if (found := getattr(envelope, name)) != right:
            key = slot_key(fold.end)
            before = f"the records before it and {RUN_KEY}" if fold.end == 0 else "the records before it"
            raise IntegrityError(
                f"{key} does not follow {before}: {name} is {found}, expected {right}.",
                hint="Run `ckptstore verify URL --level chain`.",
                key=key,
                expected=right,
                found=found,
            )


def _committed_value(committed: Committed) -> dict[str, Any]:
    return {
        "seq": committed.seq,
        "blake3": committed.blake3,
        "written_at": committed.written_at,
        "commit": record_fields(committed.commit),
        "set_aside": committed.set_aside,
        "pins": [asdict(pin) for pin in committed.pins],
        "verified": committed.verified,
        "proved": committed.proved,
    }
