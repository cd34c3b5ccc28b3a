"""What is wrong with the objects of one checkpoint, as one reading of them says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.format.shard import StoredShard
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.parts import direct_refs, load_documents, load_parts
from ckptstore.transfer.verifying import names_in, verify_shards

Level = Literal["chain", "exists", "etag", "full"]
Progress = Callable[[int, int], None]
"""Told how many bytes of a checkpoint's shards are verified so far, and of how many; by one thread at a time."""


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
        tensors: Names of those whose bytes are hit; none where it is no shard, or where nobody knows them.
        confirmed: A second reading, over a connection of its own, found the object damaged too.
    """

    level: str
    kind: str
    key: str
    expected: str
    found: str
    message: str
    tensors: tuple[str, ...] = ()
    confirmed: bool = False

    @property
    def is_damage(self) -> bool:
        """Whether it says that bytes are other bytes, and not only that the store calls them so."""
        return self.kind != "rewritten"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found.

    Args:
        level: How far it went; every weaker level is included.
        seq: The checkpoint, or None for the log alone.
        findings: Empty if all is well.
        bytes_read: Of shards.
        objects: Keys of all objects that were judged; `run.json` stands for the log.
        complete: These are all objects of the checkpoint, and not a share of them.
        retired: The checkpoint was retired meanwhile: its bytes may be gone, which is no damage. Nothing is judged.
        checkpoint_id: Its name, or None for the log alone.
    """

    level: str
    seq: int | None
    findings: tuple[Finding, ...]
    bytes_read: int = 0
    objects: tuple[str, ...] = ()
    complete: bool = True
    retired: bool = False
    checkpoint_id: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def passed(self) -> bool:
        """Whether all objects of a checkpoint were judged, and nothing was found."""
        return self.ok and self.complete and not self.retired and self.seq is not None


def unwatched(done: int, total: int) -> None:
    """Watch nothing."""


def verify_data(
    store: ObjectStore,
    committed: Committed,
    level: Level,
    *,
    options: TransferOptions,
    progress: Progress = unwatched,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Verdict:
    """Judge the objects of a checkpoint that are `wanted`. Parts are read in any case: they name the others.

    Raises:
        CkptStoreError: The store could not be read; that is no verdict.
    """
    prefix, keys = committed.commit.prefix, _manifest_keys(store, committed)
    findings: list[Finding] = []
    shards: list[StoredShard] = []
    try:
        shards = [stored for part in load_parts(store, committed) for stored in part.shards]
    except IntegrityError as error:
        findings.append(finding_of("exists", prefix, error))
    shards = [stored for stored in shards if wanted(stored.shard.path)]
    verdict = _verify_shards(store, shards, level, options, progress)
    findings += verdict.findings
    documents = committed.commit.documents
    if documents is not None and wanted(documents.path):
        keys.append(documents.path)
        try:
            load_documents(store, committed)
        except IntegrityError as error:
            findings.append(finding_of("exists", prefix, error))
    objects = (*filter(wanted, keys), *verdict.objects)
    name = committed.commit.checkpoint_id
    return replace(verdict, seq=committed.seq, checkpoint_id=name, findings=tuple(findings), objects=objects)


def finding_of(level: str, key: str, error: IntegrityError, tensors: tuple[str, ...] = ()) -> Finding:
    """Return what an error says as a finding."""
    facts = error.facts
    missing = "found" in facts and facts["found"] is None
    return Finding(
        level,
        "missing" if missing else "damaged",
        str(facts.get("key", key)),
        str(facts.get("expected", "")),
        str(facts.get("found", "")),
        error.message,
        tensors,
    )


def _manifest_keys(store: ObjectStore, committed: Committed) -> list[str]:
    refs = committed.commit.parts
    keys = [ref.path for ref in refs]
    if any(ref.is_root for ref in refs):
        try:
            keys += [ref.path for ref in direct_refs(store, refs, committed.commit.stem)]
        except IntegrityError:
            return keys  # what the damaged one names is not known; `load_parts` tells of it
    return keys


def _verify_shards(
    store: ObjectStore, shards: list[StoredShard], level: Level, options: TransferOptions, progress: Progress
) -> Verdict:
    paths = tuple(stored.shard.path for stored in shards)
    listed = _listed(store, paths)
    findings = [found for stored in shards for found in _compare(level, stored, listed.get(stored.shard.path))]
    if level != "full":
        return Verdict(level, None, tuple(findings), objects=paths)
    gone = {each.key for each in findings if each.is_damage}
    there = [stored for stored in shards if stored.shard.path not in gone]
    read, total = 0, sum(stored.shard.size for stored in there)

    def watch(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(read, total)

    damage = verify_shards(store, there, options=options, watch=watch)
    # A shard that was rewritten with the very same bytes, by a copy of the bucket, say, is what was written.
    findings = [each for each in findings if each.is_damage or each.key in damage]
    findings += [finding_of("full", path, damage[path].error, damage[path].tensors) for path in paths if path in damage]
    return Verdict(level, None, tuple(findings), read, paths)


def _listed(store: ObjectStore, paths: Sequence[str]) -> dict[str, ObjectInfo | IntegrityError]:
    """Return what stands at each path, or that it is no object; nothing where nothing stands."""
    prefixes = sorted({path.rpartition("/")[0] + "/" for path in paths})
    found: dict[str, ObjectInfo | IntegrityError] = {
        info.key: info for prefix in prefixes for info in store.list(prefix)
    }
    for path in paths:
        if path not in found:  # a file system on a network may list late
            try:
                found[path] = store.head(path)
            except NotFoundError:
                continue
            except IntegrityError as error:  # a directory, or a pipe: one finding, and the others are judged
                found[path] = error
    return found


def _compare(level: Level, stored: StoredShard, info: ObjectInfo | IntegrityError | None) -> list[Finding]:
    shard = stored.shard
    expected = str(shard.size)
    if isinstance(info, IntegrityError):
        return [finding_of("exists", shard.path, info, names_in(stored))]
    if info is None:
        text = f"{shard.path} is missing."
        return [Finding("exists", "missing", shard.path, expected, "nothing", text, names_in(stored))]
    if info.size != shard.size:
        text = f"{shard.path} has {info.size} bytes, committed were {shard.size}."
        return [Finding("exists", "size", shard.path, expected, str(info.size), text, names_in(stored))]
    if level != "exists" and None not in (info.etag, shard.etag) and info.etag != shard.etag:
        text = f"{shard.path} was rewritten since the commit; its bytes may be the same."
        return [Finding("etag", "rewritten", shard.path, str(shard.etag), str(info.etag), text)]
    return []
