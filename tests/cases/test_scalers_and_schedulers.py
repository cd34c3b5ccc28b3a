"""Gradient scalers and schedulers of learning rates go on where they were, whatever their class."""

import inspect
import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from ckptstore import IncompatibleStateError
from ckptstore.training import Checkpointer, TrainingState

_runs = itertools.count()
FIELDS = {"scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 9, "_growth_tracker": 7}


@pytest.fixture
def url():
    return f"memory://scalers-{next(_runs)}"


def scaler(*, enabled=True, fields=None):
    made = torch.amp.GradScaler("cpu", enabled=enabled)
    if fields is not None:
        made.load_state_dict(fields)
    return made


def save(url, **parts):
    with Checkpointer(url, TrainingState(model=nn.Linear(2, 2), **parts)) as checkpointer:
        checkpointer.save()


def resume(url, *, allow=(), **parts):
    with Checkpointer(url, TrainingState(model=nn.Linear(2, 2), **parts)) as checkpointer:
        return checkpointer.resume(allow=allow)


@pytest.mark.parametrize("used", ["never used", "at the save", "at the resume"])
def test_all_five_fields_of_a_scaler_come_back(url, used):
    first, second = scaler(fields=FIELDS), scaler()
    if used == "at the save":
        first.scale(torch.ones(()))
    if used == "at the resume":  # its scale is a tensor then
        assert second.scale(torch.ones(())) == 65536
    save(url, scaler=first)
    resume(url, scaler=second)
    assert second.state_dict() == FIELDS
    assert (second.get_scale(), second.get_growth_factor(), second.get_backoff_factor()) == (1024.0, 3.0, 0.25)
    assert second.get_growth_interval() == 9
    assert second.scale(torch.ones(())) == 1024


def test_a_scaler_grows_when_it_would_have(url):
    def step(each, optimizer):
        each.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
        each.step(optimizer)
        each.update()
        return each.get_scale()

    first, second = scaler(fields=FIELDS), scaler()
    save(url, scaler=first)
    resume(url, scaler=second)
    optimizers = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2)]
    expected = [1024.0, 3072.0, 3072.0]
    assert [step(first, optimizers[0]) for _ in range(3)] == expected
    assert [step(second, optimizers[1]) for _ in range(3)] == expected


@pytest.mark.parametrize("was", [True, False], ids=["it was enabled", "it was disabled"])
def test_a_scaler_that_is_enabled_on_one_side_only_is_refused_unless_that_is_said(url, was):
    first, second = (scaler(enabled=on, fields=FIELDS if on else None) for on in (was, not was))
    save(url, scaler=first)
    with pytest.raises(IncompatibleStateError, match=f"scalers.scaler: {was} → {not was}".lower()) as caught:
        resume(url, scaler=second)
    assert "allow=['scalers.scaler']" in caught.value.hint
    before = second.state_dict()
    report = resume(url, scaler=second, allow=["scalers.scaler"])
    assert second.state_dict() == before
    assert (report.fresh, report.restored) == (("scaler",), ("model", "progress", "rng"))
    assert "scalers.scaler" in report.table()
    save(url, scaler=second)
    third = scaler(enabled=not was)  # and back
    resume(url, scaler=third)
    assert third.state_dict() == before


def test_a_scaler_that_is_disabled_on_both_sides_is_nothing_to_remark(url):
    save(url, scaler=scaler(enabled=False))
    report = resume(url, scaler=scaler(enabled=False))
    assert (report.accepted, report.fresh) == ((), ())


@pytest.mark.parametrize(("there", "here"), [(True, False), (False, True)], ids=["left", "new"])
def test_a_scaler_on_one_side_only_is_refused_unless_that_is_said(url, there, here):
    save(url, **({"scaler": scaler(fields=FIELDS)} if there else {}))
    mine = {"scaler": scaler()} if here else {}
    with pytest.raises(IncompatibleStateError, match=r"components\.scaler"):
        resume(url, **mine)
    report = resume(url, **mine, allow=["scaler"])
    assert (report.fresh, report.left) == ((("scaler",), ()) if here else ((), ("scaler",)))


def test_several_scalers_each_have_their_own(url):
    save(url, scaler={"a": scaler(fields=FIELDS), "b": scaler(fields={**FIELDS, "scale": 2.0})})
    a, b = scaler(), scaler()
    resume(url, scaler={"b": b, "a": a})  # in another order
    assert (a.state_dict(), b.state_dict()) == (FIELDS, {**FIELDS, "scale": 2.0})


def test_learning_rates_are_told_in_one_order_whatever_the_order_of_the_optimizers(url):
    def state(*names):
        rates = {"a": 0.1, "b": 0.2}
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in sorted(names)})
        optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=rates[name]) for name in names}
        return TrainingState(model=model, optimizer=optimizers)

    with Checkpointer(url, state("a", "b")) as checkpointer:
        checkpointer.save()
    with Checkpointer(url, other := state("b", "a")) as checkpointer:
        checkpointer.resume()
    assert other.learning_rates() == [0.1, 0.2]


