"""A save as it goes when nothing goes wrong."""

from __future__ import annotations

import numpy as np

from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated


def test_what_was_saved_is_the_latest_and_reads_back():
    store = MemoryStore()
    log, job = RunLog.create(store), Incarnation.new(job="job-1")
    simulated.save(log, job, "step-1", step=1, seed=1)
    committed = simulated.save(log, job, "step-2", step=2, seed=2)

    catalog = Catalog(RunLog.open(store))
    latest = catalog.latest()
    assert latest == committed
    assert (latest.commit.checkpoint_id, latest.commit.global_step, latest.commit.parent) == ("step-2", 2, 1)
    assert np.array_equal(simulated.load(catalog, latest), np.concatenate([simulated.values(r, 2) for r in range(3)]))
    assert catalog.verify(latest).ok


def test_an_absent_run_has_no_checkpoint_and_opening_it_creates_nothing():
    store = MemoryStore()
    assert Catalog(RunLog.open(store)).latest() is None
    assert list(store.list("")) == []
