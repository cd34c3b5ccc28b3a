"""Killed between RETIRE and deletion, at every store call: readers see other checkpoints, and a collection goes on."""

from __future__ import annotations

import numpy as np
import pytest

from ckptstore.errors import NotFoundError
from ckptstore.maintenance.collect import collect as apply
from ckptstore.maintenance.collect import retire
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.testing.crash import DyingStore, Killed
from ckptstore.testing.simulated import CountedIds, ManualClock


def log_of(store, digit):
    return RunLog.create(store, clock=ManualClock(), ids=CountedIds(digit))


def a_run():
    """Return a store with four checkpoints, in slots 1 to 4."""
    store = MemoryStore(clock=ManualClock())
    log, job = log_of(store, "a"), Incarnation("a" * 32, job="job", host="host")
    for seed in (1, 2, 3, 4):
        simulated.save(log, job, f"step-{seed}", step=seed, seed=seed, world_size=2)
    return store


def collect(store, old, digit):
    """Retire the checkpoints `old`, delete their bytes, and say so; go on with what is retired already."""
    log = log_of(store, digit)
    if left := [seq for seq in old if seq in log.fold.commits]:
        retire(log, left, reason="old")
    plan = plan_collection(log, grace_seconds=0)
    return apply(log, digest=plan.digest, grace_seconds=0, options=simulated.OPTIONS)


def look(store, newest):
    """See whether every checkpoint that a reader is offered is whole, and which is the latest."""
    catalog = Catalog(RunLog.open(store, clock=ManualClock()))
    assert catalog.latest().commit.checkpoint_id == newest
    for each in catalog.checkpoints(include_set_aside=True):
        assert catalog.verify(each, level="full").ok  # I4, I8
        seed = int(each.commit.metrics["seed"])
        right = np.concatenate([simulated.values(rank, seed) for rank in range(2)])
        assert np.array_equal(simulated.load(catalog, each), right)
    return [each.seq for each in catalog.checkpoints()]


@pytest.mark.parametrize("lands", [False, True])
def test_killed_anywhere_in_a_collection_what_is_offered_is_whole_and_it_goes_on(lands):
    """I4, I8, I11, I14."""
    seen, calls, killed = [], 0, True
    while killed:
        store = a_run()
        try:
            collect(DyingStore(store, after_calls=calls, last_call_lands=lands), (1, 2), "b")
            killed = False
        except Killed:
            calls += 1
        seen.append((look(store, "step-4"), sum(1 for _ in store.list("data/"))))
        simulated.save(
            log_of(store, "c"), Incarnation("c" * 32, job="job", host="host"), "step-5", seed=5, world_size=2
        )
        assert look(store, "step-5")[-3:] == [3, 4, max(look(store, "step-5"))]
        collect(store, (1, 2), "d")
        assert look(store, "step-5")[:2] == [3, 4]
        assert RunLog.open(store, clock=ManualClock()).fold.retired == {}
        names = {info.key.split("/")[2].split(".")[0] for info in store.list("data/")}
        assert names == {"step-3", "step-4", "step-5"}
        with pytest.raises(NotFoundError):
            Catalog(RunLog.open(store, clock=ManualClock())).find("step-1@1")
    assert {len(offered) for offered, _ in seen} == {4, 2}  # before RETIRE and after it, nothing between
    assert len({objects for offered, objects in seen if len(offered) == 2}) > 6  # and the bytes went one by one
