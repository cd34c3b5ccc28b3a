"""Where there is no trace, control and resumed are both run."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptstore.errors import InvalidInputError
from ckptstore.training.short_run import Program, prove_resume

sys.path.insert(0, str(Path(__file__).parent))
from small_training import Training, resumed

RUN = "the run"


class Holder:
    """What `build` makes: a training that `resume` replaces whole."""

    def __init__(self):
        self.training = Training()


def program(*, fault=None):
    """Return a program whose resume has one fault, and the places where it saved."""
    torch.manual_seed(1)
    first = Training()
    for _ in range(3):
        first.step()
    first.forget_observed()
    places = {RUN: first.state()}

    def resume(holder, url):
        holder.training = resumed(places[url], fault=fault)

    def save(holder, url):
        places[url] = holder.training.state()

    return Program(Holder, resume, save, lambda holder, _: holder.training.step()), places


def test_a_resume_that_forgets_nothing_is_proved_exactly():
    ours, places = program()
    proof = prove_resume(ours, RUN)
    assert (proof.verdict, proof.steps, proof.resume_loss_delta, proof.first_batch) == ("proved", 5, 0.0, "same")
    assert proof.tolerances.is_exact
    assert proof.notes == ()
    assert [row.global_step for row in proof.rows if row.quantity == "loss"] == [6, 7, 8, 9, 10]
    (scratch,) = places.keys() - {RUN}
    assert not Path(scratch).exists()


@pytest.mark.parametrize(
    ("fault", "quantity"),
    [
        ("scheduler not restored", "lr"),
        ("moments dropped", "update_norm"),
        ("cursor at epoch start", "batch_digest"),
        ("rng not restored", "loss"),
        ("scaler reset", "scale"),
    ],
)
def test_a_resume_that_forgets_shows_though_the_control_was_resumed_by_it_too(fault, quantity):
    proof = prove_resume(program(fault=fault)[0], RUN, warm_steps=3)
    assert proof.verdict == "differs"
    assert quantity in {row.quantity for row in proof.differing}


def test_a_resume_that_does_nothing_at_all_is_told_by_the_first_loss():
    ours, _ = program()
    nothing = dataclasses.replace(ours, resume=lambda *_: None)
    proof = prove_resume(nothing, RUN)
    assert proof.verdict == "differs"
    assert "loss" in {row.quantity for row in proof.differing if row.global_step == 3}


def test_a_step_may_return_plain_fields():
    ours, _ = program()
    plain = dataclasses.replace(
        ours, step=lambda holder, _: {"loss": (seen := holder.training.step()).loss, "global_step": seen.global_step}
    )
    proof = prove_resume(plain, RUN, steps=2, warm_steps=1)
    assert (proof.verdict, proof.steps, proof.first_batch) == ("proved", 2, "unknown")


@pytest.mark.parametrize(
    "said", [{"global_step": 9, "loss": 1.0, "accuracy": 1.0}, {"loss": 1.0}], ids=["more", "less"]
)
def test_a_step_that_returns_something_else_is_refused(said):
    ours, _ = program()
    with pytest.raises(InvalidInputError, match="A step returned"):
        prove_resume(dataclasses.replace(ours, step=lambda *_: said), RUN)


def test_samples_may_be_fixed_by_how_many_steps_came_before():
    ours, _ = program()
    asked = []

    def step(holder, at):
        asked.append(at)
        return holder.training.step()

    prove_resume(dataclasses.replace(ours, step=step), RUN, steps=3, warm_steps=2)
    assert asked == [0, 1, 2, 3, 4, 2, 2, 3, 4]  # control, restart, resumed


def test_the_callers_random_numbers_go_on_as_if_nothing_had_been():
    ours, _ = program()

    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002, S311

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    right = drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    prove_resume(ours, RUN, steps=1, warm_steps=1)
    assert drawn() == right


def test_a_second_place_that_is_given_is_used_and_stays(tmp_path):
    ours, places = program()
    scratch = str(tmp_path / "second")
    assert prove_resume(ours, RUN, scratch=scratch, steps=1).is_proved
    assert places.keys() == {RUN, scratch}


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"steps": 1001}, {"steps": True}, {"warm_steps": 0}, {"warm_steps": 1.5}, {"scratch": f"{RUN}/"}],
    ids=str,
)
def test_what_cannot_be_run_is_refused_before_anything_is_built(wrong):
    ours, _ = program()
    built = []
    with pytest.raises(InvalidInputError):
        prove_resume(dataclasses.replace(ours, build=lambda: built.append(1)), RUN, **wrong)
    assert built == []
