"""What a loop has probably forgotten is said once, and nothing is refused for it."""

import itertools
import logging

import pytest
import torch
from torch import nn

from ckptstore.training import Checkpointer, ElasticSampler, Progress, TrainingState

_runs = itertools.count()


class Loop:
    """A training that saves after each step, and does of a step what it is told to."""

    def __init__(self):
        self.model, self.progress = nn.Linear(2, 2), Progress()
        self.sampler = ElasticSampler(60, batch_size=4)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = TrainingState(model=self.model, optimizer=optimizer, sampler=self.sampler, progress=self.progress)
        self.checkpointer = Checkpointer(f"memory://cautions-{next(_runs)}", state, proof_steps=0, background=False)

    def step(self, *, moves=True, advances=True):
        batch = next(iter(self.sampler))
        assert len(batch) == 4
        self.progress.global_step += moves
        if advances:
            self.sampler.advance(progress=self.progress)
        self.checkpointer.save(checkpoint_id=f"save-{next(_runs)}")


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="ckptstore.training")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_loop_that_moves_everything_on_hears_nothing(loop, said):
    for _ in range(3):
        loop.step()
    assert said() == []


def test_a_loop_that_never_moves_its_progress_is_told_once(loop, said):
    for _ in range(4):
        loop.step(moves=False)
    (text,) = said()
    assert "global_step is 0 at two saves" in text


def test_a_loop_that_never_advances_its_sampler_is_told_once(loop, said):
    for _ in range(4):
        loop.step(advances=False)
    (text,) = said()
    assert "The cursor of sampler has not moved from step 1 to 2: call advance()" in text


def test_a_loop_that_asks_and_never_moves_its_progress_is_told_once(loop, said):
    for moves in (True, False, True, False):
        for _ in range(30):
            loop.progress.global_step += moves
            assert not loop.checkpointer.due()
    assert said() == ["20 calls of due() at global_step 30 and micro_step 0: move progress on."]
