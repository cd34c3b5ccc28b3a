"""A new log from the copies of commit records: an operator's explicit act, after all records were lost.

What it cannot know it does not invent: what was set aside, retired, pinned, verified or proved stood in the log alone.
A checkpoint comes back if its copy is whole and every byte that it names is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from ckptstore.clock import Clock, timestamp
from ckptstore.errors import ConflictError, IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format import canonical
from ckptstore.format.layout import DATA_PREFIX, LOG_PREFIX, RUN_KEY, Stem, parse_data_key, slot_key
from ckptstore.format.records import MAX_RECORD_BYTES, Claim, Commit, RunFile, decode_record, encode_run
from ckptstore.format.seal import signer_of
from ckptstore.format.strict_json import parse_json
from ckptstore.format.version import CREATED_BY
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.once import Outcome, create_once
from ckptstore.signing import KEY_FILE_VARIABLE, Signing

REBUILDER = "ckptstore repair --rebuild-log"
"""The job of the claims in a log that was rebuilt."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole copy of a commit record.

    Args:
        run: Identity of the run that it is of.
        committed: The checkpoint as it stood in the lost log.
        is_signed: Somebody signed it.
    """

    run: str
    committed: Committed
    is_signed: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A copy that brings nothing back, and why."""

    key: str
    why: str


def check_lost(log: RunLog) -> None:
    """Check that the log has no record, or only those that a rebuilding that was stopped has written.

    Raises:
        InvalidInputError: There is a log: it is the truth, and copies are not.
        IntegrityError: It is damaged.
        CkptStoreError: The store could not be read.
    """
    first = next(iter(log.store.list(LOG_PREFIX)), None)
    if first is None:
        return
    for entry in log.records(end=log.refresh().whole().end):
        record = entry.record
        if not isinstance(record, Commit) and not (isinstance(record, Claim) and record.job == REBUILDER):
            raise _there(slot_key(entry.seq))
    if log.fold.end == 0:
        raise _there(first.key)


def _there(key: str) -> InvalidInputError:
    return InvalidInputError(
        f"{key} is there: this run has a log, and a log is never rebuilt over records.",
        hint="Run `ckptstore verify URL --level chain`; if records are missing, restore them from a backup. "
        "Nothing was written.",
        key=key,
    )


def copies(log: RunLog) -> Iterator[Copy | LeftOut]:
    """Yield the copies of commit records, in the order in which they were committed; first those that say nothing.

    Raises:
        CkptStoreError: The store could not be read.
    """
    # No record stands above a copy and vouches for it: where signatures are required, each needs its own.
    signing = replace(log.options.signing, signed_from=0) if log.options.signing is not None else None
    found: list[Copy] = []
    for info in log.store.list(DATA_PREFIX):
        parsed = parse_data_key(info.key)
        if parsed is None or info.key != parsed.stem.committed_key:
            continue
        try:
            found.append(_copy(log.store.get(info.key, max_bytes=MAX_RECORD_BYTES), parsed.stem, signing))
        except (IntegrityError, InvalidInputError, UnsupportedError) as error:
            yield LeftOut(info.key, error.message)
    yield from sorted(found, key=_order)


def _order(copy: Copy) -> tuple[int, int, int]:
    """I3: terms increase in a log, and attempts within a term; so two copies cannot be in doubt."""
    commit = copy.committed.commit
    return commit.term, commit.attempt, copy.committed.seq


def _copy(body: bytes, stem: Stem, signing: Signing | None) -> Copy:
    value = canonical.table(parse_json(body, what=stem.committed_key))
    run, seq = canonical.text(value.get("run")), canonical.integer(value.get("seq"))
    envelope, record, digest = decode_record(body, seq=seq, run=run, signing=signing)
    if not isinstance(record, Commit) or record.stem != stem:
        raise IntegrityError(f"{stem.committed_key} is no copy of this attempt's commit.", key=stem.committed_key)
    return Copy(run, Committed(seq, digest, envelope.written_at, record), signer_of(body) is not None)


