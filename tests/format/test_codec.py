"""Manifest parts."""

import math

from ckptstore.format.checksum import hexdigest
from ckptstore.format.codec import Part, PartRef, decode_part, encode_part
from ckptstore.format.shard import Chunk, Shard, StoredShard, TensorMeta, lay_out


def stored(rank, chunks):
    layout = lay_out(chunks)
    shard = Shard(
        rank,
        f"rank-{rank}",
        layout.size,
        None,
        "0" * 64,
        len(layout.header),
        hexdigest(layout.header),
        layout.leaf_table_offset,
        "1" * 64,
    )
    return StoredShard(shard, layout.items)


def test_a_part_comes_back_as_it_was():
    whole = TensorMeta("model.w", "bfloat16", (8, 6))
    shards = [
        stored(
            rank,
            [
                Chunk(whole, (2 * rank, 0), (2, 6), math.prod((2, 6)) * 2),
                Chunk(TensorMeta(f"v{rank}", "bytes", (7,)), (0,), (7,), 7, "torch.save", rank == 2),
            ],
        )
        for rank in range(4)
    ]
    part = Part(tuple(shards), {"a": [1, "x"]})
    body, inflated = encode_part(part)
    assert decode_part(body, PartRef("p", len(body), hexdigest(body), inflated, (0, 3))) == part
