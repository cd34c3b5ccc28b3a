"""The one primitive: what is known of a create, whatever the network does."""

from __future__ import annotations

import itertools

import pytest

from ckptstore.errors import AccessDeniedError, IntegrityError, NotFoundError, UnavailableError, UnsupportedError
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.objectstore.wrappers.observed import ObservedStore
from ckptstore.options import LogOptions
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.once import Outcome, create_once
from ckptstore.testing.enumeration import overwriting
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.simulated import CountedIds, ManualClock

KEY = "log/000000000000.json"


def create(store, body=b"mine", *, deadline=30.0, clock=None, **given):
    return create_once(
        store,
        KEY,
        body,
        clock=clock or ManualClock(),
        ids=CountedIds(),
        options=LogOptions(deadline_seconds=deadline, **given.pop("options", {})),
        **given,
    )


def first(fault, *, operation="put"):
    """Return a plan: the first call of this kind meets the fault."""
    met = []

    def plan(call):
        if call.operation == operation and not met:
            met.append(call)
            return fault
        return None

    return plan


def always(*faults):
    """Return a plan: puts meet these faults in order, the last one for ever."""
    left = list(faults)
    return lambda call: (left.pop(0) if len(left) > 1 else left[0]) if call.operation == "put" else None


def test_an_absent_key_is_created_with_one_request():
    store = FaultyStore(MemoryStore(), lambda _: None)
    assert create(store) == (Outcome.CREATED, b"mine")
    assert [call.operation for call in store.calls] == ["put"]


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.RETRIED])
def test_our_own_landed_write_is_ours_however_the_reply_was_lost(fault):
    """I5."""
    assert create(FaultyStore(MemoryStore(), first(fault))) == (Outcome.MINE, b"mine")


@pytest.mark.parametrize("fault", [Fault.UNSENT, Fault.REFUSED, Fault.LATE])
def test_what_did_not_arrive_is_sent_again_with_the_same_bytes(fault):
    """I16."""
    inner = MemoryStore()
    store = FaultyStore(inner, first(fault))
    assert create(store) == (Outcome.CREATED, b"mine")
    store.deliver()
    assert inner.get(KEY, max_bytes=10) == b"mine"


def test_what_somebody_else_created_comes_back():
    store = MemoryStore()
    store.put(KEY, b"theirs")
    assert create(store) == (Outcome.OTHER, b"theirs")


def test_other_bytes_that_name_our_own_attempt_are_ours():
    store = MemoryStore()
    store.put(KEY, b"ours, made earlier")
    assert create(store, same=lambda body: body.startswith(b"ours")) == (Outcome.MINE, b"ours, made earlier")


def test_a_read_back_that_is_refused_or_times_out_is_never_absent():
    """I5: the deadline ends it, and nothing is known."""

    def plan(call):
        return Fault.LOST_REPLY if call.operation == "put" else Fault.DENIED

    clock = ManualClock()
    assert create(FaultyStore(MemoryStore(), plan), deadline=7.0, clock=clock) == (Outcome.UNKNOWN, None)
    assert 7.0 <= clock.seconds < 7.01


def test_absent_at_the_deadline_is_unknown_if_a_request_may_still_be_under_way():
    """I5: only a slot that somebody else holds says that it did not happen."""
    inner = MemoryStore()
    store = FaultyStore(inner, always(Fault.LATE))
    assert create(store) == (Outcome.UNKNOWN, None)
    store.deliver()
    assert inner.get(KEY, max_bytes=10) == b"mine"


def test_a_denied_create_of_a_key_that_is_provably_absent_did_not_happen():
    store = FaultyStore(MemoryStore(), always(Fault.DENIED))
    with pytest.raises(AccessDeniedError):
        create(store)
    assert [call.operation for call in store.calls] == ["put", "get"]


def test_a_denial_after_a_time_out_proves_nothing():
    assert create(FaultyStore(MemoryStore(), always(Fault.UNSENT, Fault.DENIED))) == (Outcome.UNKNOWN, None)


