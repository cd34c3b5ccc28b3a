"""Bytes that are not what was written are found: at their leaf by a read, everywhere by a verification (I13)."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from transfer_samples import SMALL_FETCHES, CountingStore, random_bytes, read_of, upload, value, whole

from ckptstore.errors import CkptStoreError, IntegrityError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.shard import StoredShard, shard_root
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import check_shard, leaf_table, read_boxes, verify_shard

OPTIONS = TransferOptions()
CHUNKS = [whole("a", "float32", (3, 4)), whole("b", "uint8", (5,)), value("v", 6), whole("s", "int64", ())]


@pytest.fixture
def store():
    return CountingStore()


@pytest.fixture
def stored(store):
    return upload(store, CHUNKS, [random_bytes(chunk, seed) for seed, chunk in enumerate(CHUNKS)])


def failure(act):
    try:
        act()
    except CkptStoreError as error:
        return error
    return None


def test_every_single_bit_flip_is_found_by_verification_and_by_the_read_that_touches_it(store, stored):
    """I13: header, padding, items, leaf table; a read never hands out a byte of a flipped leaf."""
    shard, body = stored.shard, store.get("shard", max_bytes=10**6)
    for position, bit in itertools.product(range(len(body)), range(8)):
        store.put("shard", body)
        store.flip("shard", position, bit)
        assert isinstance(failure(lambda: verify_shard(store, stored, options=OPTIONS)), IntegrityError)
        structural = position < shard.header_bytes or position >= shard.leaf_table_offset
        assert isinstance(failure(lambda: check_shard(store, shard)), IntegrityError) == structural
        if position < shard.header_bytes:
            continue
        for item in stored.items:
            read = read_of(stored, item.chunk.tensor.name)
            error = failure(lambda read=read: read_boxes(store, [read], options=OPTIONS))
            inside = item.position <= position < item.position + item.chunk.nbytes
            assert isinstance(error, IntegrityError) == (inside or structural)
            assert read.out.tobytes() == (
                bytes(item.chunk.nbytes) if error else body[item.position : item.position + item.chunk.nbytes]
            )


CHANGES = {
    "truncated": lambda body: body[:-1],
    "truncated to its header": lambda body: body[:100],
    "empty": lambda body: body[:0],
    "longer": lambda body: body + b"\0",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_shard_of_another_length_is_refused_before_anything_is_read(store, stored, change):
    store.put("shard", bytes(change(bytearray(store.get("shard", max_bytes=10**6)))))
    with pytest.raises(IntegrityError, match="The size of shard is"):
        check_shard(store, stored.shard)
    assert not store.ranges


@pytest.mark.parametrize("work", [check_shard, leaf_table])
def test_a_shard_that_is_gone_is_damage_and_no_absent_checkpoint(store, stored, work):
    """I4."""
    store.delete("shard")
    with pytest.raises(IntegrityError, match="shard is missing"):
        work(store, stored.shard)


def test_two_shards_that_changed_places_are_refused(store):
    """Same names, shapes and sizes: only the leaf table tells them apart."""
    shards = [upload(store, CHUNKS, [random_bytes(c, n + 9) for c in CHUNKS], key=f"k{n}", rank=n) for n in range(2)]
    bodies = [store.get(f"k{n}", max_bytes=10**6) for n in range(2)]
    store.put("k0", bodies[1])
    store.put("k1", bodies[0])
    for stored in shards:
        assert stored.shard.header_blake3 == shards[0].shard.header_blake3
        with pytest.raises(IntegrityError, match="leaf table"):
            check_shard(store, stored.shard)
        read = read_of(stored, "a")
        with pytest.raises(IntegrityError, match="leaf table"):
            read_boxes(store, [read], options=OPTIONS)
        assert not read.out.any()


def test_a_flip_names_the_tensor_the_object_the_leaf_and_both_hashes(store):
    chunk = whole("model.w", "uint8", (300_000,))
    stored = upload(store, [chunk], [random_bytes(chunk)])
    expected = store.get_range("shard", start=stored.shard.leaf_table_offset + 3 * 32, length=32).hex()
    store.flip("shard", stored.items[0].position + 200_000)
    read = read_of(stored, "model.w")
    with pytest.raises(IntegrityError) as caught:
        read_boxes(store, [read], options=SMALL_FETCHES)
    facts = caught.value.facts
    assert (facts["tensor"], facts["key"], facts["leaf"], facts["shard_rank"]) == ("model.w", "shard", 3, 0)
    assert (facts["start"], facts["nbytes"]) == (stored.items[0].position + 3 * 65536, 65536)
    leaf = store.get_range("shard", start=facts["start"], length=65536)
    assert (facts["expected"], facts["found"]) == (expected, hexdigest(leaf))
    assert not read.out[3 * 65536 : 4 * 65536].any()


def test_a_flip_outside_of_the_touched_leaves_changes_nothing(store):
    chunk = whole("w", "uint8", (300_000,))
    stored = upload(store, [chunk], [body := random_bytes(chunk)])
    store.flip("shard", stored.items[0].position + 200_000)
    read = read_of(stored, "w", (0,), (190_000,))
    read_boxes(store, [read], options=SMALL_FETCHES)
    np.testing.assert_array_equal(read.out, body[:190_000])


def test_a_flip_in_one_of_many_shards_is_found_at_any_size_of_fetch(store):
    chunk = whole("w", "uint8", (700_000,))
    shards = [upload(store, [chunk], [random_bytes(chunk, n)], key=f"k{n}", rank=n) for n in range(5)]
    store.flip("k3", shards[3].items[0].position + 699_999, 7)
    for kib in (1, 64, 100, 8192):
        with pytest.raises(IntegrityError, match="in k3 has BLAKE3"):
            read_boxes(
                store,
                [read_of(stored, "w") for stored in shards],
                options=TransferOptions(fetch_bytes=kib * 1024, fetches_in_flight=2),
            )


def with_header(store, stored, change):
    """Give the shard another header of the same length, with receipts that fit it, as a faulty writer would."""
    body, old = store.get("shard", max_bytes=10**6), stored.shard
    text = change(body[8 : old.header_bytes])
    text += b" " * (old.header_bytes - 8 - len(text))
    header = body[:8] + text
    store.put("shard", header + body[old.header_bytes :])
    root = shard_root(header, body[old.leaf_table_offset :])
    return StoredShard(dataclasses.replace(old, header_blake3=hexdigest(header), root=root), stored.items)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"F32"', b'"I32"'),
        lambda text: text.replace(b'"shape":[3,4]', b'"shape":[4,3]'),
        lambda text: text.replace(b'"a"', b'"c"'),
        lambda text: text.replace(b"torch.save", b"torch.load"),
        lambda text: text.replace(b'"b":', b'"a":'),
        lambda text: text[:-9] + b"}" * 9,
        lambda text: text[:0] + b"[]",
        lambda text: text[:0] + b'{"__metadata__":[]}',
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "b"}).encode().replace(b" ", b""),
    ],
)
def test_a_header_that_contradicts_the_manifest_is_refused_although_its_hash_is_right(store, stored, change):
    with pytest.raises(IntegrityError):
        verify_shard(store, with_header(store, stored, change), options=OPTIONS)


def test_a_header_with_a_wrong_length_is_refused_although_its_hash_is_right(store, stored):
    body, old = bytearray(store.get("shard", max_bytes=10**6)), stored.shard
    body[0] ^= 1
    store.put("shard", bytes(body))
    header = bytes(body[: old.header_bytes])
    root = shard_root(header, bytes(body[old.leaf_table_offset :]))
    changed = StoredShard(dataclasses.replace(old, header_blake3=hexdigest(header), root=root), stored.items)
    with pytest.raises(IntegrityError, match="header's length"):
        verify_shard(store, changed, options=OPTIONS)


def test_a_root_that_does_not_bind_header_and_leaf_table_is_refused(store, stored):
    changed = dataclasses.replace(stored.shard, root="0" * 64)
    with pytest.raises(IntegrityError, match="The root of shard"):
        check_shard(store, changed)


def test_verification_reads_every_byte_once(store, stored):
    assert verify_shard(store, stored, options=OPTIONS) == stored.shard.size
    ranges = sorted((start, length) for _, start, length in store.ranges)
    ends = [start + length for start, length in ranges]
    assert [start for start, _ in ranges] == [0, *ends[:-1]]
    assert ends[-1] == stored.shard.size
