"""What a run did after a checkpoint: stored once, by its writer, and never the checkpoint's own concern."""

from __future__ import annotations

import itertools
import math

import pytest
from run_samples import Job, a_run, append_raw, body_of, opened

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CommitUnknownError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.format.records import Proved
from ckptstore.format.seal import SEAL_BYTES, seal
from ckptstore.format.trace import MAX_TRACE_BYTES
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.traces import read_trace, write_trace
from ckptstore.testing.crash import DyingStore, Killed
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.simulated import CountedIds, ManualClock

TRACE = {"observations": [{"global_step": 4, "loss": 2.5, "grad_norm": math.inf}]}
STORED = {"observations": [{"global_step": 4, "loss": 2.5, "grad_norm": "Infinity"}]}


def a_log(store, **options):
    return RunLog.open(store, clock=ManualClock(), ids=CountedIds("d"), options=LogOptions(**options))


def newest(store):
    return opened(store).latest()


def test_a_trace_is_read_back_as_it_was_observed():
    store, job = a_run()
    assert read_trace(store, newest(store)) is None
    write_trace(job.log, newest(store), TRACE)
    assert read_trace(store, newest(store)) == STORED
    checkpoint = Checkpoint(RunLog.open(store), newest(store), TransferOptions())
    assert checkpoint.trace() == STORED


def test_a_checkpoint_has_one_trace_and_it_is_the_first():
    """I6."""
    store, job = a_run()
    write_trace(job.log, newest(store), TRACE)
    write_trace(job.log, newest(store), TRACE)
    for other in ({}, {"observations": []}, {"observations": ["longer" * 20_000]}):
        with pytest.raises(ConflictError):
            write_trace(job.log, newest(store), other)
    write_trace(job.log, opened(store).find("step-2"), {"text": "x" * 200_000})
    with pytest.raises(ConflictError):  # though what stands there is longer than what is read back
        write_trace(job.log, opened(store).find("step-2"), TRACE)
    assert read_trace(store, newest(store)) == STORED


@pytest.mark.parametrize("lands", [False, True], ids=["lost", "landed"])
def test_a_job_killed_while_it_writes_a_trace_leaves_the_whole_or_none(lands):
    """I11: and the checkpoint is the same."""
    seen = set()
    for calls in itertools.count():
        store, _ = a_run()
        dying = DyingStore(store, after_calls=calls, last_call_lands=lands)
        try:
            write_trace(a_log(dying), newest(store), TRACE)
        except Killed:
            found = read_trace(store, newest(store))
            assert found in (None, STORED)
            seen.add(found is None)
            assert opened(store).verify(newest(store)).ok
        else:
            assert read_trace(store, newest(store)) == STORED
            break
    assert seen == ({True, False} if lands else {True})


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.RETRIED, Fault.UNSENT, Fault.REFUSED, Fault.DUPLICATED])
def test_a_trace_that_met_a_bad_network_stands_once(fault):
    """I16."""
    store, _ = a_run()
    met = []

    def plan(call):
        if call.operation == "put" and call.key.endswith("trace.json") and not met:
            met.append(call)
            return fault
        return None

    write_trace(a_log(FaultyStore(store, plan)), newest(store), TRACE)
    assert met
    assert read_trace(store, newest(store)) == STORED


@pytest.mark.parametrize(
    ("fault", "error"), [(Fault.UNSENT, OutcomeUnknownError), (Fault.REFUSED, UnavailableError)], ids=["silent", "down"]
)
def test_a_trace_that_is_not_stored_says_so_within_its_time(fault, error):
    store, _ = a_run()
    answers = ("get",) if error is UnavailableError else ()

    def plan(call):
        return fault if call.key.endswith("trace.json") and call.operation not in answers else None

    log = a_log(FaultyStore(store, plan))
    with pytest.raises(error):
        write_trace(log, newest(store), TRACE, deadline_seconds=3)
    assert log.clock.seconds < 10
    assert read_trace(store, newest(store)) is None


@pytest.mark.parametrize(
    "trace",
    [{"loss": object()}, {1: 2}, {"text": "x" * MAX_TRACE_BYTES}, {"half": "\ud800"}],
    ids=["no JSON", "a number for a key", "too long", "half a letter"],
)
def test_what_cannot_be_a_trace_is_refused_before_anything_is_stored(trace):
    store, job = a_run()
    before = {info.key for info in store.list("")}
    with pytest.raises(InvalidInputError):
        write_trace(job.log, newest(store), trace)
    assert {info.key for info in store.list("")} == before


def test_a_checkpoint_that_was_retired_meanwhile_gets_no_trace():
    """I7: nothing is written where a collection may have been."""
    store, job = a_run()
    gone = opened(store).find("step-1")
    append_raw(store, kind="RETIRE", seqs=[gone.seq], reason="old")
    with pytest.raises(NotFoundError, match="step-1@1"):
        write_trace(job.log, gone, TRACE)
    assert read_trace(store, gone) is None


def test_one_that_is_set_aside_may_have_one():
    store, job = a_run()
    job.catalog.set_aside([3], reason="abandoned")
    write_trace(job.log, opened(store).find("step-3@3"), TRACE)
    assert read_trace(store, opened(store).find("step-3@3")) == STORED


