"""One tensor, put together from the chunks of several shards."""

import numpy as np
import pytest

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.layout import Stem
from ckptstore.format.shard import Chunk, Shard, StoredItem, TensorMeta, lay_out, leaf_bytes_of
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.assemble import box_of, read_bytes, whole
from ckptstore.transfer.upload import upload_shard

STEM = Stem("step-1", 1, 1, "0" * 32)
MATRIX = np.arange(7 * 5, dtype=np.int32).reshape(7, 5)
TENSOR = TensorMeta("w", "int32", MATRIX.shape)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def items(store):
    """The matrix on three ranks: rows 0-2, rows 3-6 left of column 2, the rest."""
    boxes = [((0, 0), (3, 5)), ((3, 0), (4, 2)), ((3, 2), (4, 3))]
    stored = []
    for rank, (offsets, lengths) in enumerate(boxes):
        rows, columns = (slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        body = np.ascontiguousarray(MATRIX[rows, columns]).tobytes()
        layout = lay_out([Chunk(TENSOR, offsets, lengths, len(body))])
        options = TransferOptions()
        shard = upload_shard(store, STEM.shard_key(rank), layout, [[body]], rank=rank, options=options)
        stored.append((shard, layout.items[0]))
    return stored


def read(store, items, box):
    return read_bytes(store, items, box, options=TransferOptions()).view(np.int32)[..., 0]


def test_a_whole_tensor_comes_back_from_three_shards(store, items):
    assert np.array_equal(read(store, items, whole(TENSOR)), MATRIX)


@pytest.mark.parametrize(
    "index", [(slice(2, 5), slice(1, 4)), (slice(-2, None),), (slice(None), slice(2, 3)), (slice(3, 3),), ()]
)
def test_any_box_is_what_numpy_would_slice(store, items, index):
    assert np.array_equal(read(store, items, box_of(TENSOR, index)), MATRIX[index])


def test_no_room_is_made_for_a_tensor_that_only_a_manifest_has(store):
    huge = Chunk(TensorMeta("w", "uint8", (2**50,)), (0,), (2**50,), 2**50)
    item = StoredItem(huge, 16, leaf_bytes_of(2**50), 0)
    end = 16 + 2**50
    size = end + item.leaf_count * 32
    store.put("shard", b"x" * 100)
    shard = Shard(0, "shard", size, None, "0" * 64, 16, "0" * 64, end, "0" * 64)
    with pytest.raises(IntegrityError, match="shard is 100"):
        read_bytes(store, [(shard, item)], whole(huge.tensor), options=TransferOptions())


@pytest.mark.parametrize("index", [(slice(None, None, 2),), (slice(0),) * 3])
def test_what_is_no_box_is_refused(index):
    with pytest.raises(InvalidInputError):
        box_of(TENSOR, index)


def test_a_tensor_whose_chunks_leave_a_gap_is_never_returned_with_whatever_memory_held(store, items):
    with pytest.raises(IntegrityError):
        read(store, items[:2], whole(TENSOR))
