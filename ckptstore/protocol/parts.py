"""The parts of a committed checkpoint and its documents, checked before anything that they name is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.format.codec import Part, PartRef, decode_part, decode_root
from ckptstore.format.documents import check_ref, decode_documents
from ckptstore.format.layout import Stem, own_key
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.fold import Committed

_HINT = "Run `ckptstore verify URL` and load an older checkpoint."


def load_parts(store: ObjectStore, committed: Committed) -> list[Part]:
    """Return the parts of `committed`, each with its hash, every path under the commit's own attempt.

    Raises:
        IntegrityError: A part is missing, damaged or names a path elsewhere, or the totals are not those of the commit.
    """
    commit = committed.commit
    stem = commit.stem
    parts = [_part(store, ref, stem) for ref in direct_refs(store, commit.parts, stem)]
    stored = [shard for part in parts for shard in part.shards]
    found = (len(stored), sum(each.shard.size for each in stored))
    expected = (commit.shards.count, commit.shards.bytes)
    ranks = [each.shard.rank for each in stored]
    if found != expected or ranks != sorted(set(ranks)) or (ranks and ranks[-1] >= commit.saved_world_size):
        raise IntegrityError(
            f"The parts of {stem} describe {found[0]} shards with {found[1]} bytes of {len(set(ranks))} ranks, "
            f"the commit {expected[0]} with {expected[1]} of {commit.saved_world_size}.",
            hint=_HINT,
            expected=list(expected),
            found=list(found),
        )
    return parts


def direct_refs(store: ObjectStore, refs: Sequence[PartRef], stem: Stem) -> list[PartRef]:
    """Return how the parts with shards are named, looking into root parts.

    Raises:
        IntegrityError: A root part is missing or damaged, or a path is not the attempt's own.
    """
    found: list[PartRef] = []
    for ref in refs:
        found += decode_root(_body(store, ref, stem), ref) if ref.is_root else [ref]
    return found


def _part(store: ObjectStore, ref: PartRef, stem: Stem) -> Part:
    part = decode_part(_body(store, ref, stem), ref)
    for stored in part.shards:
        if own_key(stored.shard.path, stem=stem, what=ref.path).rank != stored.shard.rank:
            raise IntegrityError(
                f"{ref.path} names {stored.shard.path} as the shard of rank {stored.shard.rank}.",
                hint=_HINT,
                key=ref.path,
                expected=stem.shard_key(stored.shard.rank),
                found=stored.shard.path,
            )
    return part


def _body(store: ObjectStore, ref: PartRef, stem: Stem) -> bytes:
    if own_key(ref.path, stem=stem, what=f"The commit of {stem}").part is None:
        raise IntegrityError(f"{ref.path} is no part.", hint=_HINT, key=ref.path)
    return _get(store, ref)


def load_documents(store: ObjectStore, committed: Committed) -> dict[str, Any]:
    """Return the documents of `committed` by name, verified; none if it has none.

    Raises:
        IntegrityError: The object is missing or damaged, or the commit names another.
        UnsupportedError: A newer version wrote it.
    """
    ref, stem = committed.commit.documents, committed.commit.stem
    if ref is None:
        return {}
    if ref.path != stem.fingerprints_key:
        raise IntegrityError(f"{ref.path} does not hold the documents of {stem}.", hint=_HINT, key=ref.path)
    check_ref(ref)
    return decode_documents(_get(store, ref), ref)


def _get(store: ObjectStore, ref: PartRef) -> bytes:
    try:
        return store.get(ref.path, max_bytes=ref.size)
    except NotFoundError as error:
        raise IntegrityError(
            f"{ref.path} is missing.", hint=_HINT, key=ref.path, expected=ref.blake3, found=None
        ) from error
    except IntegrityError as error:  # no store returns more than it is asked for
        found = f"more than {ref.size} bytes"
        raise IntegrityError(
            f"{ref.path} has {found}, which were recorded.", hint=_HINT, key=ref.path, expected=ref.size, found=found
        ) from error
