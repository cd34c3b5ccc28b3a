"""What is let go of, on every engine: by order of commits, by exact keys, by the store's clock, and never too much."""

import base64
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import EVERY, on
from refusals import command
from states import blank, same
from test_clocks_on_every_engine import set_off

import storage_writers as sw
from ckptstore import NotFoundError, UnsupportedError
from ckptstore.maintenance.retention import Keep
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.training import Checkpointer, Progress, TrainingState

TESTS = str(Path(__file__).parents[1])


def state(step):
    return {"w": torch.full((64,), float(step)), "step": step}


def save(place, step, **more):
    sw.save(state(step), checkpoint_id=f"step-{step}", storage_writer=described(place.probed().writer(**more), step))


def described(writer, step):
    writer.describe(global_step=step)
    return writer


def loads(place, step):
    found = blank(state(step))
    sw.load(found, storage_reader=place.reader())
    return same(found, state(step))


def steps(place):
    return [each.global_step for each in place.opened().checkpoints()]


def collected(place, keep=None, grace_seconds=0):
    store = place.opened()
    plan = store.plan_collection(keep=keep, grace_seconds=grace_seconds)
    return store.collect(digest=plan.digest, keep=keep, grace_seconds=grace_seconds)


def names(place):
    return {info.key.split("/")[2].split(".t0")[0] for info in place.store().list("data/")}


class Gated(ForwardingStore):
    """Lets no shard be complete before its gate opens; then, if it is to fail, it fails."""

    def __init__(self, inner, gate, *, fails=False):
        super().__init__(inner)
        self.gate, self.fails, self.begun = gate, fails, threading.Event()

    def open_upload(self, key, *, size):
        self.begun.set()
        assert self.gate.wait(60)
        if self.fails:
            raise UnsupportedError("Nothing can be stored any more.")
        return super().open_upload(key, size=size)


@on(*EVERY)
def test_saves_that_are_not_finished_count_for_nothing_and_are_let_be(place):
    save(place, 10)
    gates = [threading.Event(), threading.Event()]
    stores = [Gated(place.store(), gates[0], fails=True), Gated(place.store(), gates[1])]
    writers = [described(sw.CkptStoreWriter(store), step) for store, step in zip(stores, (20, 30), strict=True)]
    failing = sw.async_save(state(20), checkpoint_id="step-20", storage_writer=writers[0])
    assert stores[0].begun.wait(60)
    assert collected(place, Keep(last=1)).plan.is_empty
    gates[0].set()
    assert failing.exception(60) is not None
    going = sw.async_save(state(30), checkpoint_id="step-30", storage_writer=writers[1])
    assert stores[1].begun.wait(60)
    assert collected(place, Keep(last=1)).plan.is_empty
    assert loads(place, 10)
    gates[1].set()
    going.result(60)
    assert collected(place, Keep(last=1)).retired == []  # one more stands behind the newest
    assert steps(place) == [30, 10]
    save(place, 40)
    assert collected(place, Keep(last=1)).collected != []
    assert (steps(place), names(place)) == ([40, 30], {"step-40", "step-30"})
    assert loads(place, 40)


@on(*EVERY)
def test_what_is_newest_is_told_by_commits_and_steps_are_numbers(place):
    for step in (9, 10, 99, 100, 1000):
        save(place, step)
    assert [each["global_step"] for each in command("ls", place.url, *place.arguments)[1]["committed"]] == [
        1000,
        100,
        99,
        10,
        9,
    ]
    policy = ["--keep-last", "2", "--grace", "0", *place.arguments]
    shown = command("gc", place.url, *policy)[1]
    done = command("gc", place.url, *policy, "--apply", shown["digest"])[1]
    assert done["deleted"] == shown["delete"]
    assert shown["retire"] == done["retired"] == done["collected"]
    assert (steps(place), names(place)) == ([1000, 100], {"step-100", "step-1000"})
    assert command("latest", place.url, *place.arguments)[1]["checkpoint"]["global_step"] == 1000
    assert loads(place, 1000)


def trained(place, saves, *, source=None, step=None, **options):
    """Be one start of a job that resumes, and saves so often."""
    sw.begin_incarnation(place.store())
    model, progress = torch.nn.Linear(2, 1), Progress()
    training = TrainingState(model=model, progress=progress)
    with Checkpointer(
        place.url, training, background=False, proof_steps=0, keep_grace_seconds=0, **place.access, **options
    ) as checkpointer:
        report = checkpointer.resume(source=source, step=step)
        for _ in range(saves):
            progress.global_step += 1
            checkpointer.save()
    return report


@on(*EVERY)
def test_what_was_resumed_stays_until_this_run_has_committed_whoever_collects(place):
    run = place.below("run2").probed() if not place.url.startswith("memory://") else replace(place, url=f"{place.url}2")
    place, run = place.probed(), run.probed()
    trained(place, 3)
    assert trained(run, 0, source=place.url, keep=Keep(last=1)).global_step == 3
    trained(place, 3, keep=Keep(last=1))  # the other run goes on, and lets go of what is old
    assert steps(place) == [6, 5, 3]
    before = place.contents()
    assert trained(run, 4, source=place.url, keep=Keep(last=1)).global_step == 6
    held = {key: body for key, body in place.contents().items() if key.startswith("data/")}
    assert held == {key: body for key, body in before.items() if key.startswith("data/")}
    assert steps(run) == [10, 9]
    trained(run, 0, step=9)
    collected(run, Keep(last=1))
    assert steps(run) == [9]
    assert trained(run, 1, keep=Keep(last=1)).global_step == 9
    assert steps(run) == [10, 9]


