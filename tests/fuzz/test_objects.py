"""Manifest parts, root parts, documents, and the headers and leaf tables of shards."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from guarded import read
from hypothesis import given, settings
from mutations import damaged, each_edit, edited, written

from ckptstore.errors import IntegrityError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.codec import MAX_INFLATED_BYTES, PartRef, decode_part, decode_root, deflate
from ckptstore.format.documents import decode_documents
from ckptstore.format.layout import Stem
from ckptstore.format.shard import StoredShard, shard_root
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import check_shard, verify_shard

GOLDEN = Path(__file__).parents[1] / "format" / "golden"
STEM = Stem("step-3", 1, 2, "0123456789abcdef" * 2)
FUZZ = settings.get_profile("fuzz")
BODIES = {name: (GOLDEN / f"{name}-1.json.gz").read_bytes() for name in ("part", "root", "documents")}
TEXTS = {name: gzip.decompress(body) for name, body in BODIES.items()}
DECODE = {"part": decode_part, "root": decode_root, "documents": decode_documents}


def ref_of(body, inflated):
    """Return how a commit that was forged with the object names it."""
    return PartRef(STEM.part_key(0), len(body), hexdigest(body), inflated, (0, 0))


def decoded(name, body, inflated):
    return read(DECODE[name], body, ref_of(body, inflated), size=len(body) + min(inflated, 64 * len(body)))


@pytest.mark.parametrize("name", DECODE)
@FUZZ
@given(damaged([b"x" * 64]), damaged(list(TEXTS.values())))
def test_objects_with_damaged_bytes_that_are_called_right(name, noise, text):
    for body in (BODIES[name][: len(noise)] + noise, deflate(text)):
        for inflated in (len(text), 0, 1, MAX_INFLATED_BYTES):
            decoded(name, body, inflated)


@pytest.mark.parametrize("name", DECODE)
@FUZZ
@given(edited([json.loads(text) for text in TEXTS.values()]))
def test_objects_with_wrong_values_that_are_called_right(name, value):
    text = written(value)
    decoded(name, deflate(text), len(text))


@pytest.mark.parametrize("name", DECODE)
def test_each_wrong_value_at_each_place_of_an_object(name):
    for value in each_edit(json.loads(TEXTS[name])):
        text = written(value)
        decoded(name, deflate(text), len(text))


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("said", [0, 1, 1000, 10**6])
def test_a_bomb_is_held_no_further_than_it_is_said_to_go(name, said):
    """64 MiB in 64 KiB: no more is inflated than the commit records."""
    bomb = gzip.compress(b" " * (64 << 20))
    tracemalloc.start()
    with pytest.raises(IntegrityError):
        DECODE[name](bomb, ref_of(bomb, said))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * said + len(bomb) + (1 << 20)


def test_an_object_that_is_said_to_be_larger_than_any_is_refused_before_it_is_inflated(monkeypatch):
    monkeypatch.setattr(zlib, "decompressobj", None)
    with pytest.raises(IntegrityError, match="are allowed"):
        decode_part(BODIES["part"], replace(ref_of(BODIES["part"], 0), inflated=MAX_INFLATED_BYTES + 1))


STORED = decode_part(BODIES["part"], ref_of(BODIES["part"], len(TEXTS["part"]))).shards[0]
SHARD = (GOLDEN / "shard-1.safetensors").read_bytes()
HEADER = json.loads(SHARD[8 : STORED.shard.header_bytes])


def verified(body, shard, size):
    """Verify a shard whose hashes a forged part has right, every byte of it."""
    store = MemoryStore()
    store.put(shard.path, body)
    stored = StoredShard(shard, STORED.items)
    read(verify_shard, store, stored, options=TransferOptions(fetches_in_flight=1), size=size)
    read(check_shard, store, shard, size=size)


def with_header(header):
    """Return a shard with other bytes for a header, padded or cut to its length, and what a part would say of it."""
    table = SHARD[STORED.shard.leaf_table_offset :]
    header = header.ljust(STORED.shard.header_bytes)[: STORED.shard.header_bytes]
    body = header + SHARD[len(header) :]
    shard = replace(STORED.shard, header_blake3=hexdigest(header), root=shard_root(header, table), size=len(body))
    return body, shard


@FUZZ
@given(damaged([SHARD]))
def test_shards_with_damaged_bytes(body):
    verified(body, STORED.shard, len(SHARD))
    verified(body, replace(STORED.shard, size=len(body)), len(SHARD))


@FUZZ
@given(damaged([SHARD[: STORED.shard.header_bytes]]), edited([HEADER]))
def test_headers_that_are_not_those_of_the_items(header, value):
    text = written(value)
    for each in (header, len(text).to_bytes(8, "little") + text):
        verified(*with_header(each), len(SHARD) + len(each))


def test_each_wrong_value_at_each_place_of_a_header():
    for value in each_edit(HEADER):
        text = written(value)
        verified(*with_header((STORED.shard.header_bytes - 8).to_bytes(8, "little") + text), len(SHARD) + len(text))


def test_the_right_bytes_are_read():
    """The fuzzed bytes reach what they are meant for."""
    for name, body in BODIES.items():
        assert decoded(name, body, len(TEXTS[name])) is not None
    store = MemoryStore()
    store.put(STORED.shard.path, SHARD)
    assert verify_shard(store, STORED, options=TransferOptions()) == len(SHARD)
