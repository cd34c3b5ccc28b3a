"""Parts that are kept until they have been sent: right bytes, little memory, nothing left behind."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transfer_samples import whole

from ckptstore.errors import InvalidInputError, UnavailableError
from ckptstore.format.shard import StoredShard, lay_out
from ckptstore.objectstore.lent import Lent
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.transfer.budget import budget
from ckptstore.transfer.download import read_boxes, verify_shard
from ckptstore.transfer.spans import BoxRead
from ckptstore.transfer.upload import upload_shard
from ckptstore.units import KIB, MIB

SMALL = TransferOptions(part_bytes=5 * MIB, transfer_bytes=15 * MIB, hash_threads=2)
CHUNKS = [
    whole("large", "float32", (4096, 2000)),
    whole("none", "float32", (0,)),
    whole("middle", "int16", (3, MIB)),
    *[whole(f"small{n}", "uint8", (n,)) for n in (1, 100, 64 * KIB, 300 * KIB)],
]


class KeepingStore(MemoryStore):
    """Keeps what it is lent, as obstore does: a thread sends each part a little later, some of them twice."""

    engine = "obstore"

    def __init__(self, *, fails_at=None, most=lambda: None):
        super().__init__()
        self.fails_at, self.most = fails_at, most

    def open_upload(self, key, *, size):
        return KeepingUpload(super().open_upload(key, size=size), self)


class KeepingUpload:
    def __init__(self, inner, store):
        self.inner, self.store, self.sent = inner, store, []
        self.pool = ThreadPoolExecutor(4)

    def write(self, data):
        assert isinstance(data.obj, Lent)
        self.store.most()
        if len(self.sent) == self.store.fails_at:
            raise UnavailableError("A part could not be sent.", key="k")
        self.sent.append(self.pool.submit(self.send, data))

    @staticmethod
    def send(part):
        threading.Event().wait(0.003)
        first = bytes(part)
        threading.Event().wait(0.003)
        assert bytes(part) == first, "a part that is to be sent again was changed"
        return first

    def complete(self):
        for sent in self.sent:
            self.inner.write(sent.result(10))
        return self.inner.complete()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.shutdown(cancel_futures=True)
        self.inner.abort()


def bytes_of(chunk):
    return np.random.default_rng(chunk.nbytes).bytes(chunk.nbytes)


def reused(chunk, piece_bytes):
    """Yield a chunk's bytes in one piece of memory, which is overwritten for the next."""
    body, piece = bytes_of(chunk), bytearray(piece_bytes)
    for start in range(0, len(body), piece_bytes):
        nbytes = len(body[start : start + piece_bytes])
        piece[:nbytes] = body[start : start + nbytes]
        yield memoryview(piece)[:nbytes]
        piece[:] = b"\xaa" * piece_bytes


def send(store, key="k", *, piece_bytes=4 * MIB, options=SMALL):
    layout = lay_out(CHUNKS)
    bodies = (reused(CHUNKS[index], piece_bytes) for index in layout.order)
    return StoredShard(upload_shard(store, key, layout, bodies, rank=0, options=options), layout.items)


def nothing_is_left():
    gc.collect()
    return budget().held_bytes == budget().kept_bytes == 0


@pytest.mark.parametrize("kind", [MemoryStore, KeepingStore])
@pytest.mark.parametrize("piece_bytes", [70_001, MIB, 4 * MIB, 40 * MIB])
@pytest.mark.parametrize("transfer_mib", [5, 64])
def test_the_source_may_use_its_memory_again_at_once(kind, piece_bytes, transfer_mib):
    store = kind()
    options = TransferOptions(part_bytes=5 * MIB, transfer_bytes=transfer_mib * MIB, hash_threads=2)
    stored = send(store, piece_bytes=piece_bytes, options=options)
    body = store.get("k", max_bytes=100 * MIB)
    for item in stored.items:
        assert body[item.position :][: item.chunk.nbytes] == bytes_of(item.chunk)
    assert verify_shard(store, stored, options=options) == stored.shard.size
    assert nothing_is_left()


