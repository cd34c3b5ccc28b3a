"""What a training holds beside tensors comes back as it was, with its keys and types; nothing of before is left."""

import collections
import copy
import dataclasses
import datetime as dt
import functools
import io
import itertools
import math
import pathlib
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refusals import check_hint, contents

from ckptstore import CheckpointStore, UnsupportedError
from ckptstore.training import Checkpointer, TrainingState, value_types

_runs = itertools.count()


@pytest.fixture
def url():
    return f"memory://values-{next(_runs)}"


class Held:
    """An object that has a state, and takes what it is given as it is."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def save(url, extras, held=None, **options):
    model = torch.nn.Linear(2, 2)
    state = TrainingState(model=model, extras=extras, stateful={"held": Held(held)}, **options)
    with Checkpointer(url, state) as checkpointer:
        checkpointer.save()


def resume(url, extras, held=None, **options):
    """Return both as a program finds them that began with `extras` and `held`."""
    holder = Held(held)
    state = TrainingState(model=torch.nn.Linear(2, 2), extras=extras, stateful={"held": holder}, **options)
    with Checkpointer(url, state) as checkpointer:
        assert not checkpointer.resume().is_fresh
    return extras, holder.state


def same(one, other):
    """Return whether two values are equal, with the types of all that they hold, in the same order."""
    if isinstance(one, np.ndarray | np.generic | torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        factory = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return type(one) is type(other) and factory and same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | collections.deque):
        kept = getattr(one, "maxlen", None) == getattr(other, "maxlen", None) and len(one) == len(other)
        return type(one) is type(other) and kept and all(map(same, one, other))
    return type(one) is type(other) and one == other


KEYS = {
    "integers": {0: 5, 1: 6},
    "tuples": {("en", 1): 9, ("de", 2): 0},
    "booleans and None": {True: 1, False: 0, None: 2},
    "a number and its text": {1: "a", "1": "b"},
    "a float and bytes": {0.5: 1, b"x": 2},
    "deep": {0: {1: {("a",): [{2: None}]}}},
}


@pytest.mark.parametrize("name", KEYS)
def test_values_land_under_their_own_keys_and_there_are_no_others(url, name):
    saved = KEYS[name]
    save(url, {"table": copy.deepcopy(saved)}, copy.deepcopy(saved))
    zeros = dict.fromkeys(saved, 0) | {"0": "text", "True": "text"}
    extras, held = resume(url, {"table": zeros}, dict(zeros))
    assert same(extras, {"table": saved})
    assert same(held, saved)


def test_a_schedulers_milestones_keep_their_keys(url):
    def made():
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 6], gamma=0.1)
        return optimizer, scheduler, TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)

    def rates(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    optimizer, scheduler, state = made()
    first = list(rates(optimizer, scheduler, 2))
    with Checkpointer(url, state) as checkpointer:
        checkpointer.save()
    then = list(rates(optimizer, scheduler, 5))
    assert [*first, *then] == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.001, 0.001])

    optimizer, scheduler, state = made()
    with Checkpointer(url, state) as checkpointer:
        checkpointer.resume()
    assert same(scheduler.milestones, collections.Counter({3: 1, 6: 2}))
    assert list(rates(optimizer, scheduler, 5)) == then


CONTAINERS = {
    "filled into empty": ({"h": [{"k": 1}, {"k": 2}]}, {"h": []}),
    "emptied": ({"h": []}, {"h": [{"k": 1}, {"k": 2}]}),
    "shorter": ([1, 2], [0, 0, 0]),
    "longer": ([1, 2, 3], [0]),
    "empty into a key": ({}, {"a": 1}),
    "a key into empty": ({"a": 1}, {}),
    "None into a value": (None, {"a": [1]}),
    "a value into None": ({"a": [1]}, None),
    "an empty tuple": ((), (1, 2)),
    "a scalar into a list": (7, [1, 2]),
    "a list into a scalar": ([1, 2], 7),
    "other keys": ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}, "e": 4}),
    "a tensor into nothing": ({"m": torch.arange(3.0)}, {}),
    "a large tensor into nothing": ({"m": torch.arange(5000.0)}, {}),
    "a large tensor into a small one": ({"m": torch.arange(5000.0)}, {"m": torch.zeros(2, dtype=torch.int8)}),
    "nothing into a large tensor": ({"m": None}, {"m": torch.arange(5000.0)}),
    "tensors in a list that was longer": ([torch.ones(5000)], [torch.zeros(5000), torch.zeros(3)]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_was_saved_replaces_whatever_the_target_holds(url, name):
    saved, before = CONTAINERS[name]
    save(url, {"v": copy.deepcopy(saved), "gone": None}, copy.deepcopy(saved))
    extras, held = resume(url, {"v": copy.deepcopy(before), "new": 1}, copy.deepcopy(before))
    assert same(extras, {"v": saved, "gone": None})
    assert same(held, saved)


def test_what_comes_back_is_not_the_memory_that_the_target_had(url):
    before = torch.zeros(5000)
    save(url, {"m": torch.ones(5000)})
    extras, _ = resume(url, {"m": before})
    assert torch.equal(extras["m"], torch.ones(5000))
    assert not before.any()


@dataclasses.dataclass
class Patience:
    left: int
    best: float = math.inf


def types():
    known = value_types()
    known.register_dataclass(Patience, "patience")
    return known


def plain_values():
    """Return values by name, each time equal ones."""
    default = collections.defaultdict(list)
    default["a"].append(1)
    return {
        "numpy's state": np.random.RandomState(5).get_state(),
        "numpy's state by name": np.random.RandomState(5).get_state(legacy=False),
        "a bit generator's state": np.random.default_rng(5).bit_generator.state,
        "python's state": random.Random(5).getstate(),  # noqa: S311  (no secret)
        "float64": np.float64(0.1),
        "float32": np.float32(0.1),
        "int64": np.int64(-5),
        "bool_": np.True_,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "aware": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        "naive": dt.datetime(2026, 1, 2),  # noqa: DTZ001  (the point)
        "date": dt.date(2026, 1, 2),
        "timedelta": dt.timedelta(days=-1, microseconds=1),
        "path": pathlib.Path("/a/ñ"),
        "dataclass": Patience(3, 0.25),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": default,
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2, 3], maxlen=3),
        "set": {1, "a", (2, 3)},
        "bytes": b"\0\xff",
        "infinity": -math.inf,
        "large": 2**5000,
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "device": torch.device("cuda", 1),
        "nested": (1, [2, {"x": (3, collections.OrderedDict(y=np.float64(1)))}]),
    }


def test_plain_values_come_back_with_their_types(url):
    save(url, plain_values(), plain_values(), types=types())
    extras, held = resume(url, {}, None, types=types())
    wrong = {name: value for name, value in plain_values().items() if not same(value, extras.get(name))}
    assert wrong == {}
    assert same(extras, plain_values())
    assert same(held, plain_values())


def test_nan_comes_back_as_nan(url):
    save(url, {"loss": math.nan, "other": np.float32("nan")})
    extras, _ = resume(url, {})
    assert math.isnan(extras["loss"])
    assert isinstance(extras["other"], np.float32)
    assert np.isnan(extras["other"])


REFUSED = {
    "a lambda": lambda: lambda: 1,
    "a partial": lambda: functools.partial(int, "5"),
    "an open file": lambda: io.TextIOWrapper(io.BytesIO()),
    "a class of the user's": lambda: Patience(1),
    "a generator": torch.Generator,
    "a defaultdict of a lambda": lambda: collections.defaultdict(lambda: 1),
    "a module": lambda: torch.nn.Linear(1, 1),
}


def refused(url, who):
    """Return what saving each value was refused with, by name; only the ranks `who` have it."""
    errors = {}
    for name, make in REFUSED.items():
        extras = {"n": 5, "deep": [{"v": make()} if dist.get_rank() in who else {}]}
        with pytest.raises(UnsupportedError) as caught:
            save(url, extras)
        errors[name] = caught.value
    return errors


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=str)
def test_what_is_no_plain_value_is_refused_on_all_ranks_with_its_place_before_anything_is_written(gang, tmp_path, who):
    url = str(tmp_path / "run")
    one, other = gang.values(2, refused, url, who)
    for name in REFUSED:
        assert str(one[name]) == str(other[name])
        assert "extras['deep'][0]['v']" in one[name].message
        check_hint(one[name].hint)
    assert contents(url) == {}


def test_what_is_no_plain_value_in_an_object_of_the_users_is_named_by_that_object(url):
    with pytest.raises(UnsupportedError, match=r"stateful.held\[1\] is a builtins.function"):
        save(url, {}, [1, lambda: 1])
    state = TrainingState(model=torch.nn.Linear(2, 2), scheduler=Held({"f": lambda: 1}))
    with Checkpointer(url, state) as checkpointer, pytest.raises(UnsupportedError, match="scheduler"):
        checkpointer.save()
    assert CheckpointStore.open(url).latest() is None


def test_a_type_that_is_not_registered_where_the_run_is_resumed_is_refused_by_name(url):
    save(url, {"p": Patience(3)}, types=types())
    before = {"p": "as it was"}
    with pytest.raises(UnsupportedError, match="'dataclass:patience'"):
        resume(url, before)
    assert before == {"p": "as it was"}
