"""Verification reads and judges; it changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from blake3 import blake3

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.layout import RUN_KEY, slot_key
from ckptstore.format.records import LEVELS, MAX_RECORD_BYTES, decode_record
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed, Fold, apply_to_own
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.reading import get_if_there, read_run
from ckptstore.protocol.shares import Share
from ckptstore.protocol.verify_data import Finding, Level, Progress, Verdict, finding_of, unwatched, verify_data
from ckptstore.signing import Signing

__all__ = [
    "Finding",
    "Level",
    "Progress",
    "Verdict",
    "check_chain",
    "fold_below",
    "folded",
    "readable_records",
    "unwatched",
    "verify",
    "verify_kept",
    "without_retired",
]

ALL = Share()


def verify(
    log: RunLog,
    committed: Committed | None,
    level: Level,
    options: TransferOptions,
    progress: Progress = unwatched,
    *,
    share: Share = ALL,
) -> Verdict:
    """Verify the log and, above level `chain`, one checkpoint, as far as `level` says.

    Args:
        log: Open.
        committed: The checkpoint; None: the log alone.
        level: How far.
        options: How bytes are moved.
        progress: Told of bytes that are hashed.
        share: Which objects. The log counts as one, under the key `run.json`.

    Raises:
        InvalidInputError: There is no such level, or a checkpoint is needed for it.
        UnsupportedError: The log links as far as it was read, and a later release wrote more; that is no verdict.
        CkptStoreError: The store could not be read; that is no verdict.
    """
    _check_level(level)
    if committed is None and level != "chain":
        raise InvalidInputError(f"Level {level!r} needs a checkpoint.", hint="Name one, or use level='chain'.")
    chain = _verify_chain(log, share)
    if committed is None or level == "chain":
        return replace(chain, seq=committed.seq, checkpoint_id=committed.commit.checkpoint_id) if committed else chain
    verdict = _verify_one(log, committed, level, options, progress, share)
    return replace(verdict, findings=(*chain.findings, *verdict.findings), objects=(*chain.objects, *verdict.objects))


def verify_kept(
    log: RunLog, level: Level, options: TransferOptions, progress: Progress = unwatched, *, share: Share = ALL
) -> Iterator[Verdict]:
    """Return a verdict on the log and then, above level `chain`, one on the data of each kept checkpoint, newest first.

    Each is made when it is asked for.

    Raises:
        InvalidInputError: There is no such level.
        UnsupportedError: With the first verdict: see `verify`.
        CkptStoreError: The store could not be read; that is no verdict.
    """
    _check_level(level)

    def verdicts() -> Iterator[Verdict]:
        yield _verify_chain(log, share)
        for committed in reversed(log.fold.kept if level != "chain" else []):
            yield _verify_one(log, committed, level, options, progress, share)

    return verdicts()


def without_retired(log: RunLog, verdict: Verdict) -> Verdict:
    """Return a verdict that finds no damage in a checkpoint that was retired meanwhile: what is gone may be gone (I8).

    Raises:
        CkptStoreError: The log could not be read.
    """
    if verdict.ok or verdict.seq is None or verdict.seq in log.refresh().whole().commits:
        return verdict
    chain = tuple(each for each in verdict.findings if each.level == "chain")
    return replace(verdict, findings=chain, retired=True)


def _check_level(level: str) -> None:
    if level not in LEVELS:
        raise InvalidInputError(f"{level!r} is not one of {LEVELS}.", hint="Use level='full'.")


def _verify_chain(log: RunLog, share: Share) -> Verdict:
    if not share.holds(RUN_KEY):
        log.fold.whole()
        return Verdict("chain", None, (), complete=share.is_whole)
    return Verdict("chain", None, tuple(_chain_findings(log)), objects=(RUN_KEY,), complete=share.is_whole)


def _verify_one(
    log: RunLog, committed: Committed, level: Level, options: TransferOptions, progress: Progress, share: Share
) -> Verdict:
    verdict = verify_data(log.store, committed, level, options=options, progress=progress, wanted=share.holds)
    return without_retired(log, replace(verdict, complete=share.is_whole))


def check_chain(log: RunLog) -> None:
    """Read every record from slot 0 on, without hints, up to where the log was read to, and fold it.

    Raises:
        IntegrityError: One is missing, damaged or does not link, or all together say something else than the open log.
        UnsupportedError: A later release wrote a record that must not be passed over: what follows was not read.
    """
    known = log.fold
    _check_run(log.store, known)
    if fold_below(log, known.end).encode() != known.encode():  # another thread may append meanwhile
        raise IntegrityError(
            "The log's records say something else together than the open log: a hint was believed, or slots changed.",
            hint="Open the run again.",
            key=RUN_KEY,
        )
    known.whole()


def folded(log: RunLog, *, end: int) -> Iterator[tuple[Entry, Fold]]:
    """Yield every record below slot `end`, read without hints, with the fold of all up to it: good until the next.

    Raises:
        IntegrityError: One is damaged or missing, or does not link.
        CkptStoreError: The store could not be read.
    """
    fold = _begun(log.fold)
    for entry in log.records(end=end):
        fold = apply_to_own(fold, entry.envelope, entry.record, entry.blake3)
        yield entry, fold


def fold_below(log: RunLog, end: int) -> Fold:
    """Return the fold of all records below slot `end`, read without hints. See `folded`."""
    found = _begun(log.fold)
    for _, fold in folded(log, end=end):
        found = fold
    return found


def _begun(fold: Fold) -> Fold:
    """Return the fold below slot 0 of the same run."""
    return Fold(run=fold.run, run_blake3=fold.run_blake3, last=fold.run_blake3)


def _check_run(store: ObjectStore, known: Fold) -> None:
    body = get_if_there(store, RUN_KEY, max_bytes=MAX_RECORD_BYTES)
    found = None if body is None else blake3(body).hexdigest()
    if known.run and found != known.run_blake3:
        raise IntegrityError(
            f"{RUN_KEY} is not what it was: expected {known.run_blake3}, found {found or 'nothing'}.",
            hint=f"Restore {RUN_KEY} from a backup or an earlier version of it.",
            key=RUN_KEY,
            expected=known.run_blake3,
            found=found,
        )


def readable_records(store: ObjectStore, *, signing: Signing | None = None) -> Iterator[Entry]:
    """Yield the records below the first that is damaged or missing, one by one: what a damaged log still says."""
    body = get_if_there(store, RUN_KEY, max_bytes=MAX_RECORD_BYTES)
    if body is None:
        return
    with contextlib.suppress(IntegrityError):
        run, digest = read_run(store, body), blake3(body).hexdigest()
        fold = Fold(run=run.run, run_blake3=digest, last=digest)
        while (body := get_if_there(store, slot_key(fold.end), max_bytes=MAX_RECORD_BYTES)) is not None:
            entry = Entry(fold.end, *decode_record(body, seq=fold.end, run=fold.run, signing=signing), body)
            fold = apply_to_own(fold, entry.envelope, entry.record, entry.blake3)
            yield entry
            if fold.stopped is not None:
                return


def _chain_findings(log: RunLog) -> list[Finding]:
    try:
        check_chain(log)
    except IntegrityError as error:
        return [finding_of("chain", RUN_KEY, error)]
    return []
