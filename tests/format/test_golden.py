"""Version 1 is read for ever, and written as it always was."""

import gzip
import math
import re
import runpy
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import ckptstore.format
from ckptstore.format.checksum import hexdigest
from ckptstore.format.codec import PartRef, decode_part, decode_root
from ckptstore.format.documents import decode_documents
from ckptstore.format.trace import decode_trace
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import decode_value
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.transfer.download import BoxRead, read_boxes, verify_shard

GOLDEN = Path(__file__).parent / "golden"
MAKER = runpy.run_path(str(GOLDEN / "make.py"))
FILES = MAKER["files"]()
SPEC = (Path(ckptstore.format.__file__).parent / "SPEC.md").read_text(encoding="utf-8")


def ref_of(body, *, is_root=False):
    return PartRef("part", len(body), hexdigest(body), len(gzip.decompress(body)), (0, 0), is_root)


@pytest.fixture
def stored():
    body = (GOLDEN / "part-1.json.gz").read_bytes()
    (only,) = decode_part(body, ref_of(body)).shards
    return only


@pytest.fixture
def store(stored):
    store = MemoryStore()
    store.put(stored.shard.path, (GOLDEN / "shard-1.safetensors").read_bytes())
    return store


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_today_is_what_was_written_then_byte_for_byte(name):
    golden = (GOLDEN / name).read_bytes()
    if name.endswith(".gz"):
        assert gzip.decompress(FILES[name]) == gzip.decompress(golden)
    if not name.endswith(".gz") or "ng" not in zlib.ZLIB_RUNTIME_VERSION:  # zlib-ng deflates to other bytes
        assert FILES[name] == golden


def test_the_golden_shard_holds_every_byte_that_the_golden_part_says(store, stored):
    assert verify_shard(store, stored, options=TransferOptions()) == stored.shard.size == 734


def test_the_golden_values_come_back(store, stored):
    found = {}
    for item in stored.items:
        out = np.zeros((*item.chunk.lengths, item.chunk.nbytes // max(1, math.prod(item.chunk.lengths)) or 1), np.uint8)
        if item.chunk.nbytes:
            offsets = (0,) * len(item.chunk.lengths)
            read_boxes(
                store, [BoxRead(stored.shard, item, offsets, item.chunk.lengths, out)], options=TransferOptions()
            )
        found[item.chunk.tensor.name] = (item.chunk.offsets, out.tobytes())
    assert found == {
        "z": ((), np.complex128(0.5 - 0.25j).tobytes()),
        "model.w": ((2, 0), np.arange(6, 12, dtype="<f4").tobytes()),
        "none": ((0, 0), b""),
        "50%": ((0,), bytes.fromhex("803f00c0")),
        "step": ((0,), b'{"step":3}'),
    }


def test_safetensors_opens_the_golden_shard():
    with safe_open(GOLDEN / "shard-1.safetensors", "pt") as opened:
        assert opened.get_tensor("model.w@2,0").tolist() == [[6, 7, 8], [9, 10, 11]]
        assert opened.get_tensor("50%25").tolist() == [1, -2]
        assert opened.get_tensor("none").shape == (0, 3)
        assert opened.get_tensor("__ckptstore_leaves__").shape == (4, 32)


def test_the_golden_root_names_the_golden_part():
    root, part = ((GOLDEN / name).read_bytes() for name in ("root-1.json.gz", "part-1.json.gz"))
    (ref,) = decode_root(root, ref_of(root, is_root=True))
    assert decode_part(part, ref).planner == MAKER["PLANNER"]


def test_the_golden_values_document_comes_back():
    value = decode_value((GOLDEN / "values-1.json").read_bytes(), types=standard_types())
    assert repr(value) == repr(MAKER["VALUE"])


def test_the_golden_trace_comes_back():
    body = (GOLDEN / "trace-1.json").read_bytes()
    trace = decode_trace(body, **MAKER["COMMIT"], key="trace.json")
    assert trace == {"observations": [{"global_step": 4, "loss": 2.5}, {"global_step": 5, "loss": "NaN"}]}


@pytest.mark.parametrize(
    "name", ["part-1.json.gz", "root-1.json.gz", "values-1.json", "trace-1.json", "documents-1.json.gz"]
)
def test_the_examples_of_the_specification_are_the_golden_files(name):
    golden = (GOLDEN / name).read_bytes()
    text = (gzip.decompress(golden) if name.endswith(".gz") else golden).decode()
    assert re.sub(r"\s", "", text) in re.sub(r"\s", "", SPEC)


def test_the_hexadecimal_example_of_the_specification_is_the_golden_shard():
    golden = (GOLDEN / "shard-1.safetensors").read_bytes()
    rows = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} ){1,16}) ", SPEC, re.MULTILINE)
    assert rows
    for position, row in rows:
        start, found = int(position, 16), bytes.fromhex(row)
        assert golden[start : start + len(found)] == found


def test_the_golden_documents_come_back():
    body = (GOLDEN / "documents-1.json.gz").read_bytes()
    model = {**MAKER["DOCUMENTS"]["model"], "scale": "Infinity"}
    assert decode_documents(body, ref_of(body)) == {**MAKER["DOCUMENTS"], "model": model}
