"""A collection that meets a fault, a death or somebody else at any of its store calls.

What readers are offered is whole all the time, what is pinned stays, and whoever collects next comes to the same end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools

import numpy as np
import pytest

from ckptstore.errors import CkptStoreError, ConflictError, NotFoundError
from ckptstore.maintenance.collect import collect
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.maintenance.retention import Keep
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.testing.crash import DyingStore, Killed
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.simulated import CountedIds, ManualClock
from ckptstore.testing.tapped import TappedStore

KEEP = Keep(last=2)
FOREIGN = "data/0/mine.bin"


def log_of(store, digit):
    return RunLog.create(store, clock=ManualClock(), ids=CountedIds(digit))


def job_of(digit):
    return Incarnation(digit * 32, job="job", host="host")


def save(store, step, digit):
    simulated.save(log_of(store, digit), job_of(digit), f"step-{step}", step=step, seed=step, world_size=2)


@functools.cache
def begun():
    """Return the objects of a run with four checkpoints, in slots 1 to 4, and of an attempt that can never commit."""
    store = MemoryStore(clock=ManualClock())
    log, job = log_of(store, "a"), job_of("a")
    for step in (1, 2, 3, 4):
        if step == 4:
            lost = begin(log, job, checkpoint_id="lost", world_size=2)
            simulated.upload(store, lost, 0)
        simulated.save(log, job, f"step-{step}", step=step, seed=step, world_size=2)
    return {info.key: store.get(info.key, max_bytes=1 << 20) for info in store.list("")}, lost.stem.shard_key(1)


def a_run():
    """Return a store with that run, an upload of the lost attempt that never ended, and a key of nobody's."""
    store, (objects, lost) = MemoryStore(clock=ManualClock()), begun()
    for key, body in {**objects, FOREIGN: b"?"}.items():
        store.put(key, body)
    store.open_upload(lost, size=1)
    return store


def collected(store, digit, keep=KEEP):
    """Retire, delete and record what is gone."""
    log = log_of(store, digit)
    plan = plan_collection(log, keep=keep, grace_seconds=0)
    return collect(log, digest=plan.digest, keep=keep, grace_seconds=0, options=simulated.OPTIONS)


def look(store, newest):
    """See whether every checkpoint that a reader is offered is whole, and which is the latest (I4, I8, I11)."""
    catalog = Catalog(RunLog.open(store, clock=ManualClock()))
    assert catalog.latest().commit.checkpoint_id == newest
    for each in catalog.checkpoints(include_set_aside=True):
        assert catalog.verify(each, level="full").ok
        seed = int(each.commit.metrics["seed"])
        right = np.concatenate([simulated.values(rank, seed) for rank in range(2)])
        assert np.array_equal(simulated.load(catalog, each), right)
    seqs = [each.seq for each in catalog.checkpoints()]
    assert len(seqs) >= 2  # I14
    return seqs


def names(store):
    return {info.key.split("/")[2].split(".")[0] for info in store.list("data/") if info.key != FOREIGN}


def check_the_end(store, *, saved=5):
    """Let a job go on and somebody collect, and see that it ends as if nothing had happened."""
    save(store, saved, "c")
    newest = look(store, f"step-{saved}")[-2:]
    collected(store, "d")
    collected(store, "e")  # what landed while the first listed
    assert look(store, f"step-{saved}") == newest
    log = RunLog.open(store, clock=ManualClock())
    assert log.fold.retired == {}
    assert names(store) == {f"step-{saved - 1}", f"step-{saved}"}
    assert [upload.key for upload in store.list_uploads("")] == []
    assert store.get(FOREIGN, max_bytes=1) == b"?"
    assert log.fold.ignored == ()
    with pytest.raises(NotFoundError):
        Catalog(log).find("step-1@1")


def calls():
    """Return the calls of a collection to which nothing happens, of lists of one attempt's lanes the first and last."""
    log_of(MemoryStore(), "9")  # the store is probed once per process
    store = TappedStore(a_run(), lambda _, act: act())
    collected(store, "b")
    return [
        call
        for call in store.calls
        if not call.key.startswith(tuple(f"data/{lane}/" for lane in "123456789abcde")) or call.operation != "list"
    ]


