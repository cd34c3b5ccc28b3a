"""Which job a process saves as: its name is the user's or the scheduler's, and none is nobody's."""

import pickle

import pytest
import torch

import storage_writers as sw
from ckptstore.errors import ConflictError, InvalidInputError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog
from storage_writers import incarnations

NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def save(url, name, **settings):
    writer = sw.CkptStoreWriter(url, **settings)
    sw.save({"w": torch.ones(1)}, checkpoint_id=name, storage_writer=writer)


def another_process(monkeypatch):
    """Let what follows save as another process would."""
    monkeypatch.setattr(incarnations, "_reigns", {})


@pytest.mark.parametrize("run_id", [None, "", "none"])
def test_same_job_asks_for_a_name_where_there_is_none(url, monkeypatch, run_id):
    """`none` is what torchrun says without --rdzv-id: every such job would be the same one."""
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    with pytest.raises(InvalidInputError, match="job="):
        sw.CkptStoreWriter(url, takeover="same_job")
    save(url, "a", takeover="same_job", job="mine")
    save(url, "b")  # without the promise no name is needed


def test_the_schedulers_name_goes_before_a_launcher_that_has_none(url, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    save(url, "a", takeover="same_job")
    another_process(monkeypatch)
    save(url, "b", takeover="same_job")
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    another_process(monkeypatch)
    with pytest.raises(ConflictError, match="17"):
        save(url, "c", takeover="same_job")


def test_a_process_is_one_job_at_a_run(url):
    save(url, "a", job="A")
    save(url, "b")  # says nothing, so it is A's
    save(url, "c", job="A")
    with pytest.raises(InvalidInputError, match=r"'A'.*'B'"):
        save(url, "d", job="B")
    with pytest.raises(InvalidInputError, match=r"'A'.*'B'"):
        pickle.dumps(sw.CkptStoreWriter(url, job="B"))
    save(f"{url}-another", "a", job="B")
    sw.begin_incarnation(url)
    save(url, "e", job="B")


def test_a_new_incarnation_begins_at_what_the_writer_was_given(url):
    store = open_store(url)
    save(store, "a")
    sw.begin_incarnation(store)
    save(store, "b")
    assert RunLog.open(store).fold.term == 2
    with pytest.raises(InvalidInputError, match="root"):
        sw.begin_incarnation(object())
