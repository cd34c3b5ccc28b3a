"""Manifest parts: many shards in one small gzip object, read without trust."""

import dataclasses
import gzip
import json
import math
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.codec import Part, PartRef, decode_part, decode_root, encode_part, encode_root, split
from ckptstore.format.dtypes import dtype_named
from ckptstore.format.shard import Chunk, Shard, StoredShard, TensorMeta, lay_out

BIG = 2**63


def chunk(name, dtype, shape, offsets=None, lengths=None):
    offsets, lengths = offsets or (0,) * len(shape), shape if lengths is None else lengths
    nbytes = math.prod(lengths) * dtype_named(dtype).itemsize
    return Chunk(TensorMeta(name, dtype, shape), offsets, lengths, nbytes)


def value(name, nbytes, codec="torch.save", *, pickled=False):
    return Chunk(TensorMeta(name, "bytes", (nbytes,)), (0,), (nbytes,), nbytes, codec, pickled)


def stored(rank, chunks, etag=None):
    layout = lay_out(chunks)
    shard = Shard(
        rank=rank,
        path=f"data/{rank % 16:x}/rank-{rank}",
        size=layout.size,
        etag=etag,
        root=hexdigest(b"root %d" % rank),
        header_bytes=len(layout.header),
        header_blake3=hexdigest(layout.header),
        leaf_table_offset=layout.leaf_table_offset,
        leaf_table_blake3=hexdigest(b"table %d" % rank),
    )
    return StoredShard(shard, layout.items)


def ref_of(body, inflated, ranks=(0, 99)):
    return PartRef("part-00000", len(body), hexdigest(body), inflated, ranks)


def example():
    shards = [
        stored(
            rank,
            [
                chunk("model.w", "float64", (8, 150_000), (2 * rank, 0), (2, 150_000)),
                chunk("model.b", "float32", ()),
                chunk("empty", "float32", (0, 3)),
                chunk("void", "float32", (0, 3)),
                value("step", 7, "ckptstore.json/1"),
                value(f"ranks/{rank}", 3, pickled=True),
            ],
            etag="abc" if rank % 2 else None,
        )
        for rank in range(4)
    ]
    return Part(tuple(shards), {"keys": [["model", 1]], "ñ": None})


def test_a_part_comes_back_as_it_was():
    body, inflated = encode_part(example())
    assert decode_part(body, ref_of(body, inflated)) == example()


def test_a_part_is_spelled_one_way_only_and_any_gzip_reads_it():
    body, inflated = encode_part(example())
    assert encode_part(example()) == (body, inflated)
    text = gzip.decompress(body)
    assert len(text) == inflated
    value = json.loads(text)
    assert [row[0] for row in value["tensors"]] == ["model.w", "model.b", "empty", "void", "step"] + [
        f"ranks/{n}" for n in range(4)
    ]
    assert value["shards"][0]["summary"] == {
        "items": 6,
        "bytes": 2 * 150_000 * 8 + 4 + 7 + 3,
        "dtypes": {"float64": 1, "float32": 3, "bytes": 2},
        "components": {"model": 2, "empty": 1, "void": 1, "step": 1, "ranks/0": 1},
    }


@st.composite
def states(draw):
    """A few ranks that hold rows of some tensors."""
    ranks = draw(st.integers(0, 4))
    shapes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50_000)), max_size=4))
    chunks = [[] for _ in range(ranks)]
    for index, (rows, columns) in enumerate(shapes):
        for rank in range(ranks):
            if draw(st.booleans()):
                first = draw(st.integers(0, rows))
                lengths = (draw(st.integers(0, rows - first)), columns)
                chunks[rank].append(chunk(f"t{index}", "float64", (rows, columns), (first, 0), lengths))
    return Part(tuple(stored(rank, each) for rank, each in enumerate(chunks)))


@settings(max_examples=100, deadline=None)
@given(states())
def test_whatever_is_laid_out_comes_back(part):
    body, inflated = encode_part(part)
    assert decode_part(body, ref_of(body, inflated)) == part


# What a part is refused for


def rewritten(change):
    """Return a part whose JSON `change` has been applied to, with a reference that fits it."""
    body, _ = encode_part(example())
    value = json.loads(gzip.decompress(body))
    changed = change(value)
    text = json.dumps(value if changed is None else changed).encode()
    body = gzip.compress(text)
    return body, ref_of(body, len(text))


def setting(path, new):
    def change(value):
        *way, last = path
        for step in way:
            value = value[step]
        value[last] = new(value[last]) if callable(new) else new

    return change


