"""Targets that do not fit: refused with every difference, by key, and not touched."""

import pytest
import torch
from refusals import LOADS, load, raised, save, target, told, untouched
from torch.distributed.checkpoint.api import CheckpointException

from ckptstore.errors import IncompatibleStateError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("targets") / "run"
    save(path, "a")
    return path


def changed(**model):
    into = target()
    into["model"] |= model
    return into


def fits_not(run, into, *names, call="sw.load", **options):
    before = {key: tensor.clone() for key, tensor in into["model"].items() if isinstance(tensor, torch.Tensor)}
    error = told(lambda: load(run, into, call=call, **options), IncompatibleStateError, *names)
    assert all(torch.equal(into["model"][key], tensor) for key, tensor in before.items())
    if call == "sw.load":
        assert (into["step"], into["extra"]["name"]) in ((-1, ""), (None, ""))
    return error


@pytest.mark.parametrize("shape", [(200, 300), (300, 199), (60_000,), (), (0, 200), (300, 200, 1)], ids=str)
def test_another_shape_is_refused_with_both_shapes(run, shape):
    fits_not(run, changed(w=torch.full(shape, -1.0)), "model.w", "[300, 200]", str(list(shape)))


@pytest.mark.parametrize("call", LOADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.bool], ids=str)
def test_another_dtype_is_refused_with_both_dtypes(run, call, dtype):
    error = fits_not(
        run, changed(w=torch.zeros(300, 200, dtype=dtype)), "model.w", "torch.float32", str(dtype), call=call
    )
    assert "allow_cast" in error.hint


def test_all_differences_of_shape_are_told_at_once(run):
    into = changed(w=torch.zeros(5), b=torch.zeros(5, dtype=torch.int64))
    assert [each[0] for each in fits_not(run, into, "model.w", "model.b").facts["unlike"]] == ["model.w", "model.b"]


def test_keys_that_the_checkpoint_lacks_are_all_named_and_the_way_round_too(run):
    error = fits_not(run, changed(new=torch.zeros(1), other=torch.zeros(1)), "model.new", "model.other")
    assert error.facts["missing"] == ["model.new", "model.other"]
    assert "allow_missing" in error.hint


@pytest.mark.parametrize("call", LOADS)
@pytest.mark.parametrize("lacks", ["w", "b", "both", "step", "everything"])
def test_keys_that_the_target_lacks_are_all_named_and_the_way_round_too(run, call, lacks):
    into = target()
    for key in {"both": ["w", "b"], "step": [], "everything": ["w", "b"]}.get(lacks, [lacks]):
        del into["model"][key]
    if lacks in ("step", "everything"):
        del into["step"]
    named = {"both": ("model.w", "model.b"), "step": ("step",), "everything": ("model.w", "step")}
    error = told(
        lambda: load(run, into, call=call),
        IncompatibleStateError,
        *named.get(lacks, (f"model.{lacks}",)),
    )
    assert "allow_unexpected" in error.hint
    assert all(bool((tensor == -1).all()) for tensor in into["model"].values())


@pytest.mark.parametrize("call", LOADS)
def test_an_empty_target_loads_nothing_and_says_so(run, call):
    for empty in ({}, {"model": {}}):
        error = told(lambda empty=empty: load(run, empty, call=call), IncompatibleStateError, "model.w")
        assert error.facts["unexpected_count"] == 5


def test_a_value_is_no_tensor_and_a_tensor_is_no_value(run):
    fits_not(run, changed(w=3.0), "model.w")
    into = target()
    into["step"] = torch.zeros(1)
    told(lambda: load(run, into), IncompatibleStateError, "step")
    told(lambda: load(run, into, call="dcp.load"), IncompatibleStateError, "step")
    assert not into["step"].any()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1, 1).expand(300, 200), torch.eye(300, 200).to_sparse()], ids=["expanded", "sparse"]
)
def test_a_target_that_cannot_be_written_into_is_refused_and_named(run, tensor):
    for call in LOADS:
        told(lambda call=call: load(run, changed(w=tensor), call=call), IncompatibleStateError, "model.w")


def test_a_target_on_the_meta_device_gets_memory_also_without_a_process_group(run):
    into = changed(w=torch.empty(300, 200, device="meta"))
    load(run, into)
    assert torch.equal(into["model"]["w"], torch.arange(60_000.0).view(300, 200))


@pytest.mark.parametrize(
    ("into", "key"),
    [(changed(w=torch.zeros(5)), "model.w"), (changed(new=torch.zeros(1)), "model.new")],
    ids=["shape", "key"],
)
def test_what_dcps_own_planner_refuses_is_its_own_error_names_the_key_and_touches_no_tensor(run, into, key):
    """Its planner raises before our reader sees the target; `storage_writers.load` has a planner of ours."""
    error = raised(lambda: load(run, into, call="dcp.load"))
    assert isinstance(error, CheckpointException)
    assert key in str(error)
    assert all(not (tensor != value).any() for tensor, value in ((into["model"]["b"], -1),))


def test_a_target_that_fits_is_filled(run):
    into = load(run)
    assert not untouched(into)