def test_a_later_release_may_have_retired_it_so_nothing_is_written():
    store, job = a_run()
    found = newest(store)
    append_raw(store, kind="MERGE", seqs=[3])
    with pytest.raises(UnsupportedError):
        write_trace(job.log, found, TRACE)


def harmed(body, how):
    if how == "flipped":
        at = body.index(b"2.5")
        return body[:at] + b"3" + body[at + 1 :]
    return {"cut": body[:-20], "empty": b"", "longer": body + b" " * MAX_TRACE_BYTES}[how]


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "longer"])
def test_a_damaged_trace_is_none_and_the_checkpoint_is_none_the_worse(how):
    """I13 is of what the commit names; a trace is not."""
    store, job = a_run()
    write_trace(job.log, newest(store), TRACE)
    key = newest(store).commit.stem.trace_key
    store.put(key, harmed(body_of(store, key), how))
    with pytest.raises(IntegrityError) as caught:
        read_trace(store, newest(store))
    assert how == "longer" or caught.value.facts["key"] == key
    for level in ("exists", "etag", "full"):
        assert opened(store).verify(newest(store), level=level).ok


def test_every_flipped_bit_of_a_trace_is_found():
    store, job = a_run()
    write_trace(job.log, newest(store), TRACE)
    key = newest(store).commit.stem.trace_key
    body, committed = body_of(store, key), newest(store)
    for at in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[at // 8] ^= 1 << at % 8
        store.put(key, bytes(flipped))
        with pytest.raises(IntegrityError):
            read_trace(store, committed)


def test_the_trace_of_another_checkpoint_is_none():
    store, job = a_run()
    two, three = opened(store).find("step-2"), newest(store)
    write_trace(job.log, two, TRACE)
    store.put(three.commit.stem.trace_key, body_of(store, two.commit.stem.trace_key))
    with pytest.raises(IntegrityError, match="slot 2"):
        read_trace(store, three)


def test_a_trace_of_a_later_release_says_what_to_install():
    store, job = a_run()
    write_trace(job.log, newest(store), TRACE)
    key = newest(store).commit.stem.trace_key
    head = body_of(store, key)[:-SEAL_BYTES].replace(b'"format":1', b'"format":2')
    store.put(key, head + seal(head))
    with pytest.raises(UnsupportedError) as caught:
        read_trace(store, newest(store))
    assert "pip install" in caught.value.hint


def test_a_trace_makes_no_attempt_of_its_own():
    """I7."""
    store, job = a_run()
    for each in opened(store).checkpoints():
        write_trace(job.log, each, TRACE)
    assert opened(store).in_progress() == []
    retired = opened(store).find("step-1")
    append_raw(store, kind="RETIRE", seqs=[1], reason="old")
    assert opened(store).in_progress() == []
    append_raw(store, kind="COLLECTED", seqs=[1])
    (late,) = opened(store).in_progress()  # it arrived after its checkpoint was deleted
    assert (late.stem, late.state) == (retired.commit.stem, "dead")


def test_a_proof_is_recorded_once_and_the_last_verdict_is_shown():
    store, job = a_run()
    assert newest(store).proved is None
    entry = job.catalog.prove(3, verdict="5 steps the same")
    assert entry.record == Proved(3, "5 steps the same")
    assert opened(store).find(seq=3).proved == "5 steps the same"
    assert job.catalog.prove(3, verdict="5 steps the same") is None
    job.catalog.prove(3, verdict="5 steps within 1e-4")
    assert opened(store).find(seq=3).proved == "5 steps within 1e-4"
    assert opened(store).find(seq=2).proved is None
    assert job.save("step-4").commit.term == 1  # it fences nobody


@pytest.mark.parametrize("verdict", ["", "x" * 2000, 5, None, "\ud800"])
def test_a_verdict_is_a_line_of_text(verdict):
    store, job = a_run()
    with pytest.raises(InvalidInputError):
        job.catalog.prove(3, verdict=verdict)
    assert len(list(store.list("log/"))) == 4


@pytest.mark.parametrize("seq", [0, 77])
def test_only_a_kept_checkpoint_is_proved(seq):
    _, job = a_run()
    with pytest.raises(NotFoundError):
        job.catalog.prove(seq, verdict="the same")


def test_a_proof_of_unknown_outcome_is_asked_for_again_and_stands_once():
    """I16."""
    failing = []

    def plan(call):
        if failing and call.key.startswith("log/") and (call.operation == "put" or len(failing) > 1):
            failing.append(call)
            return Fault.LOST_REPLY
        return None

    store, _ = a_run()
    tool = opened(FaultyStore(store, plan), options=LogOptions(deadline_seconds=2))
    failing.append(True)
    with pytest.raises(CommitUnknownError):
        tool.prove(2, verdict="the same")
    failing.clear()
    assert tool.prove(2, verdict="the same") is None
    assert len(list(store.list("log/"))) == 5


def test_a_fenced_job_may_still_say_what_it_did():
    """I15: it commits nothing by that."""
    store, job = a_run()
    mine = newest(store)
    Job(store, job="other").save("step-4")
    write_trace(job.log, mine, TRACE)
    assert read_trace(store, mine) == STORED
    assert opened(store).latest().commit.checkpoint_id == "step-4"
