"""Makes the golden files of version 1. They are made once: a file that exists is never replaced.

python tests/format/golden/make.py
"""

import struct
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ckptstore.format.checksum import hexdigest
from ckptstore.format.codec import Part, PartRef, encode_part, encode_root
from ckptstore.format.documents import encode_documents
from ckptstore.format.layout import Stem
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.format.trace import encode_trace
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import encode_value
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.upload import upload_shard

HERE = Path(__file__).parent
STEM = Stem("step-3", 1, 2, "0123456789abcdef" * 2)
PLANNER = {"keys": [["model.w", ["model", "w"]], ["50%", ["50%"]]]}
VALUE = {
    "epoch": 3,
    "seen": 2**60,
    "loss": float("nan"),
    "order": (1, [2.0, None, True]),
    "names": {1: "one", "1": "text", "$": b"\x00\xff"},
    "groups": OrderedDict([("b", {3, 1, 2})]),
    "rng": np.array([1, 2, 3], np.uint32),
    "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
}
TRACE = {"observations": [{"global_step": 4, "loss": 2.5}, {"global_step": 5, "loss": float("nan")}]}
COMMIT = {"seq": 1, "record_blake3": "6" * 64}
DOCUMENTS = {
    "model": {"rope_theta": 10000.0, "layers": 2, "tied": True, "scale": float("inf")},
    "data": {"samples": 10007, "files": {"part-0.bin": "blake3:77"}},
}

CHUNKS = (
    Chunk(TensorMeta("50%", "bfloat16", (2,)), (0,), (2,), 4),
    Chunk(TensorMeta("model.w", "float32", (4, 3)), (2, 0), (2, 3), 24),
    Chunk(TensorMeta("z", "complex128", ()), (), (), 16),
    Chunk(TensorMeta("step", "bytes", (10,)), (0,), (10,), 10, "ckptstore.json/1"),
    Chunk(TensorMeta("none", "float32", (0, 3)), (0, 0), (0, 3), 0),
)
BODIES = (
    bytes.fromhex("803f00c0"),  # 1, -2
    struct.pack("<6f", 6, 7, 8, 9, 10, 11),
    struct.pack("<2d", 0.5, -0.25),
    b'{"step":3}',
    b"",
)


def shard() -> tuple[StoredShard, bytes]:
    """Return the shard's description and its bytes."""
    store, layout, key = MemoryStore(), lay_out(CHUNKS), STEM.shard_key(0)
    bodies = [[BODIES[index]] for index in layout.order]
    receipt = upload_shard(store, key, layout, bodies, rank=0, options=TransferOptions())
    return StoredShard(receipt, layout.items), store.get(key, max_bytes=layout.size)


def files() -> dict[str, bytes]:
    """Return every golden file by its name."""
    stored, body = shard()
    part, inflated = encode_part(Part((stored,), PLANNER))
    ref = PartRef(STEM.part_key(0), len(part), hexdigest(part), inflated, (0, 0))
    return {
        "shard-1.safetensors": body,
        "part-1.json.gz": part,
        "root-1.json.gz": encode_root([ref])[0],
        "documents-1.json.gz": encode_documents(DOCUMENTS).body,
        "values-1.json": encode_value(VALUE, types=standard_types()),
        "trace-1.json": encode_trace(TRACE, **COMMIT),
    }


if __name__ == "__main__":
    for name, content in files().items():
        if not (HERE / name).exists():
            (HERE / name).write_bytes(content)
