"""What a forged record, part or object says of its size is refused before room is made for it."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
from blake3 import blake3
from run_samples import a_run, body_of, sealed

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptStoreError, IntegrityError
from ckptstore.format.codec import MAX_PART_BYTES, Part, encode_part
from ckptstore.format.documents import MAX_OBJECT_BYTES
from ckptstore.format.layout import Stem, slot_key
from ckptstore.format.shard import Chunk, Shard, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.local import LocalStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.log import RunLog
from ckptstore.testing.simulated import ManualClock
from ckptstore.units import MIB

HUGE = (2**30, 2**40, 2**55, 2**62)


@pytest.fixture(params=["memory", "file"])
def forged(request, tmp_path):
    """A run of one save in a store, and what forges its commit."""
    store, _ = a_run(1)
    if request.param == "file":
        files = LocalStore(str(tmp_path / "run"))
        for info in store.list(""):
            files.put(info.key, body_of(store, info.key))
        store = files
    commit = json.loads(body_of(store, slot_key(1)))

    def forge(change):
        change(commit)
        store.put(slot_key(1), sealed(commit))
        return store

    return forge


def refused(store, ask):
    """Ask, expect one of our errors, and return the most bytes that were held."""
    tracemalloc.start()
    try:
        with pytest.raises(CkptStoreError) as caught:
            ask(store)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def newest(store):
    log = RunLog.open(store, clock=ManualClock())
    return Checkpoint(log, Catalog(log).latest(), TransferOptions())


def with_tensor(store, commit, nbytes, dtype="uint8"):
    """Let the commit name a shard of one tensor of so many bytes, of which every number is right but the bytes."""
    stem = Stem.parse(commit["prefix"])
    shape = (nbytes,)
    meta = TensorMeta("w", dtype, shape)
    layout = lay_out([Chunk(meta, (0,), shape, nbytes, "ckptstore.json/1" if dtype == "bytes" else None)])
    shard = Shard(
        rank=0,
        path=stem.shard_key(0),
        size=layout.size,
        etag=None,
        root="0" * 64,
        header_bytes=len(layout.header),
        header_blake3=blake3(layout.header).hexdigest(),
        leaf_table_offset=layout.leaf_table_offset,
        leaf_table_blake3="0" * 64,
    )
    body, inflated = encode_part(Part((StoredShard(shard, layout.items),)))
    store.put(stem.part_key(0), body)
    store.put(stem.shard_key(0), layout.header)
    ref = commit["parts"][0]
    ref |= {"size": len(body), "blake3": blake3(body).hexdigest(), "inflated": inflated}
    commit["parts"], commit["shards"] = [ref], {"count": 1, "bytes": layout.size}


@pytest.mark.parametrize("dtype", ["uint8", "bytes"])
@pytest.mark.parametrize("nbytes", HUGE)
def test_a_tensor_that_is_said_to_be_huge_takes_no_room(forged, nbytes, dtype):
    def change(commit):
        with_tensor(store, commit, nbytes, dtype)

    store = forged(lambda _: None)
    forged(change)
    log = RunLog.open(store, clock=ManualClock())
    asks = [lambda store: newest(store).read("w"), lambda store: newest(store).value("w")]
    for ask in asks:
        _, peak = refused(store, ask)
        assert peak < 4 * MIB
    for level in ("exists", "full"):
        tracemalloc.start()
        assert not Catalog(log).verify(Catalog(log).latest(), level=level, options=TransferOptions()).ok
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * MIB


@pytest.mark.parametrize("field", ["size", "inflated"])
@pytest.mark.parametrize("said", [MAX_PART_BYTES + 1, 2**40, 2**63 - 1, 2**63, 10**30])
def test_a_part_that_is_said_to_be_huge_makes_the_record_damage(forged, field, said):
    store = forged(lambda commit: commit["parts"][0].update({field: said}))
    error, peak = refused(store, newest)
    assert isinstance(error, IntegrityError)
    assert peak < MIB


@pytest.mark.parametrize("said", [MAX_OBJECT_BYTES + 1, MAX_PART_BYTES])
def test_documents_that_are_said_to_be_huge_are_not_asked_for(forged, said):
    def change(commit):
        path = f"data/0/{commit['prefix']}/fingerprints.json.gz"
        commit["documents"] = {**commit["parts"][0], "path": path, "size": said, "ranks": [0, 0]}

    error, peak = refused(forged(change), lambda store: newest(store).documents())
    assert isinstance(error, IntegrityError)
    assert peak < MIB


def test_a_part_that_is_larger_than_it_is_said_to_be_is_not_read_whole(forged):
    store = forged(lambda _: None)
    path = json.loads(body_of(store, slot_key(1)))["parts"][0]["path"]
    store.put(path, bytes(32 * MIB))
    _, peak = refused(store, lambda store: newest(store).keys)
    assert peak < MIB


def test_a_bomb_in_the_place_of_a_part_is_inflated_no_further_than_is_said(forged):
    bomb = gzip.compress(b"[" * (32 * MIB))

    def change(commit):
        ref = commit["parts"][0]
        store.put(ref["path"], bomb)
        ref |= {"size": len(bomb), "blake3": blake3(bomb).hexdigest()}

    store = forged(lambda _: None)
    forged(change)
    _, peak = refused(store, lambda store: newest(store).keys)
    assert peak < 2 * MIB


@pytest.mark.parametrize("key", ["run.json", "latest.json", "state/000000000064.json", slot_key(1), slot_key(2)])
def test_a_log_with_an_object_of_64_mib_is_not_read_whole(forged, key):
    """Hints are passed over, records are damage; neither is held."""
    store = forged(lambda _: None)
    store.put(key, bytes(65 * MIB))
    tracemalloc.start()
    try:
        newest(store)
    except CkptStoreError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MIB
