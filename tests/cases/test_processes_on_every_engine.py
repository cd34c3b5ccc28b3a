"""Forks, data loaders, event loops, threads and pickles: each works on every engine, or is refused at once."""

import asyncio
import base64
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from places import EVERY, on
from states import blank, same

import storage_writers as sw

TESTS = str(Path(__file__).parents[1])
ROOT = str(Path(TESTS).parent)
SECONDS = 20
"""How long a child may take: what hangs, hangs for longer."""

on_what_several_processes_share = on("files", "obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-fakegcs", "obstore-azurite")
"""Memory is each process's own."""

REFUSED = "obstore was used before this process was forked"


def state(value):
    return {"w": torch.full((64,), float(value)), "step": value}


def save(place, value):
    sw.save(state(value), checkpoint_id=f"step-{value}", storage_writer=place.probed().writer())


def load(place):
    found = blank(state(0))
    sw.load(found, storage_reader=place.reader())
    return found


def run(code, *given):
    """Run code in a process of its own, with `given` as it pickles; return the lines that it prints."""
    words = base64.b64encode(pickle.dumps(given)).decode()
    head = "import base64, pickle, sys\nsys.path[:0] = sys.argv[2:]\n"
    head += "given = pickle.loads(base64.b64decode(sys.argv[1]))\n"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(code), words, TESTS, ROOT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


FORKED = """
    import os, threading, time
    from ckptstore.errors import UnsupportedError
    place, way, seconds = given
    store = place.opened() if way != "unused" else None
    if way == "in use":
        busy = threading.Thread(target=lambda: [store.latest() for _ in range(200)], daemon=True)
        busy.start()
    def look(who):
        try:
            print(who, (store or place.opened()).latest().checkpoint_id, place.opened().latest().checkpoint_id)
        except UnsupportedError as error:
            print(who, error.message)
        sys.stdout.flush()
    for turn in range(5 if way == "in use" else 1):
        child = os.fork()
        if not child:
            look("child")
            os._exit(0)
        deadline = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                print("the child hangs")
            time.sleep(0.01)
    if way == "in use":
        busy.join()
    look("parent")
"""


@on_what_several_processes_share
@pytest.mark.parametrize("way", ["unused", "used", "in use"])
def test_a_forked_child_reads_on_or_is_told_at_once_that_it_cannot_and_its_parent_goes_on(place, way):
    save(place, 1)
    *children, parent = run(FORKED, place, way, SECONDS)
    seen = "step-1 step-1"
    refused = place.engine == "obstore" and way != "unused"
    assert parent == f"parent {seen}"
    assert len(children) == (5 if way == "in use" else 1)
    assert all(child.startswith(f"child {REFUSED if refused else seen}") for child in children)


LOADERS = """
    import os, time
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __init__(self, store):
            self.store = store
        def __len__(self):
            return 8
        def __getitem__(self, row):
            return float(self.store.latest().read("w", (slice(row, row + 1),))[0]), os.getpid()

    def rows(store, how):
        began = time.monotonic()
        try:
            found = list(DataLoader(Rows(store), batch_size=2, num_workers=2, multiprocessing_context=how))
            print(how, sorted({float(value) for values, _ in found for value in values}), end=" ")
            pids = {int(pid) for _, pids in found for pid in pids}
            print(len(pids), os.getpid() in pids)
        except Exception as error:
            print(how, type(error).__name__, time.monotonic() - began < given[1])

    if __name__ == "__main__":
        store = given[0].opened()
        rows(store, "fork")
        rows(store, "spawn")
        print("here", float(store.latest().read("w")[0]))
"""


@pytest.mark.timeout(180)
@on_what_several_processes_share
def test_the_workers_of_a_data_loader_read_from_the_store_that_its_dataset_holds(place, tmp_path):
    save(place, 3)
    program = tmp_path / "loaders.py"  # a file: spawned workers import it
    given = base64.b64encode(pickle.dumps((place, SECONDS))).decode()
    head = "import base64, pickle, sys\nsys.path[:0] = sys.argv[2:]\n"
    head += "given = pickle.loads(base64.b64decode(sys.argv[1]))\n"
    program.write_text(head + textwrap.dedent(LOADERS))
    ended = subprocess.run(
        [sys.executable, str(program), given, TESTS, ROOT], capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stderr
    refused = "fork UnsupportedError True"
    assert ended.stdout.splitlines() == [
        refused if place.engine == "obstore" else "fork [3.0] 2 False",
        "spawn [3.0] 2 False",
        "here 3.0",
    ]


@on(*EVERY)
def test_a_save_and_a_load_may_be_called_where_an_asyncio_loop_runs(place):
    async def train():
        save(place, 1)
        found = load(place)
        await asyncio.to_thread(save, place, 2)
        return found, load(place)

    assert [same(found, state(step)) for step, found in enumerate(asyncio.run(train()), 1)] == [True, True]


@on(*EVERY)
def test_four_threads_save_and_load_at_once_each_its_own_run(place):
    def train(number):
        there, found = place.below(f"run-{number}").probed(), []
        for step in range(3):
            save(there, 10 * number + step)
            found.append(same(load(there), state(10 * number + step)))
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(train, range(4))) == [[True] * 3] * 4
    for number in range(4):
        there = place.below(f"run-{number}").opened()
        assert [each.checkpoint_id for each in there.checkpoints()] == [
            f"step-{10 * number + step}" for step in (2, 1, 0)
        ]
        assert all(there.verify(each, level="full").ok for each in there.checkpoints())


@on(*EVERY)
def test_four_threads_ask_one_store_at_once(place):
    save(place, 1)
    store = place.opened()

    def look(number):
        return store.latest().read("w", (slice(number, number + 1),))[0]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(look, range(64))) == [1.0] * 64


PICKLED = """
    import warnings
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
    import torch
    import storage_writers as sw
    store, opened, writer, reader = given
    print(sorted(info.key for info in store.list("log/")))
    print(opened.latest().checkpoint_id)
    sw.save({"w": torch.full((64,), 2.0), "step": 2}, checkpoint_id="step-2", storage_writer=writer)
    found = {"w": torch.zeros(64), "step": 0}
    sw.load(found, storage_reader=reader)
    print(opened.latest().checkpoint_id, float(found["w"][0]), found["step"])
"""


@on_what_several_processes_share
def test_a_store_a_run_a_writer_and_a_reader_go_to_another_process(place):
    save(place, 1)
    opened = place.opened()
    assert opened.latest().checkpoint_id == "step-1"
    assert run(PICKLED, place.store(), opened, place.writer(), place.reader()) == [
        "['log/000000000000.json', 'log/000000000001.json']",
        "step-1",
        "step-2 2.0 2",
    ]
    assert opened.latest().checkpoint_id == "step-2"