def check_one_run(log: RunLog, found: Sequence[Copy]) -> str:
    """Return the identity of the one run that all copies are of.

    Raises:
        InvalidInputError: There is no copy, or they are of several runs or of another one than `run.json` says, or two
            say that they are the same attempt.
    """
    runs = {copy.run for copy in found} | ({log.run} if log.run is not None else set())
    places = [_order(copy)[:2] for copy in found]
    if not found or len(runs) != 1 or len(set(places)) != len(places):
        raise InvalidInputError(
            f"{len(found)} copies of commits, of the runs {', '.join(sorted(runs)) or 'none'}, make no log.",
            hint="Look at the COMMITTED objects under data/; nothing was written.",
        )
    return runs.pop()


def rebuild(log: RunLog, run: str, found: Sequence[Copy]) -> RunLog:
    """Write a log in which the checkpoints of `found` are committed, and return it, open.

    No job may run meanwhile: its claim ends this, and what is not committed by then stays out.

    Args:
        log: Without records, or with those of a rebuilding that was stopped.
        run: Of `check_one_run`.
        found: Copies in their order, of checkpoints whose bytes are all there.

    Raises:
        InvalidInputError: The copies are signed, and there is no key to sign with. Nothing was written.
        ConflictError: A job has claimed the run meanwhile.
        CommitUnknownError: Whether a record stands is not known; do it again. See `RunLog.append` for the rest.

    If killed: a log with the first of the checkpoints, as they were; done again, it goes on.
    """
    signing = log.options.signing
    if any(copy.is_signed for copy in found) and (signing is None or signing.key is None):
        raise InvalidInputError(
            "The copies are signed, and there is no key to sign the new log with: whoever requires signatures could "
            "read nothing of it. Nothing was written.",
            hint=f"Set {KEY_FILE_VARIABLE} to the file of a key that is trusted.",
        )
    clock = _Then(log.clock)
    if log.run is None:
        body = encode_run(RunFile(run=run, created_at=timestamp(clock), created_by=CREATED_BY))
        outcome, _ = create_once(log.store, RUN_KEY, body, clock=clock, ids=log.ids, options=log.options)
        if outcome not in (Outcome.CREATED, Outcome.MINE):
            raise ConflictError(f"{RUN_KEY} was created by somebody else meanwhile.", hint="Do it again.", key=RUN_KEY)
    new = RunLog.open(log.store, clock=clock, ids=log.ids, options=log.options, observer=log.observer)
    new.lost_from = None  # what the old hint tells of is what is rebuilt
    prefixes = {copy.committed.seq: copy.committed.commit.prefix for copy in found}
    for copy in found:
        clock.moment = _moment(copy.committed.written_at)
        term, incarnation = copy.committed.commit.term, log.ids.nonce()
        new.append(partial(_claim, term=term, incarnation=incarnation))
        new.append(partial(_commit, commit=copy.committed.commit, prefixes=prefixes))
    return new


def _claim(fold: Fold, term: int, incarnation: str) -> Claim | None:
    _check_alone(fold)
    return None if fold.term >= term else Claim(term, incarnation, REBUILDER, "-")


def _commit(fold: Fold, commit: Commit, prefixes: dict[int, str]) -> Commit | None:
    """Return the record for the slot above `fold`; its parent is where that is committed now, or nowhere."""
    _check_alone(fold)
    late = fold.fences(commit.term) or fold.supersedes(commit.attempt)
    if late or fold.committed_at(commit.prefix) is not None:
        return None  # late: a rebuilding before this one left it out, and went on
    parent = prefixes.get(commit.parent) if commit.parent is not None else None
    return replace(commit, parent=fold.committed_at(parent) if parent is not None else None)


def _check_alone(fold: Fold) -> None:
    if fold.claim is not None and fold.claim.job != REBUILDER:
        raise ConflictError(
            f"Job {fold.claim.job!r} on {fold.claim.host} has claimed the run meanwhile.",
            hint="Stop every job first. See what came back with `ckptstore ls URL`.",
            seq=fold.claim.seq,
        )


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


class _Then:
    """A clock that tells when a record was first written, so that what is old stays old to whoever asks for its age."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.moment: datetime | None = None

    def now(self) -> datetime:
        """Return the moment, or the time if there is none."""
        return self.moment or self._clock.now()

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self._clock.sleep(seconds)