def test_a_denial_that_could_not_be_looked_at_proves_nothing_later():
    """I5: a request of the first try may be under way below us."""
    reads = []

    def plan(call):
        if call.operation == "put":
            return Fault.DENIED
        reads.append(call)
        return Fault.REFUSED if len(reads) == 1 else None

    assert create(FaultyStore(MemoryStore(), plan)) == (Outcome.UNKNOWN, None)


def test_what_never_happened_is_unavailable_at_the_deadline():
    with pytest.raises(UnavailableError):
        create(FaultyStore(MemoryStore(), always(Fault.REFUSED)))


def test_a_slot_with_more_bytes_than_a_record_may_have_is_damage():
    store = MemoryStore()
    store.put(KEY, b"x" * 70_000)
    with pytest.raises(IntegrityError):
        create(store)


def test_an_error_that_nobody_knows_is_no_answer():
    class Odd(MemoryStore):
        def put(self, key, body, **given):
            super().put(key, body, **given)
            raise RuntimeError("a bug in an engine")

    assert create(Odd()) == (Outcome.MINE, b"mine")


def test_the_pauses_grow_and_stay_below_five_seconds():
    clock, looks = ManualClock(), []

    def plan(call):
        if call.operation == "put":
            looks.append(clock.seconds)
            return Fault.REFUSED
        return None

    with pytest.raises(UnavailableError):
        create(FaultyStore(MemoryStore(), plan), deadline=60.0, clock=clock)
    pauses = [after - before for before, after in itertools.pairwise(looks)]
    assert pauses[0] < 0.05 < pauses[3]
    assert max(pauses) < 5.0


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.UNSENT, Fault.LATE, None])
def test_a_promised_single_writer_reads_puts_and_reads_back(fault):
    inner = MemoryStore()
    store = FaultyStore(inner, first(fault))
    outcome, holder = create(store, options={"assume_single_writer": True})
    assert (outcome, holder) == (Outcome.MINE, b"mine")
    assert [call.operation for call in store.calls][:2] == ["get", "put"]
    assert not any(call.creates for call in store.calls)


class Denies(ForwardingStore):
    """Answers 'denied' for what is absent, as S3 does without the right to list."""

    def get(self, key, *, max_bytes):
        try:
            return super().get(key, max_bytes=max_bytes)
        except NotFoundError:
            raise AccessDeniedError("403") from None


def promised(store):
    """Return a log on `store` under the promise of a single writer, opened before it was asked anything."""
    log = RunLog(store, clock=ManualClock(), ids=CountedIds(), options=LogOptions(assume_single_writer=True))
    log.begin_run()
    return log


def test_a_promised_single_writer_is_asked_for_no_condition_but_still_for_absence(tmp_path):
    """I1: no promise replaces that an absent slot reads as absent."""
    calls = []
    promised(ObservedStore(MemoryStore(f"memory://{tmp_path.name}/a"), calls.append))
    assert [(call.operation, call.key.split("/")[0]) for call in calls][:1] == [("get", "probe")]
    assert not [call for call in calls if call.operation == "put" and call.key.startswith("probe/")]
    store = MemoryStore(f"memory://{tmp_path.name}/b")
    with pytest.raises(UnsupportedError, match="could be overlooked"):
        promised(Denies(store))
    assert list(store.list("")) == []


def test_what_was_found_under_a_promise_does_not_count_without_it(tmp_path):
    """I1, I15."""
    url = f"memory://{tmp_path.name}"
    promised(overwriting(MemoryStore(url)))
    with pytest.raises(UnsupportedError, match="both believe that they committed"):
        RunLog.create(overwriting(MemoryStore(url)), clock=ManualClock(), ids=CountedIds())


def test_a_promised_single_writer_overwrites_nothing():
    store = MemoryStore()
    store.put(KEY, b"theirs")
    assert create(store, options={"assume_single_writer": True}) == (Outcome.OTHER, b"theirs")
