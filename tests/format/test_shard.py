"""A shard is a valid safetensors file, laid out before its first byte is known."""

import math

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.format.dtypes import DTYPES
from ckptstore.format.shard import Chunk, TensorMeta, item_name, lay_out, leaf_bytes_of, shard_root
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.upload import upload_shard

STORABLE = [dtype for dtype in DTYPES.values() if not dtype.refused]


def chunk(name="w", dtype="float32", shape=(4,), offsets=None, lengths=None):
    lengths = shape if lengths is None else lengths
    offsets = (0,) * len(shape) if offsets is None else offsets
    return Chunk(TensorMeta(name, dtype, shape), offsets, lengths, math.prod(lengths) * DTYPES[dtype].itemsize)


def value(name, nbytes, codec="torch.save"):
    return Chunk(TensorMeta(name, "bytes", (nbytes,)), (0,), (nbytes,), nbytes, codec)


def written(tmp_path, chunks, bodies):
    """Return the path of a file that holds the shard of `chunks`."""
    layout, store = lay_out(chunks), MemoryStore()
    ordered = [[bodies[index]] for index in layout.order]
    upload_shard(store, "shard", layout, ordered, rank=0, options=TransferOptions())
    path = tmp_path / "shard.safetensors"
    path.write_bytes(store.get("shard", max_bytes=10**8))
    return path


@pytest.mark.parametrize("dtype", STORABLE, ids=lambda dtype: dtype.name)
def test_every_storable_dtype_opens_in_safetensors_with_its_bytes(tmp_path, dtype):
    body = np.random.default_rng(1).integers(0, 2, 6 * dtype.itemsize, np.uint8).tobytes()
    path = written(tmp_path, [chunk("w", dtype.name, (2, 3))], [body])
    with safe_open(path, "pt") as opened:
        tensor = opened.get_tensor("w")
    assert tensor.flatten().view(torch.uint8).numpy().tobytes() == body
    if dtype.code is None:
        assert tensor.dtype == torch.uint8
        assert tuple(tensor.shape) == (2, 3, dtype.itemsize)
    else:
        assert tensor.dtype == getattr(torch, dtype.name)
        assert tuple(tensor.shape) == (2, 3)


def test_the_table_names_all_dtypes_of_torch_with_their_sizes():
    theirs = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert {name: dtype.itemsize for name, dtype in theirs.items()} == {d.name: d.itemsize for d in DTYPES.values()}
    assert len(STORABLE) == 22


@pytest.mark.parametrize("name", ["qint8", "uint3", "bits16", "float7"])
def test_a_dtype_that_cannot_be_stored_is_refused_with_its_tensor(name):
    with pytest.raises(UnsupportedError, match=f"{name}.*layer.weight"):
        lay_out([Chunk(TensorMeta("layer.weight", name, (1,)), (0,), (1,), 1)])


def test_strange_names_open_in_safetensors_under_their_encoded_names(tmp_path):
    names = ["__metadata__", "a@1", "50%", "ñ/π", "", "a b", "__ckptstore_leaves__", "_x"]
    bodies = [np.float32([index]).tobytes() for index, _ in enumerate(names)]
    path = written(tmp_path, [chunk(name, shape=()) for name in names], bodies)
    with safe_open(path, "np") as opened:
        found = {name: float(opened.get_tensor(name)) for name in opened.keys() if not name.startswith("__")}  # noqa: SIM118
    assert found == {
        "%5F%5Fmetadata__": 0.0,
        "a%401": 1.0,
        "50%25": 2.0,
        "ñ/π": 3.0,
        "": 4.0,
        "a b": 5.0,
        "%5F%5Fckptstore_leaves__": 6.0,
        "_x": 7.0,
    }


def test_a_part_of_a_tensor_is_named_by_its_offsets_and_says_the_whole_shape(tmp_path):
    part = chunk("w", shape=(8, 4), offsets=(2, 0), lengths=(3, 4))
    path = written(tmp_path, [part, value("step", 5)], [bytes(48), b"hello"])
    with safe_open(path, "np") as opened:
        assert opened.get_tensor("w@2,0").shape == (3, 4)
        assert opened.get_tensor("step").tobytes() == b"hello"
        assert opened.metadata() == {
            "__ckptstore__": "1",
            "w@2,0": '{"offsets":[2,0],"shape":[8,4]}',
            "step": '{"codec":"torch.save"}',
        }


