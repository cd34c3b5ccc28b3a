"""Verification reads and judges; it changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.layout import RUN_KEY
from ckptstore.format.records import LEVELS
from ckptstore.format.shard import Shard, StoredShard
from ckptstore.objectstore.port import ObjectInfo
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed, Fold, apply
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_parts
from ckptstore.transfer.download import verify_shard

Level = Literal["chain", "exists", "etag", "full"]


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


def verify(log: RunLog, committed: Committed | None, level: Level, options: TransferOptions) -> Verdict:
    """Verify the log and, above level `chain`, one checkpoint, as far as `level` says.

    Raises:
        InvalidInputError: There is no such level, or a checkpoint is needed for it.
        CkptStoreError: The store could not be read; that is no verdict.
    """
    if level not in LEVELS or (committed is None and level != "chain"):
        raise InvalidInputError(f"{level!r} is not one of {LEVELS}, or needs a checkpoint.", hint="Use level='full'.")
    findings = _chain_findings(log)
    if committed is None or level == "chain":
        return Verdict(level, committed.seq if committed else None, tuple(findings))
    try:
        shards = [stored for part in load_parts(log.store, committed) for stored in part.shards]
    except IntegrityError as error:
        return Verdict(level, committed.seq, (*findings, _finding("exists", committed.commit.prefix, error)))
    gone: set[str] = set()
    listed = _listed(log, shards)
    for stored in shards:
        found = _compare(level, stored.shard, listed.get(stored.shard.path))
        gone |= {each.key for each in found if each.kind != "rewritten"}
        findings += found
    read = 0
    for stored in (each for each in shards if level == "full" and each.shard.path not in gone):
        try:
            read += verify_shard(log.store, stored, options=options)
        except IntegrityError as error:
            findings.append(_finding("full", stored.shard.path, error))
    return Verdict(level, committed.seq, tuple(findings), read)


def check_chain(log: RunLog) -> None:
    """Read every record from slot 0 on, without hints, and fold it.

    Raises:
        IntegrityError: One is missing, damaged or does not link, or all together say something else than the open log.
    """
    known = log.fold
    fold = Fold(run=known.run, run_blake3=known.run_blake3, last=known.run_blake3)
    for entry in log.records():
        fold = apply(fold, entry.envelope, entry.record, entry.blake3)
    if fold.encode() != known.encode():
        raise IntegrityError(
            "The log's records say something else together than the open log: a hint was believed, or slots changed.",
            hint="Open the run again.",
            key=RUN_KEY,
        )


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
