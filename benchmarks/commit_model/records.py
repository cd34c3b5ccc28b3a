"""The model's log: records and what they say together. Written from PROTOCOL.md, not from the code that it stands for.

What the model cannot get wrong it leaves out: hashes, envelopes, bytes. `wrong` names what a weakened protocol forgets.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_KEEP = 2

Wrong = frozenset[str]


class Attempt(NamedTuple):
    """One try at a checkpoint. `owner` stands for its nonce: no two processes ever share a stem."""

    term: int
    number: int
    owner: int

    def __repr__(self) -> str:
        return f"t{self.term}.a{self.number} of {self.owner}"


class Record(NamedTuple):
    """A record of any kind; what a kind does not have keeps its default.

    Args:
        kind: As in the log.
        author: Stands for the nonce: whose bytes they are.
        term: Of CLAIM, COMMIT, and a trainer's RETIRE (0: none).
        number: Of COMMIT: the attempt.
        seqs: What it is about.
        parent: Of COMMIT.
        step: Of COMMIT.
        word: The reason of SET_ASIDE, the holder of PIN and UNPIN.
        made: How often its bytes were made for this slot; a right program makes them once.
    """

    kind: str
    author: int
    term: int = 0
    number: int = 0
    seqs: tuple[int, ...] = ()
    parent: int | None = None
    step: int = 0
    word: str = ""
    made: int = 1

    @property
    def attempt(self) -> Attempt:
        """The attempt that a COMMIT commits."""
        return Attempt(self.term, self.number, self.author)

    def __repr__(self) -> str:
        said = zip(self._fields[2:], self[2:], self._field_defaults.values(), strict=True)
        return " ".join([f"{self.kind} by {self.author}", *(f"{name}={it}" for name, it, usual in said if it != usual)])


class Kept(NamedTuple):
    """A kept checkpoint."""

    seq: int
    attempt: Attempt
    step: int
    aside: str = ""
    pins: tuple[str, ...] = ()
    verified: bool = False


class Fold(NamedTuple):
    """What the records below slot `end` say together.

    Args:
        end: The next slot.
        term: The newest; 0 before the first claim.
        claimant: Whose it is.
        reigns: Every incarnation that ever claimed, with its last term.
        tip: seq and number of the last commit of the newest term, or None.
        kept: By seq.
        retired: seq and attempt of those whose bytes may not be gone yet, by seq.
        ever: Valid commits ever.
        ignored: Slots of records that were not valid there.
    """

    end: int = 0
    term: int = 0
    claimant: int = -1
    reigns: tuple[tuple[int, int], ...] = ()
    tip: tuple[int, int] | None = None
    kept: tuple[Kept, ...] = ()
    retired: tuple[tuple[int, Attempt], ...] = ()
    ever: int = 0
    ignored: tuple[int, ...] = ()

    @property
    def selectable(self) -> list[Kept]:
        """What may be loaded by default, by seq."""
        return [each for each in self.kept if not each.aside]

    @property
    def newest(self) -> Kept | None:
        """The selectable checkpoint of the highest seq."""
        return next((each for each in reversed(self.kept) if not each.aside), None)

    @property
    def newest_verified(self) -> Kept | None:
        """The newest selectable one that was verified at level `full`."""
        return next((each for each in reversed(self.kept) if not each.aside and each.verified), None)

    def at(self, seq: int) -> Kept | None:
        """Return the kept checkpoint of slot `seq`."""
        return next((each for each in self.kept if each.seq == seq), None)

    def committed_at(self, attempt: Attempt) -> int | None:
        """Return the seq under which `attempt` stands committed, unless it was collected since."""
        kept = (each.seq for each in self.kept if each.attempt == attempt)
        return next(kept, next((seq for seq, gone in self.retired if gone == attempt), None))

    def is_orphan(self, attempt: Attempt, wrong: Wrong) -> bool:
        """Say whether an attempt without a commit can never commit (I7)."""
        if attempt.term == self.term and "live orphans" in wrong:
            return True
        superseded = self.tip is not None and attempt.number <= self.tip[1]
        return attempt.term < self.term or (attempt.term == self.term and superseded)


def rejection(fold: Fold, record: Record, wrong: Wrong) -> str | None:
    """Return why `record` is not valid above `fold`; None if it is."""
    match record.kind:
        case "CLAIM":
            return None if record.term > fold.term else "term"
        case "COMMIT":
            return _commit_rejection(fold, record, wrong)
        case "RETIRE":
            return _retire_rejection(fold, record, wrong)
        case "COLLECTED":
            return None if set(record.seqs) <= {seq for seq, _ in fold.retired} else "not retired"
        case _:
            return None if all(fold.at(seq) for seq in record.seqs) else "not kept"


def _commit_rejection(fold: Fold, commit: Record, wrong: Wrong) -> str | None:
    if commit.term > fold.term:
        return "never claimed"
    if commit.term < fold.term:
        return None if "no fence" in wrong else "fenced"
    if fold.tip is not None and commit.number <= fold.tip[1] and "no superseding" not in wrong:
        return "superseded"
    return "parent" if commit.parent is not None and commit.parent >= fold.end else None


def _retire_rejection(fold: Fold, retire: Record, wrong: Wrong) -> str | None:
    targets, selectable = set(retire.seqs), {each.seq for each in fold.selectable}
    if not all(fold.at(seq) for seq in targets):
        return "not kept"
    newest, verified = fold.newest, fold.newest_verified
    reasons = {
        "trainers' RETIRE not fenced": bool(retire.term) and retire.term != fold.term,
        "pins not checked": any(each.pins for each in fold.kept if each.seq in targets),
        "newest not protected": newest is not None and newest.seq in targets,
        "verified not protected": verified is not None and verified.seq in targets,
        "min_keep ignored": bool(targets & selectable) and len(selectable - targets) < MIN_KEEP,
    }
    return next((reason for reason, holds in reasons.items() if holds and reason not in wrong), None)


def folded(fold: Fold, record: Record, wrong: Wrong) -> Fold:
    """Return the fold with one more record."""
    if rejection(fold, record, wrong) is not None:
        fold = fold._replace(ignored=(*fold.ignored, fold.end))
    else:
        fold = _with(fold, record)
    return fold._replace(end=fold.end + 1)


def _with(fold: Fold, record: Record) -> Fold:
    targets = set(record.seqs)
    match record.kind:
        case "CLAIM":
            reigns = {**dict(fold.reigns), record.author: record.term}
            return fold._replace(
                term=record.term, claimant=record.author, reigns=tuple(sorted(reigns.items())), tip=None
            )
        case "COMMIT":
            kept = Kept(fold.end, record.attempt, record.step)
            return fold._replace(kept=(*fold.kept, kept), tip=(fold.end, record.number), ever=fold.ever + 1)
        case "RETIRE":
            gone = [(each.seq, each.attempt) for each in fold.kept if each.seq in targets]
            left = tuple(each for each in fold.kept if each.seq not in targets)
            return fold._replace(kept=left, retired=tuple(sorted([*fold.retired, *gone])))
        case "COLLECTED":
            return fold._replace(retired=tuple(each for each in fold.retired if each[0] not in targets))
        case _:
            marked = (_marked(each, record) if each.seq in targets else each for each in fold.kept)
            return fold._replace(kept=tuple(marked))


def _marked(kept: Kept, record: Record) -> Kept:
    match record.kind:
        case "SET_ASIDE":
            return kept if kept.aside == "quarantined" else kept._replace(aside=record.word)
        case "RESTORE":
            return kept._replace(aside="")
        case "PIN":
            return kept._replace(pins=tuple(sorted({*kept.pins, record.word})))
        case "UNPIN":
            return kept._replace(pins=tuple(pin for pin in kept.pins if pin != record.word))
        case "VERIFIED":
            return kept._replace(verified=True)
        case _:
            return kept


class Log:
    """A log with its fold. Equal logs are one object: a state costs little to hash, and each log is folded once.

    Args:
        wrong: What the weakened protocol forgets.
        before: The log without the last record.
        last: That record. None stands for a record that somebody deleted.
    """

    __slots__ = ("_after", "before", "fold", "last", "records", "subjects", "verdict", "wrong")

    def __init__(self, wrong: Wrong, before: Log | None = None, last: Record | None = None) -> None:
        self.wrong, self.before, self.last = wrong, before, last
        self.records: tuple[Record | None, ...] = () if before is None else (*before.records, last)
        self.fold: Fold = Fold() if before is None or last is None else folded(before.fold, last, wrong)
        self.verdict: str | None = None
        self.subjects: tuple[str, ...] | None = None
        self._after: dict[Record | None, Log] = {}

    @property
    def end(self) -> int:
        """The next slot."""
        return self.fold.end

    @property
    def last_is_valid(self) -> bool:
        """Whether the last record was not passed over."""
        return self.end - 1 not in self.fold.ignored[-1:]

    def append(self, record: Record | None) -> Log:
        """Return the log with one more record."""
        found = self._after.get(record)
        if found is None:
            found = self._after[record] = Log(self.wrong, self, record)
        return found

    def without(self, seq: int) -> Log:
        """Return the log with a hole, as only a wrong program leaves one."""
        return Log(self.wrong, self, None) if self.records[seq] is not None else self

    def below(self, seq: int) -> Log:
        """Return the log below slot `seq`."""
        log = self
        while log.end > seq and log.before is not None:
            log = log.before
        return log