def test_the_leaf_table_is_the_last_tensor_and_holds_the_hash_of_each_leaf(tmp_path):
    body = np.random.default_rng(2).integers(0, 256, 150_000, np.uint8).tobytes()
    path = written(tmp_path, [chunk("w", "uint8", (150_000,)), value("v", 3)], [body, b"abc"])
    with safe_open(path, "np") as opened:
        leaves = opened.get_tensor("__ckptstore_leaves__")
    pieces = [body[:65536], body[65536:131072], body[131072:], b"abc"]
    assert [bytes(leaf) for leaf in leaves] == [blake3(piece).digest() for piece in pieces]
    assert path.read_bytes().endswith(leaves.tobytes())


def test_every_tensor_is_aligned_to_its_element_size_whatever_the_order_given():
    dtypes = ["uint8", "complex128", "bool", "float16", "float64", "int32", "bfloat16", "complex64"]
    layout = lay_out([value("v", 5), *(chunk(name, name, (3,)) for name in dtypes)])
    assert len(layout.header) % 8 == 0
    for item in layout.items[:-1]:
        assert item.position % min(DTYPES[item.chunk.tensor.dtype].itemsize, 8) == 0
    assert layout.items[-1].chunk.tensor.name == "v"


@pytest.mark.parametrize(
    ("nbytes", "leaf"),
    [
        (0, 1 << 16),
        (1, 1 << 16),
        (32 << 16, 1 << 16),
        ((32 << 16) + 1, 1 << 17),
        (100 << 20, 4 << 20),
        (64 << 20, 2 << 20),
        ((64 << 20) + 1, 4 << 20),
        (6 << 30, 4 << 20),
    ],
)
def test_the_leaf_size_is_a_32nd_of_the_item_rounded_up_to_a_power_of_two(nbytes, leaf):
    assert leaf_bytes_of(nbytes) == leaf


def test_the_shard_root_binds_header_and_leaf_table():
    assert (
        shard_root(b"head", b"table")
        == blake3(b"ckptstore/1 shard root\n" + blake3(b"head").digest() + b"table").hexdigest()
    )


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk("w"), chunk("w")],
        [chunk("w", shape=(8,), offsets=(2,), lengths=(3,)), chunk("w", shape=(8,), offsets=(2,), lengths=(4,))],
        [chunk("w", shape=(8,), offsets=(6,), lengths=(3,))],
        [chunk("w", shape=(8,), offsets=(-1,), lengths=(3,))],
        [chunk("w", shape=(8,), offsets=(0, 0), lengths=(8,))],
        [Chunk(TensorMeta("w", "float32", (4,)), (0,), (4,), 15)],
        [Chunk(TensorMeta("w", "float32", (4,)), (0,), (4,), 16, "torch.save")],
        [value("v", 3, None)],
        [value("v", 3, "pickle")],
        [chunk("\ud800")],
    ],
)
def test_a_chunk_that_contradicts_itself_or_another_is_refused(chunks):
    with pytest.raises(InvalidInputError):
        lay_out(chunks)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([d.name for d in STORABLE]), st.integers(0, 300_000)), max_size=8))
def test_items_tile_the_shard_without_a_hole(planned):
    chunks = [chunk(str(index), dtype, (count,)) for index, (dtype, count) in enumerate(planned)]
    layout = lay_out(chunks)
    position, leaf = len(layout.header), 0
    for index, item in zip(layout.order, layout.items, strict=True):
        assert item.chunk is chunks[index]
        assert (item.position, item.first_leaf) == (position, leaf)
        position += item.chunk.nbytes
        leaf += -(-item.chunk.nbytes // leaf_bytes_of(item.chunk.nbytes))
    assert (layout.leaf_table_offset, layout.leaf_count, layout.size) == (position, leaf, position + 32 * leaf)
    sizes = [DTYPES[item.chunk.tensor.dtype].itemsize for item in layout.items]
    assert sizes == sorted(sizes, reverse=True)


@given(st.text(max_size=8), st.text(max_size=8))
def test_two_names_never_become_one(one, other):
    names = [item_name(Chunk(TensorMeta(name, "int8", (2,)), (0,), (1,), 1)) for name in (one, other)]
    wholes = [item_name(Chunk(TensorMeta(name, "int8", (1,)), (0,), (1,), 1)) for name in (one, other)]
    assert (names[0] == names[1]) == (wholes[0] == wholes[1]) == (one == other)
    assert not set(names) & set(wholes)
    assert not any(name.startswith("__") for name in names + wholes)
