"""Generators that were captured go on exactly where they were, and capturing disturbs none of them."""
# ruff: noqa: NPY002, S311  (the legacy generators are what is tested, and no secret is drawn)

import random
import sys

import numpy as np
import pytest
import torch

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.values import decode_value, encode_value
from ckptstore.training import rng
from ckptstore.training.values import value_types

BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

DRAWS = {
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: [float(np.random.rand()), float(np.random.randn())],
    "torch": lambda: [*torch.rand(1).tolist(), *torch.randn(1).tolist()],
}


@pytest.fixture(autouse=True)
def _as_it_was():
    """Leave the process's generators to the other tests as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def named(seed):
    return {
        "torch": torch.Generator().manual_seed(seed),
        "python": random.Random(seed),
        **{f"numpy {name}": np.random.Generator(getattr(np.random, name)(seed)) for name in BITS},
        **{f"legacy {name}": np.random.RandomState(getattr(np.random, name)(seed)) for name in BITS},
    }


def draw(generators):
    """Draw five numbers from each generator; an odd number of normal ones, of which some generators keep one."""
    found = {name: [each() for _ in range(5)] for name, each in DRAWS.items()}
    for name, each in generators.items():
        if isinstance(each, torch.Generator):
            found[f"named {name}"] = torch.randn(5, generator=each).tolist()
        elif isinstance(each, random.Random):
            found[f"named {name}"] = [each.gauss(0, 1) for _ in range(5)]
        elif isinstance(each, np.random.Generator):
            drawn = [each.standard_normal(), each.integers(2**31, dtype=np.int32), each.random()]
            found[f"named {name}"] = [*drawn, *each.standard_normal(2)]
        else:
            found[f"named {name}"] = [*each.standard_normal(3), each.randint(9), each.rand()]
    return found


def through_a_document(saved):
    types = value_types()
    return decode_value(encode_value(saved, types=types), types=types)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_five_numbers_of_each_generator_are_those_of_the_unbroken_run():
    seed_all(1)
    generators = named(1)
    draw(generators)
    saved = through_a_document(rng.capture(generators))
    unbroken = draw(generators)
    seed_all(2)
    others = named(2)
    assert draw(others) != unbroken
    report = rng.restore(saved, others, seed=5)
    assert draw(others) == unbroken
    assert sorted(report.restored) == sorted(["python", "numpy", "torch", *(f"named:{name}" for name in generators)])
    assert (report.seeded, report.left, report.reasons) == ((), {}, {})


def test_capturing_changes_no_generator():
    seed_all(3)
    wanted = draw(named(3))
    seed_all(3)
    generators = named(3)
    for _ in range(3):
        rng.capture(generators)
    assert draw(generators) == wanted


def test_what_was_captured_does_not_change_with_the_generators():
    generators = named(4)
    saved = rng.capture(generators)
    before = encode_value(saved, types=value_types())
    draw(generators)
    assert encode_value(saved, types=value_types()) == before


def test_capturing_starts_neither_numpys_generator_nor_cuda(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("CUDA was asked"))
    saved = rng.capture({})
    assert list(saved) == ["python", "torch"]
    assert "numpy.random" not in sys.modules


def test_states_are_bytes_on_the_cpu_whatever_the_default_device_is():
    generators = {"mine": torch.Generator()}
    with torch.device("meta"), torch.inference_mode():
        saved = through_a_document(rng.capture(generators))
        report = rng.restore(saved, generators)
    for name in ("torch", "named:mine"):
        state = saved[name]["state"]
        assert (state.device.type, state.dtype) == ("cpu", torch.uint8)
        assert name in report.restored


class Device:
    """Generators of the CPU that stand for those of CUDA devices."""

    def __init__(self, monkeypatch, count, *, initialized=True):
        self.generators = [torch.Generator().manual_seed(index) for index in range(count)]
        self.initialized, self.lazily = initialized, []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "default_generators", self.generators, raising=False)
        monkeypatch.setattr(torch.cuda, "init", lambda: setattr(self, "initialized", True))
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.lazily.append)

    def draw(self):
        return [torch.rand(5, generator=each).tolist() for each in self.generators]


def test_every_cuda_device_goes_on_where_it_was(monkeypatch):
    with monkeypatch.context() as patch:
        devices = Device(patch, 2)
        devices.draw()
        saved = through_a_document(rng.capture())
        wanted = devices.draw()
    with monkeypatch.context() as patch:
        devices = Device(patch, 2, initialized=False)  # whoever restores starts CUDA: a seed may wait for its start
        report = rng.restore(saved)
        assert devices.initialized
        assert devices.draw() == wanted
    assert {"cuda:0", "cuda:1"} <= set(report.restored)


def test_on_fewer_devices_what_is_not_there_is_reported(monkeypatch):
    with monkeypatch.context() as patch:
        Device(patch, 2)
        saved = rng.capture()
    with monkeypatch.context() as patch:
        Device(patch, 1)
        report = rng.restore(saved, seed=1)
        assert "cuda:0" in report.restored
        assert report.left == {"cuda:1": "there are 1 CUDA devices here"}
    with monkeypatch.context() as patch:
        Device(patch, 0, initialized=False)
        assert sorted(rng.restore(saved, seed=1).left) == ["cuda:0", "cuda:1"]


def test_on_more_devices_the_new_ones_begin_from_seeds_of_their_own(monkeypatch):
    with monkeypatch.context() as patch:
        Device(patch, 1)
        saved = rng.capture()
    drawn = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            devices = Device(patch, 3)
            report = rng.restore(saved, seed=7)
            drawn.append(devices.draw())
        assert report.seeded == ("cuda:1", "cuda:2")
        assert report.reasons["cuda:1"] == "no state of it was saved"
    assert drawn[0] == drawn[1]
    assert drawn[0][1] != drawn[0][2]


def test_a_new_rank_begins_from_its_seed_and_says_so():
    drawn = []
    for seed, before in ((9, 1), (9, 2), (10, 1)):
        seed_all(before)
        generators = named(before)
        draw(generators)
        report = rng.restore(None, generators, seed=seed)
        drawn.append(draw(generators))
        assert (report.restored, report.left) == ((), {})
        assert set(report.seeded) == {"python", "numpy", "torch", *(f"named:{name}" for name in generators)}
    assert drawn[0] == drawn[1]
    assert all(drawn[0][name] != drawn[2][name] for name in drawn[0])


def test_of_a_new_rank_cuda_is_seeded_for_when_it_starts(monkeypatch):
    devices = Device(monkeypatch, 1, initialized=False)
    report = rng.restore(None, seed=3)
    assert "cuda" in report.seeded
    assert len(devices.lazily) == 1
    assert not devices.initialized


def test_without_a_seed_what_was_not_saved_stays_as_it_is():
    seed_all(5)
    wanted = draw({})
    seed_all(5)
    report = rng.restore(None)
    assert sorted(report.left) == ["numpy", "python", "torch"]
    assert draw({}) == wanted


def test_named_generators_that_are_gone_new_or_of_another_kind_are_reported():
    saved = rng.capture(
        {"gone": random.Random(1), "same": random.Random(2), "other": np.random.default_rng(3)}  # a PCG64
    )
    now = {
        "same": random.Random(0),
        "other": np.random.Generator(np.random.Philox(0)),
        "new": torch.Generator(),
    }
    report = rng.restore(saved, now, seed=1)
    assert "named:same" in report.restored
    assert report.left == {"named:gone": "no generator of this name is here"}
    assert report.seeded == ("named:other", "named:new")
    assert report.reasons == {
        "named:other": "it was numpy.random.Generator PCG64 when it was saved and is numpy.random.Generator Philox",
        "named:new": "no state of it was saved",
    }
    assert report.as_json["seeded"] == ["named:other", "named:new"]


def test_a_generator_may_have_the_name_of_one_of_the_process():
    seed_all(6)
    mine = {"python": random.Random(1), "torch": torch.Generator().manual_seed(1)}
    saved = rng.capture(mine)
    unbroken = draw(mine)
    seed_all(7)
    others = {"python": random.Random(2), "torch": torch.Generator()}
    rng.restore(saved, others)
    assert draw(others) == unbroken


@pytest.mark.parametrize(
    "state",
    [torch.zeros(7, dtype=torch.uint8), torch.zeros(5056), "text", None],
    ids=["short", "float", "text", "none"],
)
def test_a_state_that_is_not_taken_leaves_every_generator_as_it_was(state):
    generators = named(1)
    saved = rng.capture(generators)
    saved["named:torch"]["state"] = state
    seed_all(8)
    now = named(8)
    wanted = draw(now)
    seed_all(8)
    now = named(8)
    with pytest.raises(IncompatibleStateError, match="named:torch"):
        rng.restore(saved, now, seed=1)
    assert draw(now) == wanted


@pytest.mark.parametrize("saved", [{"python": 5}, {"python": {"kind": "x"}}, {5: {"kind": "x", "state": 1}}], ids=repr)
def test_what_capture_did_not_return_is_refused_before_anything_is_set(saved):
    with pytest.raises(InvalidInputError, match="saved generator"):
        rng.restore(saved)


@pytest.mark.parametrize(
    "generator", [random.SystemRandom(), np.random.PCG64(1), 5, None], ids=["os", "bits", "5", "no"]
)
def test_what_has_no_state_to_set_is_refused_by_name(generator):
    with pytest.raises(UnsupportedError, match="noise"):
        rng.capture({"noise": generator})


def test_a_derived_seed_depends_on_run_step_and_rank_and_never_changes():
    seeds = {rng.derived_seed(run, step, rank) for run in ("a", "b") for step in (0, 1) for rank in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rng.derived_seed("a", 1, 2) != rng.derived_seed("a", 12, 0)
    assert rng.derived_seed("run", 100, 3) == 161_238_721_666_723_086  # by hand: BLAKE3 of the domain and ["run",100,3]
