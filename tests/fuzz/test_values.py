"""Typed values, restricted pickles, matrices in YAML, and URLs."""

from __future__ import annotations

import codecs
import datetime as dt
import io
import json
import zipfile
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import torch
from guarded import read
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import VALUES, damaged, each_edit, edited, written

from ckptstore.errors import CkptStoreError
from ckptstore.format.layout import Stem, own_key, parse_data_key, parse_slot
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import decode_value, encode_value
from ckptstore.objectstore.urls import open_store
from ckptstore.training.compat import Matrix
from ckptstore.training.values import value_types
from storage_writers.pickles import restricted_load

FUZZ = settings.get_profile("fuzz")
for _codec in ("cp437", "raw_unicode_escape", "unicode_escape", "latin1", "idna"):
    codecs.lookup(_codec)  # what is imported once by whatever is read
for _url in ("/", "memory://x", "s3://bucket/x"):
    open_store(_url)
GOLDEN = (Path(__file__).parents[1] / "format" / "golden" / "values-1.json").read_bytes()
RICH = encode_value(
    {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
        "tensor": torch.arange(6.0).view(2, 3),
        "scalar": np.float32(1.5),
        "text": np.str_("a"),
        "raw": np.bytes_(b"a"),
        "queue": deque([1], 3),
        "table": defaultdict(list, {1: [2]}),
        "delta": dt.timedelta(1, 2, 3),
        "day": dt.date(2026, 1, 2),
        "path": Path("/x/y"),
        "strange": "\ud800",
        "frozen": frozenset({1, "a"}),
        "nan": float("nan"),
    },
    types=value_types(),
)
TYPES = value_types()
DOCUMENTS = [json.loads(GOLDEN), json.loads(RICH)]


def decoded(body):
    read(decode_value, body, types=TYPES, size=len(body))


def test_the_right_values_are_read():
    assert read(decode_value, GOLDEN, types=standard_types(), size=len(GOLDEN)) is not None
    assert read(decode_value, RICH, types=TYPES, size=len(RICH)) is not None


@FUZZ
@given(damaged([GOLDEN, RICH]), edited(DOCUMENTS))
def test_typed_values(body, value):
    decoded(body)
    decoded(written(value))


def test_each_wrong_value_at_each_place_of_a_typed_value():
    for document in DOCUMENTS:
        for value in each_edit(document):
            decoded(written(value))


def tags(value):
    """Return all tags in a document."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = {key for key in value if key.startswith("$") and len(key) > 1} if isinstance(value, dict) else set()
    return own.union(*map(tags, inner)) if inner else own


def test_each_tag_with_each_wrong_value():
    """A tag may stand anywhere, so it meets what no writer puts under it."""
    every = tags(DOCUMENTS) | {"$zoneinfo", "$Counter", "$set", "$enum:x", "$dataclass:ckptstore.tensor_ref"}
    for tag in sorted(every):
        for wrong in (*VALUES, "../../etc/passwd", "os/system", ["a"], [["a", 1]], {"items": 7, "maxlen": -1}):
            decoded(written({tag: wrong}))
            decoded(written({"a": {"$tuple": [{tag: wrong}] * 3}}))


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


PICKLES = [
    saved({"a": torch.arange(4.0), "b": [1, 2.5, None, "x"], "c": OrderedDict(x=(1, 2)), "d": {1, 2}}),
    saved({"n": np.arange(3), "s": np.float64(2.0), "when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "p": Path("a/b")}),
]


def members(archive):
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


PARTS = [members(each) for each in PICKLES]
PROGRAMS = [next(body for name, body in each.items() if name.endswith("data.pkl")) for each in PARTS]


def archived(parts, program):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as opened:
        for name, body in parts.items():
            opened.writestr(name, program if name.endswith("data.pkl") else body)
    return stream.getvalue()


def test_the_right_pickles_are_read():
    for each, parts, program in zip(PICKLES, PARTS, PROGRAMS, strict=True):
        assert read(restricted_load, each, key="a", size=len(each)) is not None
        assert read(restricted_load, archived(parts, program), key="a", size=len(each)) is not None


@FUZZ
@given(damaged(PICKLES), damaged(PROGRAMS), st.sampled_from(PARTS))
def test_restricted_pickles(archive, program, parts):
    read(restricted_load, archive, key="a", size=len(archive))
    forged = archived(parts, program)
    read(restricted_load, forged, key="a", size=len(forged))


def test_each_flipped_bit_of_a_restricted_pickle():
    for parts, program in zip(PARTS, PROGRAMS, strict=True):
        for at in range(len(program)):
            flipped = bytearray(program)
            flipped[at] ^= 1 << (at % 8)
            forged = archived(parts, bytes(flipped))
            read(restricted_load, forged, key="a", size=len(forged))


MATRIX = b"""resume_compatibility:
  - from: {dp: 8, tp: 8}
    to: {dp: 4, tp: 8}
    status: tested
    evidence: drill 7
  - {from: {pp: 2}, to: {pp: 1}, status: forbidden}
"""
ATTACKS = [
    b"!!python/object/apply:os.system ['touch /tmp/ckptstore-fuzzed']",
    b"!!python/name:os.system",
    b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    b"? " * 500,
    b"- " * 2000,
    b"!!binary '" + b"A" * 400 + b"'",
    b"2001-99-99",
    b"!!timestamp x",
    b"!!int 0x" + b"f" * 5000,
    b"1:" * 2000 + b"1",
]


@FUZZ
@given(damaged([MATRIX, *ATTACKS]))
def test_matrices_in_yaml(body):
    text = body.decode(errors="replace")
    read(Matrix.read, text if "\n" in text else text + "\n", size=len(body))


def test_attacks_in_yaml_are_refused():
    for attack in ATTACKS:
        assert read(Matrix.read, f"{attack.decode()}\n", size=len(attack)) is None


SCHEMES = ("", "/", "./", "../", "file://", "file:///", "memory://", "s3://bucket/", "gs:/", "S3://", "az:", "http://")


@FUZZ
@given(st.sampled_from(SCHEMES), st.text(max_size=60), st.sampled_from(("", "/..", "/../..", "//x", "/\x00", "?a=b")))
def test_urls(scheme, text, tail):
    """A URL is taken literally or refused; what is opened lies at the place that it names."""
    url = f"{scheme}{text}{tail}"
    store = read(open_store, url, size=1 << 20)
    if store is not None:
        assert "/../" not in f"{store.url}/"
        assert "\x00" not in store.url


@FUZZ
@given(st.one_of(st.text(max_size=80), damaged([Stem("a/b", 1, 2, "0" * 32).shard_key(17).encode()])))
def test_keys(drawn):
    key = drawn if isinstance(drawn, str) else drawn.decode(errors="replace")
    read(parse_slot, key, size=len(key))
    read(parse_data_key, key, size=len(key))
    read(Stem.parse, key, size=len(key))
    stem = Stem("a/b", 1, 2, "0" * 32)
    found = read(own_key, key, stem=stem, what="A part", size=len(key))
    if found is not None:
        assert key.startswith(f"data/{found.lane:x}/{stem}/")
        assert key.count("/") == 3
    for wrong in VALUES:
        try:
            own_key(wrong, stem=stem, what="A part")
        except CkptStoreError:
            continue
        raise AssertionError(wrong)
