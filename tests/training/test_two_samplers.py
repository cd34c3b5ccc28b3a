"""Random numbers go on where they were, once: no sampler that is asked later rewinds them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptstore.training import Checkpointer, ElasticSampler, Progress, TrainingState
from ckptstore.training.sampler import BeforeFirst


class Job:
    """It trains, and evaluates a little after every third step; loaders draw when they begin."""

    def __init__(self, url, seed):
        torch.manual_seed(seed)
        self.train, self.held_out = ElasticSampler(60, batch_size=4), ElasticSampler(40, batch_size=4)
        self.progress = Progress()
        state = TrainingState(
            model=nn.Linear(1, 1),
            sampler={"train": self.train, "held_out": self.held_out},
            progress=self.progress,
        )
        self.checkpointer = Checkpointer(url, state, background=False, proof_steps=0)

    def evaluate(self):
        next(iter(DataLoader(range(40), batch_sampler=self.held_out)))
        self.held_out.advance()

    def go_on(self, until, *, save_at=None):
        drawn = []
        for _ in DataLoader(range(60), batch_sampler=self.train):
            drawn.append(torch.rand(()).item())
            self.train.advance(progress=self.progress)
            self.progress.global_step += 1
            if self.progress.global_step % 3 == 0:
                self.evaluate()
            if self.progress.global_step == save_at:
                self.checkpointer.save()
            if self.progress.global_step == until:
                return drawn
        raise AssertionError


def test_an_evaluation_in_mid_epoch_does_not_rewind_what_the_training_has_drawn(tmp_path):
    expected = Job(tmp_path / "run", 1).go_on(10, save_at=4)
    job = Job(tmp_path / "run", 2)
    job.checkpointer.resume()
    assert (job.train.position, job.held_out.position) == (16, 4)
    assert job.go_on(10) == expected[4:]


@pytest.mark.parametrize("begins", ["observe", "save", "advance", "a first share"])
def test_a_training_that_has_begun_draws_on_whatever_loader_begins(tmp_path, begins):
    Job(tmp_path / "run", 1).go_on(4, save_at=4)
    job = Job(tmp_path / "run", 2)
    job.checkpointer.resume()
    if begins == "observe":
        job.checkpointer.observe(loss=1.0)
    elif begins == "save":
        job.checkpointer.save(checkpoint_id="again")
    elif begins == "advance":
        job.train.advance()
    else:
        next(iter(job.train))
    drawn = torch.rand(())
    next(iter(job.held_out))
    assert torch.rand(()) != drawn


def test_what_is_done_before_the_first_share_is_done_once_and_in_the_middle_of_an_epoch_only():
    done = []
    one, other, fresh = (ElasticSampler(8, batch_size=2) for _ in range(3))
    for each in (one, other):
        next(iter(each))
        each.advance()
    for first, expected in ((one, 1), (fresh, 1), (other, 2)):
        action = BeforeFirst(lambda: done.append(1))
        for each in (one, other, fresh):
            each.before_first(action)
        for each in (first, one, other, fresh):
            next(iter(each))
        assert len(done) == expected
