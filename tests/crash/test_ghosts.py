"""Two jobs on one run, in real processes: the older one is fenced, whenever it wakes; none fences itself (I15)."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import Watch, attempts, history, job, loaded, read_afresh, state
from places import at, on
from torch.distributed.checkpoint.api import CheckpointException

import storage_writers as sw
from ckptstore.errors import FencedError
from ckptstore.testing.tapped import TappedStore

RANKS = 2
STOP_SECONDS = 20
JOB_SECONDS = 50


def saves_by_dcp(mark, name, writer):
    dcp.save(state(mark), checkpoint_id=name, storage_writer=writer)


def saves(mark, name, writer):
    sw.save(state(mark), checkpoint_id=name, storage_writer=writer)


def saves_in_the_background(mark, name, writer):
    sw.async_save(state(mark), checkpoint_id=name, storage_writer=writer).result(JOB_SECONDS)


def saves_by_dcp_in_the_background(mark, name, writer):
    group = writer.process_group
    dcp.async_save(state(mark), checkpoint_id=name, storage_writer=writer, process_group=group).result(JOB_SECONDS)


WAYS = [saves_by_dcp, saves, saves_in_the_background, saves_by_dcp_in_the_background]


def how_it_ends(way, *given):
    """Return what a save raised: as itself, or what DCP says failed where."""
    try:
        way(*given)
    except CheckpointException as error:
        return {rank: type(failure) for rank, (failure, _) in error.failures.items()}
    except FencedError:
        return FencedError
    return None


def stopper(moment):
    """Return what stops the whole job when rank 0 has come to `moment`: once, as a scheduler would."""
    pids, left = [0] * dist.get_world_size(), [moment]
    dist.all_gather_object(pids, os.getpid())
    goes_on, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    signal.signal(signal.SIGCONT, lambda *_: None)

    def reach(here):
        if here in left and dist.get_rank() == 0:
            left.clear()
            for pid in reversed(pids):  # itself last
                os.kill(pid, signal.SIGSTOP)
            assert select.select([goes_on], [], [], JOB_SECONDS)[0]  # the stop may come after the next line

    return reach


def train_and_be_stopped(place, moment, first):
    """Save, be stopped, and try to save for ever after; return how each save ended."""
    reach = stopper(moment)

    def tap(call, act):
        if call.operation == "put" and "rank-" not in call.key:
            reach(f"before {call.key.split('/')[0]}")
        return act()

    sw.save(state(1), checkpoint_id="step-1", storage_writer=place.writer())
    reach("between saves")
    dist.barrier()
    ways = WAYS[first:] + WAYS[:first]
    ends = [how_it_ends(ways[0], 2, "step-2", sw.CkptStoreWriter(TappedStore(place.store(), tap)))]
    return ends + [how_it_ends(way, 3, "step-3", place.writer()) for way in ways]


def take_over(place):
    """Resume, and save under the names that the ghost uses, too."""
    assert loaded(place) == 1
    for step in (2, 3):
        sw.save(state(10 * step), checkpoint_id=f"step-{step}", storage_writer=place.writer())


def wait_until_stopped(pids):
    deadline = time.monotonic() + STOP_SECONDS
    while any(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T" for pid in pids):
        assert time.monotonic() < deadline, "the job did not stop"
        time.sleep(0.02)


IN_A_SAVE = ["before data", "before log"]  # all shards are stored then
GHOSTS = [
    ("files", "before data", 0),
    ("files", "before log", 1),
    ("files", "before log", 2),
    ("files", "between saves", 1),
    ("obstore-seaweedfs", "before data", 1),
    ("obstore-seaweedfs", "before log", 0),
    ("obstore-seaweedfs", "between saves", 0),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("place", "moment", "first"), [at(*each) for each in GHOSTS], indirect=["place"])
def test_a_job_that_was_stopped_while_another_took_over_is_fenced_for_ever(place, moment, first):
    """I3, I15."""
    with job() as ghost, job() as successor, ThreadPoolExecutor(1) as thread, Watch(place) as watch:
        ghosts = [process.pid for process in ghost.start(RANKS)]
        haunting = thread.submit(ghost.values, RANKS, train_and_be_stopped, place, moment, first)
        wait_until_stopped(ghosts)
        successor.values(RANKS, take_over, place, seconds=JOB_SECONDS)
        for pid in ghosts:
            os.kill(pid, signal.SIGCONT)
        ends = haunting.result(JOB_SECONDS)
    as_itself, in_dcps = FencedError, {0: FencedError}
    ways = WAYS[first:] + WAYS[:first]
    fenced = [in_dcps if way in (saves_by_dcp, saves_by_dcp_in_the_background) else as_itself for way in ways]
    assert ends == [[fenced[0], *fenced]] * RANKS
    assert {1, 4} <= set(watch.latest_ones()) <= {-1, 1, 3, 4}
    assert history(place) == ["CLAIM 1", "COMMIT 1", "CLAIM 2", "COMMIT 2", "COMMIT 2"]
    assert read_afresh(place) == [("step-3", 4, 30), ("step-2", 3, 20), ("step-1", 1, 1)]
    assert attempts(place, "step-2") == ["dead"] * (moment in IN_A_SAVE)
    assert attempts(place, "step-3") == []  # a ghost that knows uploads nothing


def save_in_all_ways(place):
    """Save twelve times, by a new writer each time; return what each name loads as."""
    marks = range(1, 13)
    for mark in marks:
        WAYS[mark % 4](mark, f"step-{mark}", place.writer())
    return [loaded(place, checkpoint_id=f"step-{mark}") for mark in marks]


@on("files", "obstore-seaweedfs")
def test_a_job_that_makes_a_writer_per_save_and_mixes_all_ways_to_save_never_fences_itself(place):
    with job() as trainer:
        assert trainer.values(RANKS, save_in_all_ways, place) == [list(range(1, 13))] * RANKS
    assert history(place) == ["CLAIM 1"] + ["COMMIT 1"] * 12
    assert read_afresh(place) == [(f"step-{mark}", mark, mark) for mark in range(12, 0, -1)]


def meet(port, who):
    """Wait until all processes of both jobs are here; return where they meet."""
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False)
    meeting.set(f"{who}/{dist.get_rank()}", "here")
    meeting.wait([f"{each}/{rank}" for each in (1, 2) for rank in range(RANKS)])
    return meeting


def save_against_another(place, port, who, seed):
    """Save twenty steps, with pauses; return how each save ended."""
    pauses = random.Random(f"{seed} {who}")  # noqa: S311  (to be repeated)
    meeting, rank = meet(port, who), dist.get_rank()
    time.sleep(pauses.uniform(0, 0.5))
    ends = []
    for step in range(1, 21):
        if step == 2:
            meeting.set(f"began/{who}/{rank}", "here")
        if step == 11:  # none has saved all before the other begins
            meeting.wait([f"began/{3 - who}/{rank}"])
        time.sleep(pauses.uniform(0, 0.05))
        ends.append(how_it_ends(saves, 1000 * who + step, f"step-{step}", place.writer()))
    return ends


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("place", "seed"),
    [at(name, seed) for name in ("files", "obstore-seaweedfs") for seed in (1, 2)],
    indirect=["place"],
)
def test_of_two_jobs_that_start_at_once_one_is_fenced_and_their_commits_never_mix(place, seed):
    """I3, I5, I15."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with job() as one, job() as other, ThreadPoolExecutor(2) as threads, Watch(place) as watch:
        for each in (one, other):
            each.start(RANKS)
        runs = [
            threads.submit(each.values, RANKS, save_against_another, place, meeting.port, who, seed)
            for who, each in ((1, one), (2, other))
        ]
        ends = {who: run.result(2 * JOB_SECONDS) for who, run in zip((1, 2), runs, strict=True)}
    saved = {who: by_rank[0].count(None) for who, by_rank in ends.items()}
    for who, by_rank in ends.items():  # fenced once is fenced for ever, on all ranks
        assert by_rank == [[None] * saved[who] + [FencedError] * (20 - saved[who])] * RANKS
    winner = max(saved, key=saved.get)
    loser = 3 - winner
    assert saved[winner] == 20
    assert saved[loser] < 20
    committed = [(name, mark) for name, _, mark in reversed(read_afresh(place))]
    assert committed == [
        (f"step-{step}", 1000 * who + step) for who in (loser, winner) for step in range(1, saved[who] + 1)
    ]
    assert history(place) == ["CLAIM 1"] + ["COMMIT 1"] * saved[loser] + ["CLAIM 2"] + ["COMMIT 2"] * 20
    assert watch.latest_ones()[-1] == 21 + saved[loser]
