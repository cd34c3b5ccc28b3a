"""An optimizer that never stepped goes on with all that was saved of another; nothing of it is dropped unsaid."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from trainings import equal, seed_all, weights

from ckptstore import IncompatibleStateError
from ckptstore.training import Checkpointer, TrainingState

_runs = itertools.count()
NAMES = ("exp_avg", "exp_avg_sq", "step")


@pytest.fixture
def url():
    return f"memory://moments-{next(_runs)}"


class Job:
    """A model of two layers, and an AdamW of those that are trained.

    Args:
        seed: Of the process.
        frozen: Layers without gradients.
        holds: Layers that are in the optimizer.
    """

    def __init__(self, seed, *, frozen=(), holds=(0, 1)):
        seed_all(seed)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for layer in frozen:
            self.model[layer].requires_grad_(requires_grad=False)
        parameters = [each for layer in holds for each in self.model[layer].parameters()]
        self.opt = torch.optim.AdamW(parameters, lr=0.1)
        self.state = TrainingState(model=self.model, optimizer=self.opt)

    def backward(self, batch):
        generator = torch.Generator().manual_seed(batch)
        loss = mse_loss(self.model(torch.randn(8, 4, generator=generator)), torch.randn(8, 2, generator=generator))
        if loss.requires_grad:
            loss.backward()

    def train(self, *batches):
        for batch in batches:
            self.opt.zero_grad()
            self.backward(batch)
            self.opt.step()

    def moments(self):
        return {
            f"{name}.{each}": self.opt.state[parameter][each].clone()
            for name, parameter in self.model.named_parameters()
            for each in NAMES
            if self.opt.state.get(parameter)
        }

    def save(self, url):
        with Checkpointer(url, self.state) as checkpointer:
            checkpointer.save()

    def resume(self, url):
        with Checkpointer(url, self.state) as checkpointer:
            return checkpointer.resume()


@pytest.mark.parametrize("pending", ["none", "at the save", "at the resume"])
def test_an_adamw_that_never_stepped_has_all_moments_and_its_next_step_is_the_same(url, pending):
    job, fresh = Job(1), Job(2)
    job.train(0, 1, 2)
    if pending == "at the save":
        job.backward(9)
    grads = [each.grad.clone() for each in job.model.parameters()]
    job.save(url)
    assert all(torch.equal(each.grad, grad) for each, grad in zip(job.model.parameters(), grads, strict=True))

    if pending == "at the resume":
        fresh.backward(8)
    before = [each.grad for each in fresh.model.parameters()]
    report = fresh.resume(url)
    assert all(each.grad is grad for each, grad in zip(fresh.model.parameters(), before, strict=True))
    assert report.without_state == ()
    assert len(fresh.moments()) == 4 * len(NAMES)
    assert equal(fresh.moments(), job.moments())
    assert {float(fresh.opt.state[each]["step"]) for each in fresh.model.parameters()} == {3.0}
    for each in (job, fresh):
        each.train(3)
    assert equal(weights(fresh.model), weights(job.model))
    assert equal(fresh.moments(), job.moments())


def test_moments_that_the_target_has_are_replaced(url):
    job, other = Job(1), Job(2)
    job.train(0, 1)
    other.train(5, 6, 7, 8)
    job.save(url)
    other.resume(url)
    assert equal(other.moments(), job.moments())
    assert equal(weights(other.model), weights(job.model))


def test_an_optimizer_that_was_saved_before_its_first_step_takes_moments_away(url):
    job, other = Job(1), Job(2)
    job.save(url)
    other.train(5)
    report = other.resume(url)
    assert other.moments() == {}
    assert report.without_state == ("0.weight", "0.bias", "1.weight", "1.bias")
    for each in (job, other):
        each.train(3)
    assert equal(weights(other.model), weights(job.model))


@pytest.mark.parametrize("changed", ["a layer is missing", "another group"])
def test_moments_that_find_no_place_are_refused_by_name_and_nothing_is_changed(url, changed):
    job = Job(1)
    job.train(0, 1)
    job.save(url)
    fresh = Job(2)
    if changed == "a layer is missing":
        fresh.opt = torch.optim.AdamW(fresh.model[1].parameters(), lr=0.1)
    else:
        fresh.opt = torch.optim.AdamW([{"params": each.parameters()} for each in fresh.model], lr=0.1)
    fresh.state = TrainingState(model=fresh.model, optimizer=fresh.opt)
    before = weights(fresh.model)
    with pytest.raises(
        IncompatibleStateError, match=r"0\.weight" if changed == "a layer is missing" else "groups: 1 → 2"
    ):
        fresh.resume(url)
    assert equal(weights(fresh.model), before)
    assert fresh.moments() == {}


def test_a_layer_that_was_trained_and_is_frozen_now_keeps_its_moments(url):
    job, fresh = Job(1), Job(2, frozen=[0])
    job.train(0, 1, 2)
    job.save(url)
    fresh.resume(url)
    assert equal(fresh.moments(), job.moments())
    for each in (job, fresh):
        each.model[0].requires_grad_(requires_grad=True)
        each.train(3)
    assert equal(weights(fresh.model), weights(job.model))


def test_a_layer_that_was_trained_and_is_left_out_of_the_optimizer_now_is_refused_by_name(url):
    job, fresh = Job(1), Job(2, frozen=[0], holds=[1])
    job.train(0, 1, 2)
    job.save(url)
    with pytest.raises(IncompatibleStateError, match=r"0\.weight was in group 0 with state, is in no group") as caught:
        fresh.resume(url)
    assert "leave frozen parameters in their groups" in caught.value.hint


@pytest.mark.parametrize("holds", [(0, 1), (1,)], ids=["in the optimizer", "left out of it"])
def test_a_layer_that_was_frozen_is_trained_from_now_on_without_moments(url, holds):
    job, fresh = Job(1, frozen=[0], holds=holds), Job(2)
    job.train(0, 1, 2)
    job.save(url)
    report = fresh.resume(url)
    assert {key.partition(".")[0] for key in fresh.moments()} == {"1"}
    assert equal(fresh.moments(), job.moments())
    assert report.without_state == ("0.weight", "0.bias")
    before = weights(fresh.model)
    fresh.train(3)
    assert not torch.equal(before["0.weight"], fresh.model[0].weight)
    assert float(fresh.opt.state[fresh.model[0].weight]["step"]) == 1.0
    assert float(fresh.opt.state[fresh.model[1].weight]["step"]) == 4.0


@pytest.mark.parametrize("holds", [(0, 1), (0,)], ids=["in the optimizer", "left out of it"])
def test_a_layer_that_never_was_trained_and_is_frozen_still_goes_on_so(url, holds):
    job, fresh = Job(1, frozen=[1]), Job(2, frozen=[1], holds=holds)
    job.train(0, 1)
    job.save(url)
    fresh.resume(url)
    assert equal(fresh.moments(), job.moments())


def test_a_model_of_which_every_parameter_is_frozen_goes_on(url):
    job, fresh = Job(1, frozen=[0, 1]), Job(2, frozen=[0, 1])
    job.train(0)
    job.save(url)
    report = fresh.resume(url)
    assert (job.moments(), fresh.moments()) == ({}, {})
    assert equal(weights(fresh.model), weights(job.model))
    assert report.without_state == ("0.weight", "0.bias", "1.weight", "1.bias")
