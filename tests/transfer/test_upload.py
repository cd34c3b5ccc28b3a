"""A shard streams out, is hashed on the way, and is published whole or not at all."""

import itertools
import tracemalloc
import weakref

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_samples import random_bytes, upload, value, whole

from ckptstore.errors import IntegrityError, InvalidInputError, NotFoundError, OutcomeUnknownError, UnavailableError
from ckptstore.format.shard import lay_out, shard_root
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import ObjectInfo
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import verify_shard
from ckptstore.transfer.upload import RUNS_BEHIND, upload_shard
from ckptstore.units import MIB

OPTIONS = TransferOptions()


def test_the_receipt_says_what_stands_in_the_store():
    store, chunks = MemoryStore(), [whole("w", "float32", (100, 300)), value("v", 9)]
    shard = upload(store, chunks, [random_bytes(chunk) for chunk in chunks], key="k", rank=3).shard
    body = store.get("k", max_bytes=10**6)
    header, table = body[: shard.header_bytes], body[shard.leaf_table_offset :]
    assert (shard.rank, shard.path, shard.size, shard.etag) == (3, "k", len(body), store.head("k").etag)
    assert shard.header_blake3 == blake3(header).hexdigest()
    assert shard.leaf_table_blake3 == blake3(table).hexdigest()
    assert shard.root == shard_root(header, table)
    assert int.from_bytes(header[:8], "little") == len(header) - 8


class UnansweringStore(MemoryStore):
    """Gives no answer to the end of an upload, or to a part of it."""

    def __init__(self, silent):
        super().__init__()
        self.silent = silent

    def open_upload(self, key, *, size):
        upload = super().open_upload(key, size=size)

        def unanswered(*_):
            raise OutcomeUnknownError(f"PUT {key}: no answer.", key=key)

        setattr(upload, self.silent, unanswered)
        return upload


@pytest.mark.parametrize("silent", ["write", "complete"])
def test_an_upload_without_an_answer_says_that_nothing_was_committed(silent):
    """I6: nobody else writes the key and nothing refers to it, so there is no log to look into."""
    chunk = whole("w", "uint8", (10,))
    with pytest.raises(UnavailableError, match="Nothing was committed") as caught:
        upload(UnansweringStore(silent), [chunk], [random_bytes(chunk)], key="k")
    assert caught.value.hint == "Save again."
    assert caught.value.facts["key"] == "k"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=5), st.data())
def test_the_same_bytes_arrive_however_they_are_cut_into_pieces(sizes, data):
    chunks = [whole(str(n), "uint8", (size,)) for n, size in enumerate(sizes)]
    bodies, layout, stores = [random_bytes(chunk).tobytes() for chunk in chunks], lay_out(chunks), []
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), max_size=6))) for size in sizes]
    pieces = [
        [body[a:b] for a, b in zip([0, *cut], [*cut, len(body)], strict=True)]
        for body, cut in zip(bodies, cuts, strict=True)
    ]
    for given_bodies in (pieces, [[memoryview(body)] for body in bodies], [[bytearray(body)] for body in bodies]):
        stores.append(MemoryStore())
        upload_shard(stores[-1], "k", layout, iter(given_bodies), rank=0, options=OPTIONS)
    assert len({store.get("k", max_bytes=10**7) for store in stores}) == 1


def test_pieces_are_asked_for_one_at_a_time_and_may_be_reused():
    chunk, store, buffer = whole("w", "uint8", (100_000,)), MemoryStore(), bytearray(1000)

    def reusing():
        for step in range(100):
            buffer[:] = bytes([step]) * 1000
            yield buffer

    layout = lay_out([chunk])
    shard = upload_shard(store, "k", layout, [reusing()], rank=0, options=OPTIONS)
    body = store.get("k", max_bytes=10**6)[shard.header_bytes : shard.leaf_table_offset]
    assert body == b"".join(bytes([step]) * 1000 for step in range(100))


@pytest.mark.parametrize("lasting", [False, True])
def test_large_pieces_are_hashed_as_they_were_sent(lasting):
    """They are handed on as they are: hashed before the next is asked for, or, if they last, some later."""
    size, buffer = 4 * MIB + 8, bytearray(4 * MIB + 8)
    chunk, store = whole("w", "uint8", (12 * size,)), MemoryStore()

    def given_out():
        for step in range(12):
            if lasting:
                yield bytes([step]) * size
            else:
                buffer[:] = bytes([step]) * size
                yield buffer

    layout = lay_out([chunk])
    shard = upload_shard(store, "k", layout, [given_out()], rank=0, options=OPTIONS, lasting=lasting)
    body = store.get("k", max_bytes=60 * MIB)
    leaf, table = layout.items[0].leaf_bytes, body[shard.leaf_table_offset :]
    sent = body[shard.header_bytes : shard.leaf_table_offset]
    assert sent == b"".join(bytes([step]) * size for step in range(12))
    assert table == b"".join(blake3(sent[at : at + leaf]).digest() for at in range(0, len(sent), leaf))