SHARD = ("shards", 1)


def twice(value):
    shard = value["shards"][1]
    shard["tensor"][3] = shard["tensor"][2]
    shard["summary"]["components"] = {"model": 2, "empty": 2, "step": 1, "ranks/1": 1}


CHANGES = {
    "no object": lambda _: [1],
    "another kind": setting(["kind"], "root"),
    "format true": setting(["format"], new=True),
    "format 0": setting(["format"], 0),
    "tensors missing": lambda value: value.pop("tensors") and None,
    "an unknown dtype": setting(["tensors", 0, 1], "float7"),
    "a quantised dtype": setting(["tensors", 0, 1], "qint8"),
    "a negative shape": setting(["tensors", 0, 2, 0], -8),
    "a float in a shape": setting(["tensors", 0, 2, 0], 8.0),
    "100 dimensions": setting(["tensors", 0, 2], [1] * 100),
    "a name that is no text": setting(["tensors", 0, 0], 5),
    "a tensor twice": setting(["tensors", 1, 0], "model.w"),
    "ranks that do not ascend": setting([*SHARD, "rank"], 0),
    "a rank beyond the reference": setting(["shards", 3, "rank"], 100),
    "a rank that is true": setting([*SHARD, "rank"], new=True),
    "a path that is no text": setting([*SHARD, "path"], None),
    "an etag that is no text": setting([*SHARD, "etag"], 3),
    "a digest in capitals": setting([*SHARD, "root"], str.upper),
    "a short digest": setting([*SHARD, "header_blake3"], "ab"),
    "no leaf table": setting([*SHARD, "leaf_table"], 5),
    "a leaf table elsewhere": setting([*SHARD, "leaf_table", "offset"], lambda old: old - 1),
    "another size": setting([*SHARD, "size"], lambda old: old + 1),
    "a size of 2^63": setting([*SHARD, "size"], BIG),
    "another header length": setting([*SHARD, "header_bytes"], lambda old: old + 8),
    "a tensor index out of the table": setting([*SHARD, "tensor", 0], 9),
    "a shape of 2^63": setting(["tensors", 2, 2, 0], BIG),
    "another tensor": setting([*SHARD, "tensor", 0], 1),
    "an item twice": twice,
    "a negative index": setting([*SHARD, "tensor", 0], -1),
    "an offset outside of the tensor": setting([*SHARD, "offsets", 0], 7),
    "a negative offset": setting([*SHARD, "offsets", 0], -1),
    "an offset of 2^63": setting([*SHARD, "offsets", 0], BIG),
    "an offset too many": setting([*SHARD, "offsets"], lambda old: [*old, 0]),
    "a length too few": setting([*SHARD, "lengths"], lambda old: old[:-1]),
    "a length that bytes contradict": setting([*SHARD, "lengths", 0], 1),
    "a position on another item": setting([*SHARD, "position", 1], lambda old: old - 1),
    "a position after a hole": setting([*SHARD, "position", 1], lambda old: old + 1),
    "other bytes": setting([*SHARD, "bytes", 0], lambda old: old + 1),
    "another leaf size": setting([*SHARD, "leaf_bytes", 0], lambda old: 2 * old),
    "a leaf size of 0": setting([*SHARD, "leaf_bytes", 0], 0),
    "another first leaf": setting([*SHARD, "first_leaf", 1], 0),
    "a column of text": setting([*SHARD, "first_leaf", 1], "1"),
    "a column of null": setting([*SHARD, "first_leaf"], None),
    "an unknown codec": setting([*SHARD, "codec", 0], "pickle"),
    "a codec that is a list": setting([*SHARD, "codec", 0], []),
    "a codec too few": setting([*SHARD, "codec"], ["torch.save"]),
    "pickled out of range": setting([*SHARD, "pickled"], [2]),
    "another summary": setting([*SHARD, "summary", "items"], 4),
    "no summary": setting([*SHARD, "summary"], None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_part_with_any_number_wrong_is_refused_even_with_the_right_hash(change):
    body, ref = rewritten(change)
    with pytest.raises(IntegrityError):
        decode_part(body, ref)


def test_unknown_keys_are_ignored():
    body, ref = rewritten(lambda value: value | {"later": 1})
    assert decode_part(body, ref) == example()


def test_a_newer_format_says_what_to_install():
    body, ref = rewritten(setting(["format"], 2))
    with pytest.raises(UnsupportedError, match="pip install --upgrade ckptstore"):
        decode_part(body, ref)


@pytest.mark.parametrize(
    "field",
    [{"size": 1}, {"blake3": "0" * 64}, {"inflated": 10}, {"inflated": 10**12}, {"ranks": (1, 3)}, {"ranks": (0, 2)}],
)
def test_a_part_that_its_reference_does_not_fit_is_refused(field):
    body, inflated = encode_part(example())
    with pytest.raises(IntegrityError):
        decode_part(body, dataclasses.replace(ref_of(body, inflated), **field))


TEXT = b'{"format":1,"kind":"part","tensors":[],"shards":[]}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        TEXT,
        gzip.compress(TEXT)[:-1],
        gzip.compress(TEXT) + b"x",
        gzip.compress(TEXT[:-9]) + gzip.compress(TEXT[-9:]),
        zlib.compress(TEXT),
        gzip.compress(TEXT.replace(b"1", b"NaN")),
        gzip.compress(TEXT.replace(b'"part"', b'"part","kind":"part"')),
        gzip.compress(b"\xff" + TEXT),
        gzip.compress(b"[" * 100_000),
    ],
    ids=["empty", "no gzip", "cut", "longer", "two members", "zlib", "NaN", "a key twice", "no UTF-8", "deep"],
)
def test_what_is_no_gzip_of_strict_json_is_refused(body):
    try:
        inflated = len(gzip.decompress(body))
    except (OSError, EOFError):
        inflated = len(TEXT)
    with pytest.raises(IntegrityError):
        decode_part(body, ref_of(body, inflated))