class Warm:
    """A function of the step that has a state."""

    def __init__(self, over):
        self.over = over

    def __call__(self, step):
        return min(1.0, (step + 1) / self.over)


def slower(step):
    return 0.9**step


def wave(step):
    return 1 + math.sin(step)


ONE = {
    "ConstantLR": lambda opt: schedulers.ConstantLR(opt, factor=0.5, total_iters=6),
    "CosineAnnealingLR": lambda opt: schedulers.CosineAnnealingLR(opt, T_max=12, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, T_0=4, T_mult=2),
    "CyclicLR": lambda opt: schedulers.CyclicLR(opt, 0.01, 0.2, step_size_up=4, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda opt: schedulers.CyclicLR(opt, 0.01, 0.2, step_size_up=4, scale_fn=wave),
    "ExponentialLR": lambda opt: schedulers.ExponentialLR(opt, gamma=0.8),
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, [slower, Warm(20)]),
    "LinearLR": lambda opt: schedulers.LinearLR(opt, 0.1, 1.0, total_iters=9),
    "MultiStepLR": lambda opt: schedulers.MultiStepLR(opt, [3, 6, 6, 9], gamma=0.3),
    "MultiplicativeLR": lambda opt: schedulers.MultiplicativeLR(opt, slower),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, max_lr=[0.4, 0.2], total_steps=20, three_phase=True),
    "PolynomialLR": lambda opt: schedulers.PolynomialLR(opt, total_iters=12, power=2.0),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=1, cooldown=1),
    "StepLR": lambda opt: schedulers.StepLR(opt, step_size=3, gamma=0.5),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.02, anneal_epochs=9),
    "ChainedScheduler": lambda opt: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(opt, 0.1, total_iters=7), schedulers.ExponentialLR(opt, gamma=0.9)], optimizer=opt
    ),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt,
        [
            schedulers.LinearLR(opt, 0.1, total_iters=4),
            schedulers.CosineAnnealingLR(opt, T_max=5),
            schedulers.ExponentialLR(opt, gamma=0.9),
        ],
        milestones=[4, 9],
    ),
}


def test_every_scheduler_of_torch_is_tested():
    known = {
        name
        for name, each in vars(schedulers).items()
        if inspect.isclass(each) and issubclass(each, schedulers.LRScheduler)
    } - {"LRScheduler", "_LRScheduler"}
    assert known <= ONE.keys()


def made(name, seed):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = ONE[name](optimizer)
    return optimizer, scheduler, TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)


def rates(optimizer, scheduler, steps):
    """Step, and return the rates and momenta that follow; where a measure is asked for, it grows worse and better."""
    found = []
    for step in steps:
        optimizer.step()
        scheduler.step(*([abs(math.sin(step))] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        found.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("name", ONE)
def test_a_scheduler_goes_on_with_the_very_same_rates(url, name, at):
    optimizer, scheduler, state = made(name, 1)
    rates(optimizer, scheduler, range(at))
    with Checkpointer(url, state) as checkpointer:
        checkpointer.save()
    expected = rates(optimizer, scheduler, range(at, 18))
    assert at == 0 or rates(*made(name, 3)[:2], range(at, 18)) != expected  # that is what a new one would do

    optimizer, scheduler, state = made(name, 2)
    with Checkpointer(url, state) as checkpointer:
        checkpointer.resume()
    assert rates(optimizer, scheduler, range(at, 18)) == expected


def test_a_scheduler_of_another_class_or_of_others_inside_is_refused_unless_that_is_said(url):
    _, _, state = made("SequentialLR", 1)
    with Checkpointer(url, state) as checkpointer:
        checkpointer.save()
    optimizer, _, state = made("StepLR", 2)
    with Checkpointer(url, state) as checkpointer, pytest.raises(IncompatibleStateError, match=r"→ \S*StepLR"):
        checkpointer.resume()
    inner = [schedulers.LinearLR(optimizer), schedulers.StepLR(optimizer, 3), schedulers.ExponentialLR(optimizer, 0.9)]
    scheduler = schedulers.SequentialLR(optimizer, inner, milestones=[4, 9])
    before = repr(scheduler.state_dict())
    state = TrainingState(model=state.models["model"], optimizer=optimizer, scheduler=scheduler)
    with Checkpointer(url, state) as checkpointer:
        with pytest.raises(IncompatibleStateError, match=r"CosineAnnealingLR, .* → .*StepLR, "):
            checkpointer.resume()
        assert checkpointer.resume(allow=["schedulers"]).fresh == ("scheduler",)
    assert repr(scheduler.state_dict()) == before