@on(*EVERY)
def test_what_another_process_deletes_is_gone_at_once_for_who_listed_before(place):
    for step in (10, 20, 30):
        save(place, step)
    before = [place.opened(), place.opened(), place.opened()]
    listed = [info.key for info in place.store().list("data/")]
    store = place.store()
    assert [info.key for info in store.list("data/")] == listed
    code, shown = command("gc", place.url, "--keep-last", "2", "--grace", "0", *place.arguments)
    command("gc", place.url, "--keep-last", "2", "--grace", "0", "--apply", shown["digest"], *place.arguments)
    assert code == 0
    for each in before:
        assert [one.global_step for one in each.checkpoints()] == [30, 20]
        assert each.uncommitted() == []
        with pytest.raises(NotFoundError):
            each.get("step-10")
    assert {key.split("/")[2].split(".")[0] for key in (info.key for info in store.list("data/"))} == {
        "step-20",
        "step-30",
    }
    assert loads(place, 30)


@on(*EVERY)
def test_under_a_name_that_is_a_pattern_nothing_but_its_own_is_touched(place):
    """Of runs and of checkpoints; the second of each pair is what the first would be taken for."""
    below = {name: place.below(name).probed() for name in ("run[1]", "run1", "a*", "ab")}
    for each in below.values():
        log, job = RunLog.create(each.store()), Incarnation.new(job="gpt")
        for name in ("q?x", "qax", "{x}", "x"):
            simulated.save(log, job, name, world_size=1)
    neighbours = {name: below[name].contents() for name in ("run1", "ab")}
    for name in ("run[1]", "a*"):
        store = below[name].opened()
        store.retire("q?x", "{x}")
        plan = store.plan_collection(grace_seconds=0)
        assert store.collect(digest=plan.digest, grace_seconds=0).failed == {}
        assert names(below[name]) == {"qax", "x"}
        assert all(each.ok for each in store.verify_kept(level="full"))
    assert {name: below[name].contents() for name in neighbours} == neighbours


KILLED = """
    import base64, os, pickle, signal, sys
    sys.path.insert(0, sys.argv[2])
    from ckptstore.options import TransferOptions
    place, keys = pickle.loads(base64.b64decode(sys.argv[1]))
    store = place.store(transfer=TransferOptions(part_bytes=5 << 20, parts_in_flight=2))
    for key in keys:
        upload = store.open_upload(key, size=20 << 20)
        for _ in range(12):
            upload.write(bytes(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def upload_and_die(place, *keys):
    given = base64.b64encode(pickle.dumps((place, keys))).decode()
    words = [sys.executable, "-c", textwrap.dedent(KILLED), given, TESTS]
    assert subprocess.run(words, timeout=120, check=False).returncode == -signal.SIGKILL


@on("files", "obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto")
def test_uploads_of_killed_jobs_are_removed_and_never_a_living_one_s_nor_another_run_s(place):
    neighbour = replace(place, url=f"{place.url}2").probed()
    dead, living = [], []
    for each in (place.probed(), neighbour):
        log, job = RunLog.create(each.store()), Incarnation.new(job="gpt")
        dead.append(begin(log, job, checkpoint_id="dead", world_size=1).stem.shard_key(0))
        job = Incarnation.new(job="gpt")
        simulated.save(log, job, "a", world_size=1)
        living.append(begin(log, job, checkpoint_id="living", world_size=1).stem.shard_key(0))
        upload_and_die(each, dead[-1], living[-1])
    found = place.opened().plan_collection(grace_seconds=0).abort
    assert [each.key.split("/")[2] for each in found] == [dead[0].split("/")[2]]
    if place.server is None or place.server.name != "moto":  # which says 2010 of each
        assert place.opened().plan_collection().abort == ()
    assert [each.key for each in collected(place).aborted] == [each.key for each in found]
    assert [each.key.split("/")[2] for each in place.store().list_uploads("")] == [living[0].split("/")[2]]
    assert len(list(neighbour.store().list_uploads(""))) == 2
    for each in (place, neighbour):
        for upload in each.store().list_uploads(""):
            each.store().abort_upload(upload)


@on(*EVERY)
def test_ages_are_by_the_clock_of_the_store_whatever_this_machine_s_says(place, monkeypatch):
    for step in (1, 2, 3, 4):
        with monkeypatch.context() as patch:  # the times in the records are in the order that is wrong
            set_off(patch, -step)
            save(place, step)
    log, ghost = RunLog.create(place.store()), Incarnation.new(job="gpt")
    claim(log, ghost)
    simulated.upload(log.store, begin(log, ghost, checkpoint_id="lost", world_size=1), 0)
    claim(log, Incarnation.new(job="gpt"))
    is_one_clock = place.url.startswith("memory://")  # there the store's clock is this machine's
    keep = Keep(last=2, hourly=1)
    with monkeypatch.context() as patch:
        set_off(patch, 0 if is_one_clock else 2)
        first = collected(place, keep, grace_seconds=3600)
    assert steps(place) == [4, 3]
    assert {each.key.rpartition("/")[2] for each in first.deleted} == {"COMMITTED"}  # hints, which need no grace
    assert names(place) == {"step-1", "step-2", "step-3", "step-4", "lost"}
    assert any(each.why.startswith("it can never commit; waits for the grace") for each in first.plan.waiting)
    time.sleep(2.1)  # some stores tell whole seconds
    with monkeypatch.context() as patch:
        set_off(patch, 0 if is_one_clock else -2)
        second = collected(place, keep, grace_seconds=1)
    assert len(second.collected) == 2
    assert names(place) == {"step-3", "step-4"}
    assert loads(place, 4)