def test_hashing_lags_behind_writing_by_a_few_runs_only():
    """Else all pieces of a state that must be copied could be held at once."""
    size, alive = 4 * MIB, []
    layout = lay_out([whole("w", "uint8", (16 * size,))])

    class Copied(np.ndarray):
        pass

    def copies():
        for step in range(16):
            piece = np.full(size, step, np.uint8).view(Copied)
            alive.append(weakref.ref(piece))
            yield memoryview(piece)
            del piece
            assert sum(ref() is not None for ref in alive) <= RUNS_BEHIND + 2

    upload_shard(DiscardingStore(), "k", layout, [copies()], rank=0, options=OPTIONS, lasting=True)


class DiscardingStore(MemoryStore):
    """Takes an upload, and keeps none of its bytes."""

    def open_upload(self, key, *, size):
        upload = super().open_upload(key, size=size)
        upload.write = lambda _: None
        upload.complete = lambda: ObjectInfo(key, size)
        return upload


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ([[b"1234"], [b"12", b"3"]], "'b' was planned with 4 bytes and gave 3"),
        ([[b"1234"], [b"12", b"345"]], "'b' was planned with 4 bytes and gave more"),
        ([[b"1234"], []], "'b' was planned with 4 bytes and gave 0"),
        ([[b"1234"], itertools.repeat(b"x")], "'b' was planned with 4 bytes and gave more"),
        ([[b"1234"]], "bodies are fewer"),
        ([[b"1234"], [b"1234"], []], "Bodies are more"),
    ],
)
def test_an_item_of_another_size_publishes_nothing(bodies, said):
    store, layout = MemoryStore(), lay_out([whole("a", "uint8", (4,)), whole("b", "uint8", (4,))])
    with pytest.raises(InvalidInputError, match=said):
        upload_shard(store, "k", layout, bodies, rank=0, options=OPTIONS)
    with pytest.raises(NotFoundError):
        store.head("k")


class Stopped(BaseException):
    """As an interrupt is: no handler for errors sees it."""


def test_a_body_that_fails_publishes_nothing():
    def body():
        yield b"12"
        raise Stopped

    store, layout = MemoryStore(), lay_out([whole("a", "uint8", (4,))])
    with pytest.raises(Stopped):
        upload_shard(store, "k", layout, [body()], rank=0, options=OPTIONS)
    assert list(store.list("")) == []


class Shortening(MemoryStore):
    """Says that an object is shorter than what was written."""

    def put(self, key, body, **mode):
        info = super().put(key, body, **mode)
        return ObjectInfo(info.key, info.size - 1)


def test_a_store_that_says_another_size_is_not_believed():
    with pytest.raises(IntegrityError, match="the store says"):
        upload(Shortening(), [whole("a", "uint8", (4,))], [b"1234"])


class NullUpload:
    """Counts bytes and forgets them."""

    def __init__(self, key):
        self.key, self.size, self.writes = key, 0, 0

    def write(self, data):
        self.size += memoryview(data).nbytes
        self.writes += 1

    def complete(self):
        return ObjectInfo(self.key, self.size)

    def abort(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.abort()


class NullStore(MemoryStore):
    def open_upload(self, key, *, size):  # noqa: ARG002  (the port's signature)
        self.upload = NullUpload(key)
        return self.upload


class NullStoreThatKeeps(NullStore):
    engine = "obstore"


@pytest.mark.parametrize(("kind", "writes"), [(NullStore, 2 + 16), (NullStoreThatKeeps, 17)])
def test_a_large_item_streams_in_large_parts(kind, writes):
    chunk, store = whole("w", "float32", (8192, 8192)), kind()
    body = np.zeros(chunk.nbytes, np.uint8)
    layout = lay_out([chunk])
    tracemalloc.start()
    try:
        upload_shard(store, "k", layout, [[memoryview(body)]], rank=0, options=OPTIONS)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert store.upload.size == layout.size
    assert store.upload.writes == writes


@pytest.mark.parametrize("kind", [NullStore, NullStoreThatKeeps])
def test_tiny_items_are_joined_into_few_writes(kind):
    chunks, store = [whole(str(n), "uint8", (100,)) for n in range(10_000)], kind()
    upload(store, chunks, [bytes(100)] * 10_000)
    assert store.upload.writes < 20


def test_a_shard_without_items_is_a_shard():
    store = MemoryStore()
    assert verify_shard(store, upload(store, [], []), options=OPTIONS) == store.head("shard").size
