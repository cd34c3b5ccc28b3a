"""Verification reads and judges; it changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from blake3 import blake3

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.layout import RUN_KEY, slot_key
from ckptstore.format.records import LEVELS, MAX_RECORD_BYTES, decode_record
from ckptstore.format.shard import Shard, StoredShard
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed, Fold, apply_to_own
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.parts import load_documents, load_parts
from ckptstore.protocol.reading import get_if_there, read_run
from ckptstore.signing import Signing
from ckptstore.transfer.download import verify_shard

Level = Literal["chain", "exists", "etag", "full"]
Progress = Callable[[int, int], None]
"""Told how many bytes of a checkpoint's shards are verified so far, and of how many."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was written.

    Args:
        level: The level that found it.
        kind: `damaged`, `missing`, `size`, or `rewritten` (the store calls the bytes other bytes: no proof of damage).
        key: Of the object.
        expected: What was recorded.
        found: What is there.
        message: For people.
    """

    level: str
    kind: str
    key: str
    expected: str
    found: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found.

    Args:
        level: How far it went; every weaker level is included.
        seq: The checkpoint, or None for the log alone.
        findings: Empty if all is well.
        bytes_read: Of shards.
    """

    level: str
    seq: int | None
    findings: tuple[Finding, ...]
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def unwatched(done: int, total: int) -> None:
    """Watch nothing."""


def verify(
    log: RunLog, committed: Committed | None, level: Level, options: TransferOptions, progress: Progress = unwatched
) -> Verdict:
    """Verify the log and, above level `chain`, one checkpoint, as far as `level` says.

    Raises:
        InvalidInputError: There is no such level, or a checkpoint is needed for it.
        UnsupportedError: The log links as far as it was read, and a later release wrote more; that is no verdict.
        CkptStoreError: The store could not be read; that is no verdict.
    """
    _check_level(level)
    if committed is None and level != "chain":
        raise InvalidInputError(f"Level {level!r} needs a checkpoint.", hint="Name one, or use level='chain'.")
    findings = _chain_findings(log)
    if committed is None or level == "chain":
        return Verdict(level, committed.seq if committed else None, tuple(findings))
    verdict = _verify_data(log, committed, level, options, progress)
    return replace(verdict, findings=(*findings, *verdict.findings))


def verify_kept(
    log: RunLog, level: Level, options: TransferOptions, progress: Progress = unwatched
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
        yield verify(log, None, "chain", options)
        for committed in reversed(log.fold.kept if level != "chain" else []):
            yield _verify_data(log, committed, level, options, progress)

    return verdicts()


def _check_level(level: str) -> None:
    if level not in LEVELS:
        raise InvalidInputError(f"{level!r} is not one of {LEVELS}.", hint="Use level='full'.")


def _verify_data(
    log: RunLog, committed: Committed, level: Level, options: TransferOptions, progress: Progress
) -> Verdict:
    verdict = _verify_shards(log, committed, level, options, progress)
    try:
        load_documents(log.store, committed)
    except IntegrityError as error:
        return replace(verdict, findings=(*verdict.findings, _finding("exists", committed.commit.prefix, error)))
    return verdict


def _verify_shards(
    log: RunLog, committed: Committed, level: Level, options: TransferOptions, progress: Progress
) -> Verdict:
    try:
        shards = [stored for part in load_parts(log.store, committed) for stored in part.shards]
    except IntegrityError as error:
        return Verdict(level, committed.seq, (_finding("exists", committed.commit.prefix, error),))
    listed = _listed(log, shards)
    findings = [found for stored in shards for found in _compare(level, stored.shard, listed.get(stored.shard.path))]
    if level != "full":
        return Verdict(level, committed.seq, tuple(findings))
    gone = {each.key for each in findings if each.kind != "rewritten"}
    there = [stored for stored in shards if stored.shard.path not in gone]
    read, total, right = 0, sum(stored.shard.size for stored in there), set()
    for stored in there:
        try:
            read += verify_shard(log.store, stored, options=options)
            right.add(stored.shard.path)
        except IntegrityError as error:
            findings.append(_finding("full", stored.shard.path, error))
        progress(read, total)
    # A shard that was rewritten with the very same bytes, by a copy of the bucket, say, is what was written.
    return Verdict(level, committed.seq, tuple(each for each in findings if each.key not in right), read)


def check_chain(log: RunLog) -> None:
    """Read every record from slot 0 on, without hints, up to where the log was read to, and fold it.

    Raises:
        IntegrityError: One is missing, damaged or does not link, or all together say something else than the open log.
        UnsupportedError: A later release wrote a record that must not be passed over: what follows was not read.
    """
    known = log.fold
    _check_run(log.store, known)
    fold = Fold(run=known.run, run_blake3=known.run_blake3, last=known.run_blake3)
    for entry in log.records(end=known.end):  # another thread may append meanwhile
        fold = apply_to_own(fold, entry.envelope, entry.record, entry.blake3)
    if fold.encode() != known.encode():
        raise IntegrityError(
            "The log's records say something else together than the open log: a hint was believed, or slots changed.",
            hint="Open the run again.",
            key=RUN_KEY,
        )
    known.whole()


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
        return [_finding("chain", RUN_KEY, error)]
    return []


def _listed(log: RunLog, shards: Iterable[StoredShard]) -> dict[str, ObjectInfo]:
    prefixes = sorted({stored.shard.path.rpartition("/")[0] + "/" for stored in shards})
    return {info.key: info for prefix in prefixes for info in log.store.list(prefix)}


def _compare(level: Level, shard: Shard, info: ObjectInfo | None) -> list[Finding]:
    if info is None:
        return [Finding("exists", "missing", shard.path, str(shard.size), "nothing", f"{shard.path} is missing.")]
    if info.size != shard.size:
        text = f"{shard.path} has {info.size} bytes, committed were {shard.size}."
        return [Finding("exists", "size", shard.path, str(shard.size), str(info.size), text)]
    if level != "exists" and None not in (info.etag, shard.etag) and info.etag != shard.etag:
        text = f"{shard.path} was rewritten since the commit; its bytes may be the same."
        return [Finding("etag", "rewritten", shard.path, str(shard.etag), str(info.etag), text)]
    return []


def _finding(level: str, key: str, error: IntegrityError) -> Finding:
    facts = error.facts
    missing = "found" in facts and facts["found"] is None
    return Finding(
        level,
        "missing" if missing else "damaged",
        str(facts.get("key", key)),
        str(facts.get("expected", "")),
        str(facts.get("found", "")),
        error.message,
    )
