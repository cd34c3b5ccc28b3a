"""What fuzzing found, one by one, and what is right instead."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from run_samples import a_run, body_of, sealed

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.layout import Stem, parse_data_key, parse_slot, slot_key
from ckptstore.format.records import FOLD_EVERY, Envelope, decode_record
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import decode_value, encode_value
from ckptstore.protocol.snapshot import fold_from_state
from ckptstore.training.compat import Matrix
from ckptstore.training.values import value_types

NONCE = "0" * 32
LARGEST = 2**63 - 1


@pytest.mark.parametrize("digits", ["1" * 5000, str(2**63), "9" * 19, "9" * 20])
def test_a_key_with_a_number_from_2_63_on_is_foreign(digits):
    """Python refuses to read 5,000 digits as a number, with an error that is none of ours."""
    assert Stem.parse(f"x.t{digits}.a0001.{NONCE}") is None
    assert Stem.parse(f"x.t0001.a{digits}.{NONCE}") is None
    assert parse_slot(f"log/{digits}.json") is None
    for file in (f"rank-{digits}.safetensors", f"part-{digits}.json.gz"):
        assert parse_data_key(f"data/{int(digits[-1]):x}/x.t0001.a0001.{NONCE}/{file}") is None


def test_the_largest_number_of_a_key_is_read():
    stem = Stem("x", LARGEST, LARGEST, NONCE)
    assert Stem.parse(str(stem)) == stem
    assert parse_slot(slot_key(LARGEST)) == LARGEST
    assert parse_data_key(stem.shard_key(LARGEST)).rank == LARGEST


def test_a_commit_of_such_a_prefix_is_damage():
    store, job = a_run(1)
    value = json.loads(body_of(store, slot_key(1)))
    value["prefix"] = f"x.t{'1' * 5000}.a0001.{NONCE}"
    with pytest.raises(IntegrityError):
        decode_record(sealed(value), seq=1, run=job.log.run)


def snapshot(**changes):
    """Return what a snapshot with other values says, below a record that vouches for it."""
    _, job = a_run(1)
    value = {**json.loads(job.log.fold.encode()), "end": FOLD_EVERY, **changes}
    body = json.dumps(value).encode()
    above = Envelope(1, job.log.run, FOLD_EVERY, "e" * 32, "", job.log.fold.last, blake3(body).hexdigest())
    return fold_from_state(body, above)


def test_a_snapshot_that_retires_no_slot_is_refused():
    assert snapshot(retired={"7": "x"}).retired == {7: "x"}
    for wrong in ("x", "-1", "\u0661", "9" * 5000, "1.0", "", " 1", str(2**63)):
        with pytest.raises(InvalidInputError):
            snapshot(retired={wrong: "x"})


def test_a_snapshot_that_could_not_be_folded_on_is_refused():
    assert snapshot().ever_committed == 1
    with pytest.raises(InvalidInputError):
        snapshot(tip={"seq": 1, "attempt": 1, "prefix": "\ud800"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"$numpy.bytes": 2**31},
        {"$numpy.str": 7},
        {"$numpy.str": [1]},
        {"$path": {"$path": "x"}},
        {"$timedelta": "abc"},
        {"$timedelta": [1.5, 0, 0]},
        {"$timezone": {"$tuple": [{"$timedelta": [0, 0, 0]}]}},
        {"$zoneinfo": "../../etc/passwd"},
        {"$zoneinfo": "os/system"},
        {"$numpy.array": {"dtype": "|u1", "shape": [2], "data": [1, 2]}},
        {"$numpy.array": {"dtype": "|u1", "shape": {"$tuple": [2]}, "data": {"$bytes": "AQI="}}},
        {"$torch.device": 0},
        {"$torch.dtype": "nn"},
        {"$torch.dtype": "_dynamo"},
    ],
    ids=str,
)
def test_a_tag_of_another_type_is_damage_and_takes_no_room(wrong):
    """`np.bytes_(2**31)` would be two GiB of zeros, and torch imports some of its modules when they are named."""
    modules = set(sys.modules)
    tracemalloc.start()
    with pytest.raises(IntegrityError):
        decode_value(json.dumps(wrong).encode(), types=value_types())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    assert {name for name in set(sys.modules) - modules if name.startswith("torch")} == set()


def test_values_of_the_right_types_come_back():
    value = [np.bytes_(b"a\x00b"), np.str_("x"), Path("/a"), np.arange(2, dtype=np.uint8)]
    assert repr(decode_value(encode_value(value, types=standard_types()), types=standard_types())) == repr(value)


@pytest.mark.parametrize("text", ["!!timestamp x\n", "a: !!timestamp [1]\n", "!!binary [1]\n", "!!int [1]\n"])
def test_yaml_with_a_tag_that_does_not_fit_is_an_input_error(text):
    with pytest.raises(InvalidInputError, match=r"no YAML|no list|the keys"):
        Matrix.read(text)
