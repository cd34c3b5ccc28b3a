"""What a background save stores is the state at the moment of the call, and what it holds does not grow."""

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from async_programs import WAYS, save
from states import same

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.objectstore.urls import open_store
from ckptstore.testing.tapped import TappedStore
from ckptstore.units import MIB

THREADS = WAYS[:2]


class Gate:
    """Uploads of a store wait for it, and are slow behind it."""

    def __init__(self, root, *, write_seconds=0.0):
        self.open = threading.Event()
        self.store = TappedStore(open_store(root), self._tap)
        self._write_seconds = write_seconds

    def _tap(self, call, act):
        if call.operation == "open_upload":
            assert self.open.wait(60)
        if call.operation == "write":
            time.sleep(self._write_seconds)
        return act()


def training():
    """Return a model of 200 MB, of which parts are tied and not contiguous, with all that changes in a step."""
    model = torch.nn.Sequential(torch.nn.Linear(5000, 5000, bias=False), torch.nn.Linear(5000, 5000, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    weight = model[0].weight.detach()
    state = {
        "model": model.state_dict(),
        "tied": weight,
        "turned": weight.t(),
        "every other": weight[::2, ::2],
        "schedule": schedule.state_dict(),
        "history": [1, 2, [3]],
        "step": 20,
        "counters": {"seen": 400},
    }
    return model, optimizer, schedule, state


def target():
    full = lambda *shape: torch.zeros(shape)  # noqa: E731
    return {
        "model": {"0.weight": full(5000, 5000), "1.weight": full(5000, 5000)},
        "tied": full(5000, 5000),
        "turned": full(5000, 5000),
        "every other": full(2500, 2500),
        "schedule": training_schedule(),
        "history": [0, 0, [0]],
        "step": 0,
        "counters": {"seen": 0},
    }


def training_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1).state_dict()


@pytest.mark.parametrize("way", THREADS)
@pytest.mark.parametrize("staging_bytes", [None, 32 * MIB], ids=["staged whole", "streamed"])
def test_what_is_loaded_is_the_state_at_the_call_whatever_the_training_does_after_it(tmp_path, way, staging_bytes):
    root = str(tmp_path / "run")
    gate = Gate(root)
    writer = sw.CkptStoreWriter(gate.store, staging_bytes=staging_bytes)
    model, optimizer, schedule, state = training()
    wanted_schedule = dict(state["schedule"])
    if staging_bytes is not None:  # it returns when everything was read, and then only
        gate.open.set()
    future = save(way, state, "step-20", writer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    optimizer.step()
    schedule.step()
    state["history"][2].append(9)
    state["history"].append(9)
    state["step"] += 1
    state["counters"]["seen"] = 9
    state["schedule"].update(schedule.state_dict())
    del model, optimizer, state
    gc.collect()
    if staging_bytes is None:
        assert CheckpointStore.open(root).latest() is None  # the gate is shut
    gate.open.set()
    future.result(120)
    found = target()
    sw.load(found, storage_reader=sw.CkptStoreReader(root))
    ones = torch.ones(5000, 5000)
    assert torch.equal(found["model"]["0.weight"], ones)
    assert torch.equal(found["model"]["1.weight"], ones * 2)
    assert torch.equal(found["tied"], ones)
    assert torch.equal(found["turned"], ones)
    assert torch.equal(found["every other"], ones[::2, ::2])
    assert (found["history"], found["step"], found["counters"]) == ([1, 2, [3]], 20, {"seen": 400})
    assert found["schedule"]["last_epoch"] == wanted_schedule["last_epoch"] == 0
    writer.close()


@pytest.mark.parametrize("way", THREADS)
def test_a_load_right_after_a_background_save_began_gives_the_checkpoint_before_it(tmp_path, way):
    root = str(tmp_path / "run")
    gate = Gate(root)
    writer = sw.CkptStoreWriter(gate.store)
    gate.open.set()
    sw.save({"w": torch.full((100,), 1.0)}, checkpoint_id="step-1", storage_writer=writer)
    gate.open.clear()
    save(way, {"w": torch.full((100,), 2.0)}, "step-2", writer)
    for wanted in (1.0, 2.0):
        assert CheckpointStore.open(root).latest().checkpoint_id == f"step-{wanted:g}"
        found = {"w": torch.zeros(100)}
        sw.load(found, storage_reader=sw.CkptStoreReader(root))
        assert same(found, {"w": torch.full((100,), wanted)})
        gate.open.set()
        writer.wait()


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("way", THREADS)
def test_twenty_saves_to_a_slow_store_hold_one_copy_of_the_state_and_do_not_grow(tmp_path, way):
    root = str(tmp_path / "run")
    gate = Gate(root, write_seconds=0.01)
    gate.open.set()
    state = {f"w{index}": torch.ones(4 * MIB) for index in range(4)}  # 64 MiB
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    before, measured = resident_bytes(), []
    with sw.CkptStoreWriter(gate.store) as writer:
        for step in range(20):
            save(way, state, f"step-{step}", writer)
            measured.append(resident_bytes() - before)
            if step >= 2:
                for key in open_store(root).list("data/"):
                    if f"/step-{step - 2}." in key.key:
                        open_store(root).delete(key.key)
    assert max(measured) < state_bytes + 100 * MIB  # the copy, and what is on its way
    assert max(measured[10:]) - max(measured[2:10]) < 8 * MIB