def test_a_bomb_is_never_inflated_beyond_what_was_recorded():
    bomb = gzip.compress(bytes(200_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="does not hold the recorded 1000 bytes"):
            decode_part(bomb, ref_of(bomb, 1000))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "part",
    [
        Part((stored(1, []), stored(0, []))),
        Part((stored(1, []), stored(1, []))),
        Part((stored(0, [chunk("w", "int8", (4,))]), stored(1, [chunk("w", "int16", (4,))]))),
        Part((stored(0, [chunk("w", "int8", (4,))]), stored(1, [chunk("w", "int8", (5,))]))),
        Part((), {1: "a key that would become text"}),
        Part((), [(1, 2)]),
        Part((), math.nan),
        Part((), {"a": object()}),
        Part((), "\ud800"),
    ],
)
def test_what_would_not_come_back_is_not_written(part):
    with pytest.raises(InvalidInputError):
        encode_part(part)


# Many parts


def test_parts_hold_256_shards_or_131072_items_and_one_shard_is_never_cut():
    few = [StoredShard(stored(0, []).shard, ())] * 600
    assert [len(part) for part in split(few)] == [256, 256, 88]
    item = stored(0, [value("v", 1)]).items[0]
    many = [StoredShard(few[0].shard, (item,) * count) for count in (100_000, 31_072, 1, 200_000, 1)]
    assert [[len(each.items) for each in part] for part in split(many)] == [[100_000, 31_072], [1], [200_000], [1]]
    assert split([]) == []


def refs():
    return tuple(
        PartRef(f"part-{n:05d}", 10 + n, hexdigest(b"%d" % n), 100, (256 * n, 256 * n + 255)) for n in range(3)
    )


def root(change=None):
    body, inflated = encode_root(refs())
    if change is None:
        return body, ref_of(body, inflated)
    value = json.loads(gzip.decompress(body))
    change(value)
    text = json.dumps(value).encode()
    body = gzip.compress(text)
    return body, ref_of(body, len(text))


def test_a_root_part_comes_back_as_it_was():
    assert decode_root(*root()) == refs()


@pytest.mark.parametrize(
    "change",
    [
        setting(["parts", 0, "root"], new=True),
        setting(["parts", 0, "root"], 1),
        setting(["parts", 0, "ranks"], [3, 1]),
        setting(["parts", 0, "ranks"], [1]),
        setting(["parts", 0, "size"], -1),
        setting(["parts", 0, "blake3"], "x"),
        setting(["parts", 0], None),
        setting(["parts"], {}),
        setting(["kind"], "part"),
    ],
)
def test_a_root_part_with_anything_wrong_is_refused(change):
    with pytest.raises(IntegrityError):
        decode_root(*root(change))


def test_a_root_part_is_no_part_and_a_part_is_no_root():
    with pytest.raises(IntegrityError):
        decode_part(*root())
    body, inflated = encode_part(example())
    with pytest.raises(IntegrityError):
        decode_root(body, ref_of(body, inflated))
