"""Records, `run.json`, `latest.json`, snapshots, traces, and whole runs of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from guarded import read
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import damaged, each_edit, edited, written
from run_samples import Job, a_run, body_of
from signing_samples import REQUIRED, TRAINER, TRUSTED, a_signed_run, signs

from ckptstore.format.layout import slot_key, state_key
from ckptstore.format.records import FOLD_EVERY, decode_latest, decode_record, decode_run
from ckptstore.format.seal import seal, signed
from ckptstore.format.trace import decode_trace, encode_trace
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_documents, load_parts
from ckptstore.protocol.snapshot import fold_from_state
from ckptstore.protocol.verify import readable_records
from ckptstore.signing import Signing
from ckptstore.testing.simulated import ManualClock

GOLDEN = Path(__file__).parents[1] / "format" / "golden_records"
RECORDS = [path.read_bytes() for path in sorted(GOLDEN.glob("0*.json"))]
RUN = json.loads(RECORDS[0])["run"]
PLAIN = [json.loads(body) for body in RECORDS]
FUZZ = settings.get_profile("fuzz")


def sealed(value):
    value = {key: inner for key, inner in value.items() if key != "self"} if isinstance(value, dict) else value
    head = written(value)[:-1]
    return head + seal(head)


def decoded(body, seq, signing=None):
    return read(decode_record, body, seq=seq, run=RUN, signing=signing, size=len(body))


@FUZZ
@given(damaged(RECORDS), st.integers(0, 9))
def test_records_with_damaged_bytes(body, seq):
    decoded(body, seq)
    head = body[:-77]
    decoded(head + seal(head), seq)


@FUZZ
@given(st.integers(0, 9).flatmap(lambda seq: st.tuples(st.just(seq), edited([PLAIN[seq]]))))
def test_sealed_records_with_wrong_values(drawn):
    seq, value = drawn
    decoded(sealed(value), seq)


@FUZZ
@given(st.integers(0, 9).flatmap(lambda seq: st.tuples(st.just(seq), edited([PLAIN[seq]]))), damaged([b"x" * 230]))
def test_records_that_must_be_signed_are_read_only_if_they_are(drawn, noise):
    seq, value = drawn
    own = Signing(key=TRAINER, trusted=TRUSTED)
    head = written(value)[:-1]
    for tail in (b"", noise, signed(head, own)[len(head) :][:-7] + noise[:7]):
        body = head + tail
        assert decoded(body + seal(body), seq, REQUIRED.signing) is None
    body = signed(head, own)
    decoded(body + seal(body), seq, REQUIRED.signing)  # a trusted writer's mistakes are refused one by one


@FUZZ
@given(damaged([(GOLDEN / "run.json").read_bytes()]), edited([json.loads((GOLDEN / "run.json").read_bytes())]))
def test_run_json(body, value):
    for each in (body, written(value)):
        read(decode_run, each, size=len(each))


@FUZZ
@given(damaged([(GOLDEN / "latest.json").read_bytes()]), edited([json.loads((GOLDEN / "latest.json").read_bytes())]))
def test_latest_json(body, value):
    for each in (body, sealed(value)):
        read(decode_latest, each, size=len(each))


TRACE = encode_trace({"loss": [1.0, "NaN"], "at": {"x": None}}, seq=3, record_blake3="6" * 64)


@FUZZ
@given(damaged([TRACE]), edited([json.loads(TRACE)]))
def test_traces(body, value):
    for each in (body, sealed(value)):
        read(decode_trace, each, seq=3, record_blake3="6" * 64, key="trace.json", size=len(each))


def _long_run():
    job = Job(MemoryStore(clock=ManualClock()))
    for number in range(1, 4):
        job.save(f"step-{number}", step=number)
    for number in range(FOLD_EVERY):
        job.catalog.pin(1, holder=f"h{number}", reason="x")
    return job.store


LONG = _long_run()
STATE = body_of(LONG, state_key(FOLD_EVERY))
ABOVE = decode_record(
    body_of(LONG, slot_key(FOLD_EVERY)), seq=FOLD_EVERY, run=json.loads(body_of(LONG, "run.json"))["run"]
)[0]


@FUZZ
@given(damaged([STATE]), edited([json.loads(STATE)]))
def test_snapshots_that_the_record_above_vouches_for(body, value):
    folded(body)
    folded(written(value) + b"\n")


def folded(body):
    above = replace(ABOVE, fold=blake3(body).hexdigest())
    fold = read(fold_from_state, body, above, size=len(body))
    if fold is not None:
        read(fold.encode, size=len(body))
        read(lambda: (fold.newest, fold.newest_verified, fold.selectable), size=len(body))


@pytest.mark.parametrize("seq", range(10), ids=[path.stem for path in sorted(GOLDEN.glob("0*.json"))])
def test_each_wrong_value_at_each_place_of_a_sealed_record(seq):
    for value in each_edit(PLAIN[seq]):
        decoded(sealed(value), seq)


def test_each_wrong_value_at_each_place_of_run_json_the_hint_and_a_trace():
    for value in each_edit(json.loads((GOLDEN / "run.json").read_bytes())):
        read(decode_run, written(value), size=1000)
    for value in each_edit(json.loads((GOLDEN / "latest.json").read_bytes())):
        read(decode_latest, sealed(value), size=1000)
    for value in each_edit(json.loads(TRACE)):
        read(decode_trace, sealed(value), seq=3, record_blake3="6" * 64, key="trace.json", size=1000)


def test_each_wrong_value_at_each_place_of_a_snapshot():
    value = json.loads(STATE)
    del value["commits"][1:], value["commits"][0]["pins"][1:]
    value["retired"] = {"2": value["commits"][0]["commit"]["prefix"]}
    for each in each_edit(value):
        folded(written(each) + b"\n")


def objects(store):
    return {info.key: body_of(store, info.key) for info in store.list("")}


RUNS = {"unsigned": objects(a_run(2)[0]), "long": objects(LONG), "signed": objects(a_signed_run(2)[0])}


def questions(store, options):
    """Ask all that reads nothing but what may be forged."""
    log = RunLog.open(store, clock=ManualClock(), options=options)
    catalog = Catalog(log)
    for committed in catalog.checkpoints(include_set_aside=True):
        load_parts(store, committed)
        load_documents(store, committed)
    catalog.in_progress()
    return [each.commit for each in catalog.checkpoints(include_set_aside=True)]


@pytest.mark.parametrize("name", RUNS)
@FUZZ
@given(st.data())
def test_whole_runs_with_forged_objects(name, data):
    """I10, I11: a run with any object replaced, and others beside it, is read as it was or refused."""
    bodies = dict(RUNS[name])
    keys = sorted(bodies)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(keys))
        forged = data.draw(damaged([bodies[key]]))
        if key.endswith(".json") and data.draw(st.booleans()):
            value = data.draw(edited([json.loads(RUNS[name][key])]))
            forged = sealed(value) if "self" in json.loads(RUNS[name][key]) else written(value)
        at = data.draw(st.sampled_from((key, slot_key(len(RECORDS)), slot_key(10**11), "log/" + "9" * 200 + ".json")))
        bodies[at] = forged
    store = MemoryStore()
    for key, body in bodies.items():
        store.put(key, body)
    options = REQUIRED if name == "signed" else None
    size = sum(map(len, bodies.values()))
    found = read(questions, store, options, size=size)
    read(lambda: list(itertools.islice(readable_records(store), 200)), size=size)
    if name == "signed" and found is not None:
        right = [each.commit for each in Catalog(RunLog.open(_stored(RUNS[name]))).checkpoints()]
        assert [repr(each) for each in found] == [repr(each) for each in right][: len(found)]


def _stored(bodies):
    store = MemoryStore()
    for key, body in bodies.items():
        store.put(key, body)
    return store


def test_the_seal_of_a_signed_record_is_that_of_the_samples():
    """The fuzzed bytes reach what they are meant for: right ones are read."""
    assert decoded(RECORDS[1], 1) is not None
    head = written({key: value for key, value in PLAIN[1].items() if key != "self"})[:-1]
    body = signed(head, signs(TRAINER).signing)
    assert decoded(body + seal(body), 1, REQUIRED.signing) is not None
