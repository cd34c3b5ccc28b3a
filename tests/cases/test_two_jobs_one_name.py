"""Two jobs that save to one run under the same names: every commit is wholly one job's, and one lineage goes on."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from case_samples import tapped
from refusals import checked, command, raised

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import ConflictError, FencedError

ROUNDS = 20
JOBS = {"A": [0, 1], "B": [2, 3]}
"""Two ranks each."""


def my_job():
    """Return this rank's job and its group."""
    groups = {job: dist.new_group(ranks) for job, ranks in JOBS.items()}
    job = next(job for job, ranks in JOBS.items() if dist.get_rank() in ranks)
    return job, groups[job]


def state(job, number):
    """Return a state of which each rank of a job writes one half, with the job and the round in every element."""
    value = number + (1000 if job == "A" else 2000)
    return {half: torch.full((5000,), value) for half in ("first", "second")}


def save(store, group, name, number, **options):
    writer = sw.CkptStoreWriter(store, process_group=group, **options)
    writer.describe(global_step=number, tags=[name])
    return raised(
        lambda: sw.save(state(name, number), checkpoint_id=f"step-{number}", storage_writer=writer, process_group=group)
    )


def many_saves(url):
    """Save often at random moments; each round is a fresh start of the job, which takes the run over."""
    job, group = my_job()
    chance = random.Random(job)  # noqa: S311  (no secret)
    told = []
    for number in range(ROUNDS):
        sw.begin_incarnation(url)
        time.sleep(chance.random() / 50)
        told.append(save(url, group, job, number))
    return job, told


def test_saves_of_two_jobs_at_once_are_each_wholly_one_jobs_and_the_loser_hears_that_it_is_fenced(gang, root):
    """I3, I6, I15."""
    heard = gang.values(4, many_saves, root, seconds=120)
    for job, ranks in JOBS.items():
        one, other = (heard[rank][1] for rank in ranks)
        for first, second in zip(one, other, strict=True):  # both ranks of a job hear the same
            assert str(first) == str(second)
            if first is not None:
                checked(first, FencedError, f"job {'unnamed'!r}")
        assert heard[ranks[0]][0] == job
    store = CheckpointStore.open(root)
    committed = [(each.commit.tags[0], each.global_step) for each in store.checkpoints()[::-1]]
    reported = {(job, number) for job, told in heard for number, error in enumerate(told) if error is None}
    assert set(committed) == reported  # I5: what was reported is there, and nothing else
    assert len(committed) == len(reported) >= ROUNDS
    for checkpoint in store.checkpoints():
        (job,), number = checkpoint.commit.tags, checkpoint.global_step
        for half, tensor in state(job, number).items():
            assert torch.equal(torch.from_numpy(checkpoint.read(half)), tensor)
    code, document = command("verify", root, "--all", "--level", "full")
    assert (code, document["ok"]) == (0, True)


def stall_before_the_commit(url):
    """Job A stalls when its data is stored and its commit is to be sent; B takes over and commits; A wakes up."""
    job, group = my_job()
    common = dist.distributed_c10d._get_default_store()

    def tap(call, act):
        if call.creates and call.key == "log/000000000001.json":
            common.set("A stalls", "yes")
            common.get("B has committed")
        return act()

    if job == "A":
        store = tapped(url, tap) if dist.get_rank() == 0 else url
        errors = [save(store, group, job, 7)]
    else:
        common.get("A stalls")
        errors = [save(url, group, job, 7)]
        common.set("B has committed", "yes")
    return [*errors, save(url, group, job, 8)]


def test_a_job_that_stalls_before_its_commit_is_fenced_when_it_wakes_and_ever_after(gang, root):
    """I3, I15."""
    heard = gang.values(4, stall_before_the_commit, root)
    for rank in JOBS["A"]:
        for error in heard[rank]:
            checked(error, FencedError, "Term 2")
    assert [heard[rank] for rank in JOBS["B"]] == [[None, None]] * 2
    store = CheckpointStore.open(root)
    assert [(each.commit.tags, each.global_step) for each in store.checkpoints()] == [(("B",), 8), (("B",), 7)]
    fenced = [each for each in store.uncommitted() if each.state == "dead"]
    assert [(each.stem.name, each.stem.term) for each in fenced] == [("step-7", 1)]  # the second save sent no data
    assert torch.equal(torch.from_numpy(store.latest().read("first")), state("B", 8)["first"])


def save_one_after_the_other(url):
    """B comes when A has saved, and calls itself another job."""
    job, group = my_job()
    if job == "B":
        dist.barrier()
    error = save(url, group, job, 1, job=job, takeover="same_job")
    if job == "A":
        dist.barrier()
    return error


def test_a_job_that_takes_over_only_its_own_runs_leaves_anothers_alone_and_says_whose_it_is(gang, root):
    heard = gang.values(4, save_one_after_the_other, root)
    assert [heard[rank] for rank in JOBS["A"]] == [None, None]
    for rank in JOBS["B"]:
        checked(heard[rank], ConflictError, "'A'", "'B'")
    store = CheckpointStore.open(root)
    assert [each.commit.tags for each in store.checkpoints()] == [("A",)]
    assert (store.reign.job, store.reign.term, store.uncommitted()) == ("A", 1, [])


@pytest.mark.parametrize("takeover", ["same-job", "never", None])
def test_a_takeover_that_is_misspelled_is_no_takeover(tmp_path, takeover):
    error = sw.cause(raised(lambda: sw.CkptStoreWriter(tmp_path / "run", takeover=takeover)))
    assert error.code == "invalid_input"
    assert "same_job" in error.hint
