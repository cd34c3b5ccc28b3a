"""Jobs of several ranks that save and are looked at from outside: what runs in them, and where."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from ranks import Gang
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import storage_writers as sw
from ckptstore.errors import UnsupportedError

SMALL = 6_000
MARKS = 10**9


def job(*, group_seconds=60):
    """Return the processes of a job that starts now, killed at the end of the `with`."""
    return contextlib.closing(Gang(group_seconds=group_seconds))


def unfinished(place):
    """Return the ranks whose shards are under way, each in its own lane; None where the service tells nobody."""
    looked_at = replace(place, engine="s3fs") if place.url.startswith("s3://") else place
    try:
        return [int(upload.key.split("/")[1], 16) for upload in looked_at.store().list_uploads("data/")]
    except UnsupportedError:
        return None


def values(mark, rows):
    """Return numbers each of which tells whose it is and where it belongs."""
    return np.arange(rows, dtype=np.int64) + mark * MARKS


def state(mark, rows=SMALL):
    """Return a state of which every rank holds a share, and which says `mark` everywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = torch.from_numpy(values(mark, rows)[rows // world * rank : rows // world * (rank + 1)])
    weights = DTensor.from_local(share, init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False)
    return {"weights": weights, "bias": torch.full((5,), mark), "mark": mark}


def loaded(place, rows=SMALL, **which):
    """Load on all ranks, and return whose state it is; all of it is."""
    found = state(0, rows)
    sw.load(found, storage_reader=place.reader(**which))
    mark = found["mark"]
    wanted = state(mark, rows)
    assert torch.equal(found["weights"].to_local(), wanted["weights"].to_local())
    assert torch.equal(found["bias"], wanted["bias"])
    return mark


def read(place):
    """Return what a reader finds, newest first, each verified at level full and compared bit by bit (I11)."""
    store = place.opened()
    found = []
    for checkpoint in store.checkpoints():
        verdict = store.verify(checkpoint, level="full")
        assert verdict.ok, verdict
        weights, mark = checkpoint.read("weights"), int(checkpoint.read("bias")[0])
        assert sorted(checkpoint.keys) == ["bias", "mark", "weights"]
        assert np.array_equal(weights, values(mark, len(weights)))
        assert np.array_equal(checkpoint.read("bias"), np.full(5, mark))
        found.append((checkpoint.checkpoint_id, checkpoint.seq, mark))
    latest = store.latest()
    assert (latest.seq if latest else None) == (found[0][1] if found else None)
    assert store.ignored == ()
    return found


def read_afresh(place):
    """Return what `read` finds in a process that was never there before."""
    with job() as reader:
        return reader.values(1, read, place)[0]


def history(place):
    """Return the log as text, in order."""
    records = (entry.record for entry in place.opened().records())
    return [f"{record.KIND} {record.term}" for record in records]


def attempts(place, name):
    """Return the state of each attempt at `name` that has data and no commit."""
    return [each.state for each in place.opened().uncommitted() if each.stem.name == name]


def objects(place, name):
    """Return the data that lie under `name`, by their last names."""
    keys = (info.key.split("/") for info in place.store().list("data/"))
    return sorted(file for _, _, stem, file in keys if stem.startswith(f"{name}."))


class Watch:
    """Somebody who looks for the latest checkpoint all the time, by a store kept open and by one opened each time."""

    def __init__(self, place):
        self.seen, self._place = [], place
        self._over, self._thread = threading.Event(), ThreadPoolExecutor(1)

    def __enter__(self):
        self._looking = self._thread.submit(self._look)
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.shutdown()

    def _look(self):
        kept = self._place.opened()
        while not self._over.wait(0.01):
            for store in (kept, self._place.opened()):
                latest = store.latest()
                self.seen.append((-1, "") if latest is None else (latest.seq, latest.committed.blake3))

    def latest_ones(self):
        """Return what was the latest, one after the other; it never was one that had been before."""
        self._looking.result(30)
        assert self.seen == sorted(self.seen)
        assert len(set(self.seen)) == len({seq for seq, _ in self.seen})  # I1
        return [seq for seq, _ in dict.fromkeys(self.seen)]
