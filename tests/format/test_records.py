"""The bytes of records, `run.json` and `latest.json`: what is written now can be read for ever."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from blake3 import blake3

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.canonical import canonical_json
from ckptstore.format.codec import PartRef
from ckptstore.format.layout import Stem
from ckptstore.format.records import (
    MAX_RECORD_BYTES,
    Claim,
    Collected,
    Commit,
    Envelope,
    LatestHint,
    Pin,
    Proved,
    Restore,
    Retire,
    RunFile,
    SetAside,
    ShardTotals,
    Unknown,
    Unpin,
    Verified,
    decode_latest,
    decode_record,
    decode_run,
    encode_latest,
    encode_record,
    encode_run,
)
from ckptstore.signing import Signing

GOLDEN = Path(__file__).parent / "golden_records"
RUN = "8c1f0000000000000000000000000001"
AT = "2026-01-02T03:04:05.678Z"
RUN_FILE = RunFile(run=RUN, created_at=AT, created_by="ckptstore")
STEM = Stem("step 12000/ñ", 3, 7, "5e0d0000000000000000000000000002")

COMMIT = Commit(
    checkpoint_id=STEM.name,
    global_step=12000,
    term=3,
    attempt=7,
    parent=1,
    prefix=str(STEM),
    saved_world_size=4,
    parallelism={"dp": 2, "tp": 2},
    training_state={"consumed_samples": 98304, "epoch": 1, "lr": 0.0003, "note": None, "on": True},
    fingerprints={"data": "b3:77"},
    metrics={"best": -math.inf, "grad_norm": math.inf, "loss": math.nan, "val_loss": 2.5},
    tags=("nightly", "ñ"),
    shards=ShardTotals(4, 8192),
    parts=(PartRef(STEM.part_key(0), 512, "4" * 64, 2048, (0, 3)),),
    documents=PartRef(STEM.fingerprints_key, 64, "5" * 64, 128, (0, 0)),
    software={"ckptstore": "0.1.0", "torch": "2.13.0"},
)
RECORDS = [
    Claim(3, "1ca4000000000000000000000000000a", "llama-7b", "node-17:4242"),
    COMMIT,
    SetAside((2, 5), "quarantined", "leaf 3 of rank-00001 differs, read twice"),
    Restore((5,)),
    Pin(2, "eval", "release candidate"),
    Unpin(2, "eval"),
    Verified(2, "full"),
    Proved(2, "same loss for 20 steps"),
    Retire((1, 2), "keep last 3", term=3),
    Collected((1, 2)),
]


def golden():
    """Return the golden log: names of files and their bytes, each record linked to the one before."""
    files = {"run.json": encode_run(RUN_FILE)}
    prev = blake3(files["run.json"]).hexdigest()
    for seq, record in enumerate(RECORDS):
        fold = "f0" * 32 if seq == 0 else None
        body = encode_record(record, Envelope(1, RUN, seq, f"{seq:032x}", AT, prev, fold))
        files[f"{seq:012d}.{record.KIND}.json"] = body
        prev = blake3(body).hexdigest()
    files["latest.json"] = encode_latest(LatestHint(1, "6" * 64, STEM.name, 12000, AT))
    return files


def test_what_is_written_is_byte_for_byte_what_was_always_written():
    assert {path.name: path.read_bytes() for path in GOLDEN.iterdir()} == golden()


@pytest.mark.parametrize("seq", range(len(RECORDS)), ids=[record.KIND for record in RECORDS])
def test_the_golden_records_say_what_they_always_said(seq):
    body = next(GOLDEN.glob(f"{seq:012d}.*")).read_bytes()
    envelope, record, digest = decode_record(body, seq=seq, run=RUN)
    assert repr(record) == repr(RECORDS[seq])  # repr: NaN is not itself
    assert (envelope.seq, envelope.run, envelope.written_at) == (seq, RUN, AT)
    assert digest == blake3(body).hexdigest()


def test_the_golden_run_and_hint_say_what_they_always_said():
    assert decode_run((GOLDEN / "run.json").read_bytes()) == RUN_FILE
    assert decode_latest((GOLDEN / "latest.json").read_bytes()) == LatestHint(1, "6" * 64, STEM.name, 12000, AT)


def test_a_signed_record_is_byte_for_byte_what_was_always_signed():
    path = GOLDEN.parent / "golden_signed" / "000000000001.COMMIT.json"
    prev = blake3((GOLDEN / "000000000000.CLAIM.json").read_bytes()).hexdigest()
    signing = Signing(key=bytes(range(32)))
    body = encode_record(COMMIT, Envelope(1, RUN, 1, f"{1:032x}", AT, prev), signing=signing)
    assert body == path.read_bytes()
    trusted = Signing(trusted=(signing.public,))
    assert repr(decode_record(body, seq=1, run=RUN, signing=trusted)[1]) == repr(COMMIT)
    assert repr(decode_record(body, seq=1, run=RUN)[1]) == repr(COMMIT)


def test_a_record_is_sorted_json_with_one_newline_and_its_own_hash_last():
    body = golden()["000000000001.COMMIT.json"]
    assert body.endswith(b'"}\n')
    assert body.count(b"\n") == 1
    value = json.loads(body)
    head, own = body.rsplit(b',"self":"', 1)
    assert blake3(head).hexdigest() == value["self"] == own[:64].decode()
    assert [key for key in value if key != "self"] == sorted(key for key in value if key != "self")
    assert value["metrics"] == {"best": "-Infinity", "grad_norm": "Infinity", "loss": "NaN", "val_loss": 2.5}


def changed(record=COMMIT, seq=1, **fields):
    """Return the bytes of a record with other fields and the right seal; a field of `...` is left out."""
    body = encode_record(record, Envelope(1, RUN, seq, "0" * 32, AT, "0" * 64))
    value = {**json.loads(body), **fields}
    del value["self"]
    value = {key: inner for key, inner in value.items() if inner is not ...}
    head = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()[:-1]
    return head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'


def part(**fields):
    return {"path": STEM.part_key(0), "size": 1, "blake3": "0" * 64, "inflated": 1, "ranks": [0, 3], **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"seq": 2},
        {"run": "another"},
        {"prev": "short"},
        {"format": 0},
        {"format": "1"},
        {"kind": 7},
        {"kind": ...},
        {"fold": "x"},
        {"term": ...},
        {"term": -1},
        {"term": 2**63},
        {"term": True},
        {"term": 1.0},
        {"attempt": 8},
        {"attempt": 0},
        {"checkpoint_id": "another"},
        {"prefix": "not a stem"},
        {"prefix": str(STEM).replace(".a0007.", ".a007.")},
        {"status": "DONE"},
        {"saved_world_size": 0},
        {"parallelism": {"dp": "2"}},
        {"parallelism": []},
        {"training_state": 7},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": None}},
        {"tags": "nightly"},
        {"tags": [1]},
        {"shards": {"count": 1}},
        {"parts": []},
        {"parts": [part(ranks=[3, 0])]},
        {"parts": [part(ranks=[0])]},
        {"parts": [part(blake3="0")]},
        {"parts": [part(size=-1)]},
        {"parts": [part(path="../x")]},
        {"parts": [part(path=STEM.shard_key(0))]},
        {"documents": part()},
        {"software": {"torch": 2}},
    ],
    ids=str,
)
def test_a_record_with_a_field_that_is_not_what_it_must_be_is_damage(fields):
    with pytest.raises(IntegrityError) as caught:
        decode_record(changed(**fields), seq=1, run=RUN)
    assert caught.value.facts["key"] == "log/000000000001.json"


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (RECORDS[2], {"reason": "disliked"}),
        (RECORDS[2], {"seqs": 2}),
        (RECORDS[2], {"seqs": [2, None]}),
        (RECORDS[4], {"target": None}),
        (RECORDS[6], {"level": "deep"}),
        (RECORDS[8], {"term": "3"}),
    ],
    ids=str,
)
def test_the_other_kinds_are_checked_as_well(record, fields):
    with pytest.raises(IntegrityError):
        decode_record(changed(record, **fields), seq=1, run=RUN)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"\xff" * 100, b"[" * 60_000, b"x" * (MAX_RECORD_BYTES + 1)],
    ids=["empty", "object", "no UTF-8", "deep", "too long"],
)
def test_bytes_that_are_no_record_are_damage(body):
    for sealed in (body, body + b',"self":"' + blake3(body).hexdigest().encode() + b'"}\n'):
        with pytest.raises(IntegrityError):
            decode_record(sealed, seq=1, run=RUN)


def test_a_key_that_stands_twice_is_damage():
    head = changed().rsplit(b',"self":"', 1)[0] + b',"term":9'
    with pytest.raises(IntegrityError):
        decode_record(head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n', seq=1, run=RUN)


def test_unknown_keys_are_ignored_and_unknown_kinds_and_formats_are_handed_on():
    assert repr(decode_record(changed(colour="blue"), seq=1, run=RUN)[1]) == repr(COMMIT)
    assert decode_record(changed(kind="MERGE"), seq=1, run=RUN)[1] == Unknown("MERGE", optional=False)
    assert decode_record(changed(kind="MERGE", optional=True), seq=1, run=RUN)[1] == Unknown("MERGE", optional=True)
    assert decode_record(changed(format=2), seq=1, run=RUN)[1] == Unknown("COMMIT", optional=False, format=2)
    assert decode_record(changed(borrows=[1]), seq=1, run=RUN)[1] == Unknown("COMMIT", optional=False)


@pytest.mark.parametrize(
    "record",
    [
        SetAside((-1,), "abandoned"),
        SetAside((1,), "disliked"),
        SetAside(tuple(range(10**7, 10**7 + 8000)), "abandoned"),
        Pin(1, "x" * 20_000, "y"),
        Pin(1, "\ud800", "y"),
        Claim(1.5, "a", "b", "c"),
    ],
    ids=lambda record: repr(record)[:40],
)
def test_a_record_that_could_not_be_read_back_is_not_written(record):
    with pytest.raises(InvalidInputError):
        encode_record(record, Envelope(1, RUN, 1, "0" * 32, AT, "0" * 64))


@pytest.mark.parametrize(
    ("value", "at"),
    [
        ({"a": {"b": [1, {"c": {2}}]}}, "metrics['a']['b'][1]['c']"),
        ({"a": {1: 2}}, "metrics['a']"),
        ({"a": (1, "\ud800")}, "metrics['a'][1]"),
        (10**2000, "metrics"),
    ],
    ids=repr,
)
def test_what_cannot_be_recorded_is_named_with_the_way_to_it(value, at):
    with pytest.raises(InvalidInputError, match="cannot be recorded") as caught:
        canonical_json(value, what="metrics")
    assert caught.value.facts["at"] == at
    assert caught.value.message.startswith(f"{at} ")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"run":1}', b"\xff"])
def test_a_run_or_a_hint_that_says_nothing_is_refused(body):
    with pytest.raises(IntegrityError):
        decode_run(body)
    with pytest.raises((IntegrityError, InvalidInputError)):
        decode_latest(body)
