"""The end of a save: one record, created once, makes the attempt a checkpoint; nothing else can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from blake3 import blake3

from ckptstore.errors import (
    CkptStoreError,
    CommitUnknownError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SupersededError,
    UnavailableError,
)
from ckptstore.events import Committed as CommittedEvent
from ckptstore.events import tell
from ckptstore.format.canonical import canonical_json
from ckptstore.format.codec import MAX_DIRECT_PARTS, Part, PartRef, encode_part, encode_root, split
from ckptstore.format.layout import LATEST_KEY
from ckptstore.format.records import Commit, LatestHint, Record, ShardTotals, encode_latest
from ckptstore.format.shard import StoredShard
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import MAX_SOFTWARE_BYTES, Attempt
from ckptstore.protocol.claim import Incarnation, check_not_fenced
from ckptstore.protocol.coverage import covers
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.once import Outcome, create_once
from ckptstore.protocol.reading import advance

LISTING_SECONDS = 5.0
"""How long a shard that the listing lacks is looked for by name: a network file system may list late."""
LISTING_PAUSE_SECONDS = 0.2


def commit(  # noqa: PLR0913  (what every rank handed in, and how to store it)
    log: RunLog,
    incarnation: Incarnation,
    attempt: Attempt,
    shards: Sequence[StoredShard],
    *,
    planner: Any = None,
    software: Mapping[str, str] | None = None,
    options: TransferOptions | None = None,
    allowed: Callable[[], None] = lambda: None,
) -> Committed:
    """Write the parts and documents, verify that everything is there, append the commit, and write the hints.

    Called again for an attempt whose outcome was unknown, it finds out: it returns the commit that stands, or commits.

    Args:
        log: Open for writing.
        incarnation: The one that began the attempt.
        attempt: What `begin` returned.
        shards: Every rank's receipt; a rank with nothing to write has none.
        planner: What part 0 keeps for the reader's planner, as JSON.
        software: Versions by name.
        options: How many requests are on their way at once.
        allowed: Called before the record is sent, each time. What it raises is raised, and nothing is committed.

    Raises:
        FencedError: A newer incarnation has claimed the run; ever after. Nothing is committed.
        SupersededError: A later attempt of this term has committed. This one never will.
        IntegrityError: A shard is missing or not what was written, or the chunks do not cover a tensor exactly once.
        CommitUnknownError: Whether it was committed is not known. Delete nothing (I7).
        UnavailableError: It was not committed; it may be tried again.

    If killed: data under a private prefix, and the commit stands in the log or not. With it, everything is there (I4).
    """
    options = options or TransferOptions()
    with _in_doubt(log, incarnation, attempt):
        if incarnation.fenced and log.refresh().committed_at(str(attempt.stem)) is None:
            incarnation.check()  # else it landed before the fence did: say so (I5)
        if attempt.run != log.run:
            raise InvalidInputError(f"The attempt is of run {attempt.run}, this log is of run {log.run}.")
        ordered = _checked(attempt, shards, software or {})
        parts = _write_parts(log, ordered, attempt, planner)
        documents = _write_documents(log, attempt)
        expected = [(stored.shard.path, stored.shard.size, stored.shard.etag) for stored in ordered]
        written = parts if documents is None else [*parts, documents]
        try:
            verify_stored(log, expected + [(ref.path, ref.size, None) for ref in written], options)
        except IntegrityError:  # of a fenced job it may have been collected
            check_not_fenced(log.refresh(), incarnation, attempt.stem.term)
            raise
        totals = ShardTotals(len(ordered), sum(stored.shard.size for stored in ordered))
        record = attempt.record(shards=totals, parts=_named(parts), documents=documents, software=software or {})
        committed, body = append_commit(log, incarnation, record, allowed=allowed)
    tell(
        log.observer,
        CommittedEvent(
            checkpoint_id=record.checkpoint_id,
            global_step=record.global_step,
            seq=committed.seq,
            bytes=record.shards.bytes,
        ),
    )
    _write_hints(log, committed, body)
    return committed


@contextlib.contextmanager
def _in_doubt(log: RunLog, incarnation: Incarnation, attempt: Attempt) -> Iterator[None]:
    """Let an attempt stay unknown, once it was, until the log decides: its earlier request may still land (I5)."""
    prefix = str(attempt.stem)
    try:
        if prefix in incarnation.doubted:
            _ask_the_log(log, incarnation, attempt)
        yield
    except (FencedError, SupersededError):
        raise
    except CommitUnknownError:
        incarnation.doubted.add(prefix)
        raise
    except CkptStoreError as error:
        if prefix not in incarnation.doubted:
            raise
        raise CommitUnknownError(
            f"An earlier try to commit {prefix} may still land; this one failed: {error.message}",
            hint="Delete nothing. Commit this attempt again, or save again: the next append decides.",
            prefix=prefix,
        ) from error


def _ask_the_log(log: RunLog, incarnation: Incarnation, attempt: Attempt) -> None:
    """Raise what the log says, if it says no by now: then the data may have been collected since (I7)."""
    # A look: what the append meets itself, it writes the hint of.
    fold = advance(log.store, log.fold, log.clock, signing=log.options.signing)
    if _standing(fold, str(attempt.stem)) is None:
        nothing = attempt.record(shards=ShardTotals(0, 0), parts=(), documents=None, software={})
        decide_commit(fold, incarnation, nothing)


def append_commit(
    log: RunLog, incarnation: Incarnation, record: Commit, *, allowed: Callable[[], None] = lambda: None
) -> tuple[Committed, bytes | None]:
    """Append the commit, deciding anew at each slot; return it as it stands, and its bytes if they came in now.

    Raises:
        FencedError: See `commit`.
        SupersededError: See `commit`.
        CommitUnknownError: See `commit`.

    If killed: the record stands or not. If not, a request under way may land in that slot, and in no other.
    """

    def decide(fold: Fold) -> Commit | None:
        decided = decide_commit(fold, incarnation, record)
        if decided is not None:
            allowed()
        return decided

    def same(found: Record) -> bool:
        return isinstance(found, Commit) and found.prefix == record.prefix

    appended = log.append(decide, same=same)
    committed = _standing(log.fold, record.prefix)
    if committed is None:
        raise IntegrityError(
            f"The commit of {record.prefix} was appended, and the log does not hold it as valid.",
            hint="Run `ckptstore log URL`.",
            prefix=record.prefix,
        )
    return committed, appended.body if appended else None


def _standing(fold: Fold, prefix: str) -> Committed | None:
    seq = fold.committed_at(prefix)
    if seq is not None and seq not in fold.commits:
        raise SupersededError(f"{prefix} was committed in slot {seq} and has been retired since.", seq=seq)
    return None if seq is None else fold.commits[seq]


def decide_commit(fold: Fold, incarnation: Incarnation, record: Commit) -> Commit | None:
    """Return the commit for the slot above `fold`, with its parent there; None if it stands already (I16).

    Raises:
        FencedError: A newer incarnation has claimed (I3).
        SupersededError: A later attempt of this term has committed; this one counts as an orphan since (I7).
        IntegrityError: The claim is gone: the log lost its tail.
    """
    if fold.committed_at(record.prefix) is not None:
        return None
    check_not_fenced(fold, incarnation, record.term)
    if fold.term < record.term:
        raise IntegrityError(
            f"The log ends in term {fold.term}, this attempt has term {record.term}: its tail was lost.",
            hint="Restore the log from a backup or earlier versions of its objects.",
            expected=record.term,
            found=fold.term,
        )
    if fold.supersedes(record.attempt):
        raise SupersededError(
            f"Attempt {record.attempt} of term {record.term} cannot commit: a later one has.",
            hint="Drop this attempt; the next save goes on. If another writer of this process saves here too, end one: "
            "their checkpoints stand in one log, and each may retire those of the other.",
            term=record.term,
            attempt=record.attempt,
            committed=fold.tip.attempt if fold.tip else None,
        )
    return replace(record, parent=fold.tip.seq if fold.tip else incarnation.loaded)


def verify_stored(log: RunLog, expected: Sequence[tuple[str, int, str | None]], options: TransferOptions) -> None:
    """Check by listing that every object is there with its size, and with its ETag where both are known (I4).

    Raises:
        IntegrityError: One is missing or different; it is named, with what was expected and found.
    """
    prefixes = sorted({key.rpartition("/")[0] + "/" for key, _, _ in expected})
    with ThreadPoolExecutor(options.fetches_in_flight) as pool:
        listings = list(pool.map(lambda prefix: list(log.store.list(prefix)), prefixes))
    listed = {info.key: info for listing in listings for info in listing}
    deadline = log.clock.monotonic() + LISTING_SECONDS
    for key, size, etag in expected:
        info = listed.get(key)
        while (fault := stored_fault(info, size, etag)) is not None:
            if log.clock.monotonic() >= deadline:
                raise IntegrityError(
                    f"{key} {fault}. Nothing was committed.",
                    hint="Save again.",
                    key=key,
                    expected=[size, etag],
                    found=[info.size, info.etag] if info else None,
                )
            info = _head(log.store, key)
            if stored_fault(info, size, etag) is not None:
                log.clock.sleep(LISTING_PAUSE_SECONDS)


def stored_fault(info: ObjectInfo | None, size: int, etag: str | None) -> str | None:
    """Return what is wrong with what the store says of an object, or None."""
    if info is None:
        return "is missing"
    if info.size != size:
        return f"has {info.size} bytes, written were {size}"
    if etag is not None and info.etag is not None and info.etag != etag:
        return f"has the ETag {info.etag}, written was {etag}"
    return None


def _head(store: ObjectStore, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except NotFoundError:
        return None


def _checked(attempt: Attempt, shards: Iterable[StoredShard], software: Mapping[str, str]) -> list[StoredShard]:
    ordered = sorted(shards, key=lambda stored: stored.shard.rank)
    ranks = [stored.shard.rank for stored in ordered]
    if len(set(ranks)) != len(ranks) or (ranks and not 0 <= ranks[0] <= ranks[-1] < attempt.world_size):
        raise InvalidInputError(
            f"The ranks {ranks[:8]} are not distinct ranks of a group of {attempt.world_size}.", ranks=ranks[:8]
        )
    for stored in ordered:
        right = attempt.stem.shard_key(stored.shard.rank)
        if stored.shard.path != right:
            raise InvalidInputError(
                f"Rank {stored.shard.rank} wrote {stored.shard.path}, not {right}.", path=stored.shard.path
            )
    if len(canonical_json(dict(software))) > MAX_SOFTWARE_BYTES:
        raise InvalidInputError(f"`software` takes more than {MAX_SOFTWARE_BYTES} bytes.", hint="Name fewer versions.")
    covers(ordered)
    return ordered


def _write_parts(log: RunLog, ordered: list[StoredShard], attempt: Attempt, planner: Any) -> list[PartRef]:
    """Write the parts, and the root part last if they are too many for a record; return how they are named."""
    refs: list[PartRef] = []
    for shards in split(ordered) or [()]:
        body, inflated = encode_part(Part(shards, None if refs else planner))
        ranks = (shards[0].shard.rank, shards[-1].shard.rank) if shards else (0, 0)
        refs.append(_part_ref(attempt.stem.part_key(len(refs)), body, inflated, ranks))
        _put_part(log, refs[-1].path, body)
    if len(refs) > MAX_DIRECT_PARTS:
        body, inflated = encode_root(refs)
        ranks = (refs[0].ranks[0], refs[-1].ranks[1])
        refs.append(replace(_part_ref(attempt.stem.part_key(len(refs)), body, inflated, ranks), is_root=True))
        _put_part(log, refs[-1].path, body)
    return refs


def _write_documents(log: RunLog, attempt: Attempt) -> PartRef | None:
    documents = attempt.description.documents
    if documents is None:
        return None
    ref = _part_ref(attempt.stem.fingerprints_key, documents.body, documents.inflated, (0, 0))
    _put_part(log, ref.path, documents.body)
    return ref


def _named(refs: list[PartRef]) -> tuple[PartRef, ...]:
    return (refs[-1],) if refs[-1].is_root else tuple(refs)


def _part_ref(path: str, body: bytes, inflated: int, ranks: tuple[int, int]) -> PartRef:
    return PartRef(path, len(body), blake3(body).hexdigest(), inflated, ranks)


def _put_part(log: RunLog, key: str, body: bytes) -> None:
    outcome, _ = create_once(log.store, key, body, clock=log.clock, ids=log.ids, options=log.options)
    if outcome is Outcome.OTHER:  # I6
        raise IntegrityError(f"{key} holds other bytes than this attempt wrote.", hint="Save again.", key=key)
    if outcome is Outcome.UNKNOWN:
        raise UnavailableError(f"Whether {key} was stored is not known. Nothing was committed.", hint="Save again.")


def latest_hint(committed: Committed) -> LatestHint:
    """Return what `latest.json` says of a commit."""
    return LatestHint(
        seq=committed.seq,
        record_blake3=committed.blake3,
        checkpoint_id=committed.commit.checkpoint_id,
        global_step=committed.commit.global_step,
        committed_at=committed.written_at,
    )


def _write_hints(log: RunLog, committed: Committed, body: bytes | None) -> None:
    log.write_hint(LATEST_KEY, encode_latest(latest_hint(committed)))
    if body is not None:
        log.write_hint(committed.commit.stem.committed_key, body)
