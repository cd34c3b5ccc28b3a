"""Mending an object from a replica: only with the very bytes that this run's own records name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from ckptstore.errors import (
    CkptStoreError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnsupportedError,
)
from ckptstore.format.codec import PartRef
from ckptstore.format.layout import RUN_KEY
from ckptstore.format.records import MAX_RECORD_BYTES, decode_run
from ckptstore.format.shard import Shard, StoredShard
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.parts import direct_refs, load_parts
from ckptstore.protocol.reading import get_if_there
from ckptstore.transfer.budget import budget
from ckptstore.transfer.download import checked_table, damaged_leaves, fetch, spans_of_shard, verify_shard

ENGINES_THAT_CLEAR = ("fsspec",)
"""Where an upload that fails may remove what stood under its key."""


@dataclass(frozen=True, slots=True)
class Named:
    """An object as the log names it: by a commit record, or by a part whose hash stands in one.

    Args:
        key: The same in the run and in its replica.
        size: In bytes.
        what: A part or the documents, with their hash, or a shard, with its leaf table's.
    """

    key: str
    size: int
    what: PartRef | StoredShard


def check_replica(replica: ObjectStore, *, run: str, run_blake3: str) -> None:
    """Check that a store is a replica of this run, before its objects are read: it has the very same `run.json`.

    Args:
        replica: What was named as one.
        run: The run's identity.
        run_blake3: Of its `run.json`.

    Raises:
        NotFoundError: There is no run.
        InvalidInputError: It is of another run.
        CkptStoreError: It could not be read.
    """
    body = get_if_there(replica, RUN_KEY, max_bytes=MAX_RECORD_BYTES)
    hint = f"Check the URL of the replica: it is the root of a whole copy of this run, with {RUN_KEY}."
    if body is None:
        raise NotFoundError(f"There is no run at {replica.url}.", hint=hint, key=RUN_KEY)
    if blake3(body).hexdigest() == run_blake3:
        return
    try:
        theirs = f"of run {decode_run(body).run}"
    except CkptStoreError:
        theirs = "and cannot be read"
    raise InvalidInputError(
        f"{replica.url} is no replica of run {run}: its {RUN_KEY} is another one, {theirs}.", hint=hint, run=run
    )


def named_objects(store: ObjectStore, committed: Committed) -> Iterator[Named]:
    """Yield the objects of a checkpoint as far as they are known: those behind a damaged part are not.

    Raises:
        CkptStoreError: The store could not be read.
    """
    commit = committed.commit
    refs = [*commit.parts, *([commit.documents] if commit.documents is not None else [])]
    yield from (Named(ref.path, ref.size, ref) for ref in refs)
    try:
        if any(ref.is_root for ref in commit.parts):
            direct = direct_refs(store, commit.parts, commit.stem)
            yield from (Named(ref.path, ref.size, ref) for ref in direct)
        for part in load_parts(store, committed):
            yield from (Named(each.shard.path, each.shard.size, each) for each in part.shards)
    except IntegrityError:
        return


def check_offer(replica: ObjectStore, named: Named, *, options: TransferOptions) -> None:
    """Check that the replica has an object with the bytes that this run's records name.

    Raises:
        IntegrityError: It has other bytes.
        NotFoundError: It has none.
        CkptStoreError: It could not be read.
    """
    if isinstance(named.what, PartRef):
        _body(replica, named.what)
    else:
        verify_shard(replica, named.what, options=options)


def mend(
    store: ObjectStore, replica: ObjectStore, named: Named, *, again: ObjectStore, options: TransferOptions
) -> None:
    """Store the replica's object in place of one that is absent or damaged, and read it back.

    I6 says that no data key is written twice with different bytes. It holds: what is sent are the bytes whose hash the
    record names, those that were written under this key in the first place, and each leaf is hashed before it is sent.
    The caller has found the present object absent or damaged, so nothing that is right is replaced.

    Args:
        store: The run's.
        replica: Of another place, with the same keys.
        named: What is to be there.
        again: The run's, with a client of its own, to read back.
        options: How bytes are moved.

    Raises:
        IntegrityError: The replica has other bytes, and nothing was stored; or what was stored reads back otherwise.
        UnsupportedError: This engine may lose the present object if the upload fails; nothing was stored.
        CkptStoreError: It was not stored, or perhaps not: the present object is there, or the right one.

    If killed: the object as it was, or the right one; perhaps an incomplete upload.
    """
    if isinstance(named.what, PartRef):
        body = _body(replica, named.what)
        with contextlib.suppress(OutcomeUnknownError):  # what is read back decides
            store.put(named.key, body)
        _body(again, named.what)
        return
    if store.engine in ENGINES_THAT_CLEAR and _is_there(store, named.key):
        raise UnsupportedError(
            f"{named.key} cannot be replaced safely by the engine {store.engine}: if the upload fails, it may be lost.",
            hint="Copy the object by a tool of the store's own, or use another engine.",
            key=named.key,
        )
    with contextlib.suppress(OutcomeUnknownError):  # the same
        _copy(store, replica, named.what, options)
    verify_shard(again, named.what, options=options)


def _copy(store: ObjectStore, replica: ObjectStore, stored: StoredShard, options: TransferOptions) -> None:
    """Stream a shard, each piece of it verified before it is sent. Nothing is visible before all are."""
    shard = stored.shard
    table = checked_table(replica, stored)
    with store.open_upload(shard.path, size=shard.size) as upload:
        upload.write(_header(replica, shard))
        for span in spans_of_shard(stored, options):
            with budget().taken(span.length, options=options):
                data = fetch(replica, span)
                for error in damaged_leaves(span, data, table):
                    raise error
                upload.write(data)
        if table:
            upload.write(table)
        upload.complete()


def _header(replica: ObjectStore, shard: Shard) -> bytes:
    header = bytes(replica.get_range(shard.path, start=0, length=shard.header_bytes))
    if blake3(header).hexdigest() != shard.header_blake3:
        raise IntegrityError(f"The header of {shard.path} at {replica.url} is another one now.", key=shard.path)
    return header


def _body(store: ObjectStore, ref: PartRef) -> bytes:
    body = store.get(ref.path, max_bytes=ref.size)
    found = blake3(body).hexdigest()
    if found != ref.blake3:
        raise IntegrityError(
            f"{ref.path} at {store.url} has BLAKE3 {found}, recorded was {ref.blake3}.",
            key=ref.path,
            expected=ref.blake3,
            found=found,
        )
    return body


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True