def test_many_uploads_and_reads_share_one_budget():
    seen = []

    def look():
        with budget()._changed:
            seen.append(budget().held_bytes + budget().kept_bytes)

    store = KeepingStore(most=look)
    stored = send(store)

    def read(_):
        outs = [
            np.zeros((*item.chunk.lengths, item.chunk.nbytes // max(1, np.prod(item.chunk.lengths))), np.uint8)
            for item in stored.items
            if item.chunk.nbytes
        ]
        items = [item for item in stored.items if item.chunk.nbytes]
        boxes = [
            BoxRead(stored.shard, item, (0,) * len(item.chunk.lengths), item.chunk.lengths, out)
            for item, out in zip(items, outs, strict=True)
        ]
        read_boxes(store, boxes, options=SMALL)
        return all(out.tobytes() == bytes_of(item.chunk) for item, out in zip(items, outs, strict=True))

    with ThreadPoolExecutor(9) as pool:
        uploads = [pool.submit(send, store, f"k{n}") for n in range(6)]
        reads = [pool.submit(read, n) for n in range(3)]
        assert len({upload.result(60).shard.root for upload in uploads}) == 1
        assert all(read.result(60) for read in reads)
    assert 5 * MIB <= max(seen) <= SMALL.transfer_bytes
    assert nothing_is_left()


@pytest.mark.parametrize("fails_at", [0, 2, 5])
def test_a_part_that_fails_gives_all_memory_back(fails_at):
    threads = threading.active_count()
    with pytest.raises(UnavailableError) as kept:
        send(KeepingStore(fails_at=fails_at))
    assert nothing_is_left()  # though the error's traceback refers to the part
    assert threading.active_count() == threads
    assert kept.value.facts["key"] == "k"


@pytest.mark.parametrize("kind", [MemoryStore, KeepingStore])
@pytest.mark.parametrize("error", [KeyboardInterrupt, InvalidInputError("no such device")])
def test_a_source_that_fails_leaves_no_thread_and_no_memory(kind, error):
    def source():
        yield from reused(CHUNKS[0], MIB)
        raise error

    threads, store = threading.active_count(), kind()
    with pytest.raises((KeyboardInterrupt, InvalidInputError)):
        upload_shard(store, "k", lay_out(CHUNKS[:1]), [source()], rank=0, options=SMALL)
    assert threading.active_count() == threads
    assert nothing_is_left()
    assert not [*store.list("")]


@pytest.mark.parametrize("place", ["file", "memory", "keeping"])
def test_many_uploads_leave_threads_and_descriptors_as_they_were(place, tmp_path):
    store = {"file": lambda: open_store(f"file://{tmp_path}"), "memory": MemoryStore, "keeping": KeepingStore}[place]()
    send(store, "first")
    before = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    for n in range(5):
        send(store, f"k{n}")
        store.delete(f"k{n}")
    assert (threading.active_count(), len([*Path("/proc/self/fd").iterdir()])) == before
    assert verify_shard(store, send(store, "last"), options=SMALL)
    assert nothing_is_left()


def test_parts_grow_with_the_object_and_fewer_are_on_their_way():
    options = TransferOptions()
    assert (options.part_bytes_of(1), options.parts_at_once(1)) == (16 * MIB, 4)
    assert (options.part_bytes_of(300_000 * MIB), options.parts_at_once(300_000 * MIB)) == (30 * MIB, 2)
    huge = 2_000_000 * MIB
    assert (options.part_bytes_of(huge), options.parts_at_once(huge)) == (200 * MIB, 1)
    assert TransferOptions(part_bytes=100 * MIB, transfer_bytes=20 * MIB).part_bytes_of(MIB) == 20 * MIB


@pytest.mark.parametrize("wrong", [{"transfer_bytes": MIB}, {"transfer_bytes": 0}, {"hash_threads": 0}])
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        TransferOptions(**wrong)


@pytest.mark.parametrize("transfer_mib", [5, 15])
def test_obstore_sends_parts_from_memory_that_is_used_again(s3_url, transfer_mib):
    options = TransferOptions(part_bytes=5 * MIB, transfer_bytes=transfer_mib * MIB)
    store = open_store(s3_url, transfer=options)
    stored = send(store, options=options)
    assert verify_shard(store, stored, options=options) == stored.shard.size
    assert nothing_is_left()


def test_an_upload_that_obstore_gives_up_leaves_no_memory(s3_url):
    def source():
        yield from reused(CHUNKS[0], 4 * MIB)
        raise KeyboardInterrupt

    store = open_store(s3_url, transfer=SMALL)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            upload_shard(store, "k", lay_out(CHUNKS[:1]), [source()], rank=0, options=SMALL)
        assert nothing_is_left()
    assert not [*store.list("")]