@pytest.mark.parametrize("lands", [False, True])
def test_killed_anywhere_what_is_offered_is_whole_and_it_goes_on(lands):
    seen = []
    for call in calls():
        store = a_run()
        with pytest.raises(Killed):
            collected(DyingStore(store, after_calls=call.index, last_call_lands=lands), "b")
        seen.append((len(look(store, "step-4")), sum(1 for _ in store.list("data/"))))
        check_the_end(store)
    assert {offered for offered, _ in seen} == {4, 2}  # before RETIRE and after it, nothing between
    assert len({objects for offered, objects in seen if offered == 2}) > 6  # and the bytes went one by one


@pytest.mark.parametrize(
    "fault", [Fault.REFUSED, Fault.DENIED, Fault.UNSENT, Fault.LOST_REPLY, Fault.LATE, Fault.DUPLICATED]
)
def test_whatever_becomes_of_any_call_what_is_offered_is_whole_and_it_goes_on(fault):  # I16
    for call in calls():
        store = a_run()
        faulty = FaultyStore(store, lambda now, index=call.index: fault if now.index == index else None)
        with contextlib.suppress(CkptStoreError):
            collected(faulty, "b")
        look(store, "step-4")
        if fault is Fault.LATE:  # it arrives before the next one's calls, or after
            faulty.deliver()
        save(store, 5, "7")
        faulty.deliver()
        look(store, "step-5")
        check_the_end(store, saved=6)


def interrupted(act_of, lands):
    """Yield the call and the store of each collection in which `act_of(store)` happens before or after one call."""
    for call in calls():
        store = a_run()

        def tap(now, act, store=store, index=call.index):
            if now.index != index:
                return act()
            if not lands:
                act_of(store)
            try:
                return act()
            finally:
                if lands:
                    act_of(store)

        with contextlib.suppress(CkptStoreError):
            collected(TappedStore(store, tap), "b")
        yield call, store


@pytest.mark.parametrize("lands", [False, True], ids=["before", "after"])
def test_two_that_collect_at_once_do_what_one_does(lands):
    for _, store in interrupted(lambda store: collected(store, "f"), lands):
        assert look(store, "step-4") == [3, 4]
        check_the_end(store)


@pytest.mark.parametrize("lands", [False, True], ids=["before", "after"])
def test_a_job_that_claims_and_commits_in_between_loses_nothing(lands):
    for _, store in interrupted(lambda store: save(store, 5, "f"), lands):
        assert look(store, "step-5")[-2] == 4
        check_the_end(store, saved=6)


@pytest.mark.parametrize("lands", [False, True], ids=["before", "after"])
def test_an_upload_under_way_that_lands_anywhere_in_between_is_found_later(lands):
    def late(store):
        for key, body in begun()[0].items():
            if "/step-1." in key and key.endswith(("COMMITTED", "rank-00000.safetensors")):
                store.put(key, body)

    for _, store in interrupted(late, lands):
        look(store, "step-4")
        check_the_end(store)


@pytest.mark.parametrize("lands", [False, True], ids=["before", "after"])
def test_what_a_reader_could_pin_stays_whole_and_what_it_could_not_was_retired(lands):  # I14, I17
    pinned = {}

    def pin(store):
        try:
            Catalog(log_of(store, "f")).pin(2, holder="reader", reason="")
            pinned[id(store)] = True
        except NotFoundError:
            pinned[id(store)] = False

    outcomes = []
    for call, store in interrupted(pin, lands):
        seqs = look(store, "step-4")
        assert (2 in seqs) is pinned[id(store)], call
        outcomes.append(pinned[id(store)])
        if pinned[id(store)]:
            with contextlib.suppress(ConflictError):
                collected(store, "d")
            assert 2 in look(store, "step-4")
            Catalog(log_of(store, "e")).unpin(2, holder="reader")
        check_the_end(store)
    assert [known for known, _ in itertools.groupby(outcomes)] == [True, False]  # until RETIRE landed


def test_a_job_that_lets_go_of_its_own_is_killed_anywhere_and_the_next_one_goes_on():
    """As a trainer does: RETIRE with its term, then only what is retired."""
    from ckptstore.maintenance.collect import collect_retired, retire_by  # noqa: PLC0415  (of this test alone)

    def let_go(store, digit):
        log = log_of(store, digit)
        retire_by(log, KEEP, term=log.fold.term)
        return collect_retired(log, now=None, grace_seconds=0, options=simulated.OPTIONS)

    for lands in (False, True):
        for index in itertools.count():
            store = a_run()
            try:
                let_go(DyingStore(store, after_calls=index, last_call_lands=lands), "b")
            except Killed:
                look(store, "step-4")
                check_the_end(store)
            else:
                assert names(store) == {"step-3", "step-4", "lost"}
                break
