"""What is observed of a step, and the trace that keeps it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.trace import MAX_TRACE_BYTES, decode_trace, encode_trace
from ckptstore.training.trace import MAX_STEPS, Conditions, Observation, Trace

HERE = Conditions.here()
COMMIT = {"seq": 3, "record_blake3": "6" * 64}
WHOLE = Observation(
    global_step=101,
    loss=0.1 + 0.2,
    grad_norm=math.inf,
    lr=(1e-3, 1e-4),
    scale=65536.0,
    batch_digest=2**63 - 1,
    samples=60,
    update_norm=5e-324,
)


def test_a_trace_comes_back_from_a_checkpoint_bit_by_bit():
    trace = Trace(100, (WHOLE, Observation(global_step=102, loss=-math.inf)), HERE, "0123456789abcdef")
    stored = decode_trace(encode_trace(trace.as_json(), **COMMIT), **COMMIT, key="trace.json")
    assert Trace.from_json(stored) == trace
    assert Trace.from_json(json.loads(json.dumps(trace.as_json()))) == trace


def test_a_loss_that_is_not_a_number_is_kept():
    stored = encode_trace(Trace(0, (Observation(global_step=1, loss=math.nan),), HERE).as_json(), **COMMIT)
    (found,) = Trace.from_json(decode_trace(stored, **COMMIT, key="trace.json")).observations
    assert math.isnan(found.loss)
    assert found.grad_norm is found.lr is found.scale is found.batch_digest is None


def test_the_longest_trace_can_be_stored():
    trace = Trace(
        0,
        tuple(
            Observation(**{**WHOLE.as_json(), "global_step": 10**15 + at, "batch_digest": 2**62})
            for at in range(MAX_STEPS)
        ),
        HERE,
    )
    assert len(encode_trace(trace.as_json(), **COMMIT)) < MAX_TRACE_BYTES / 2


@pytest.mark.parametrize(
    "value",
    [torch.tensor(1.5), torch.tensor([1.5], requires_grad=True), np.float32(1.5), np.float64(1.5), 1.5],
    ids=repr,
)
def test_a_number_may_be_a_tensor_or_an_array_scalar(value):
    seen = Observation(global_step=1, loss=value, grad_norm=value, lr=[value, value])
    assert (seen.loss, seen.grad_norm, seen.lr) == (1.5, 1.5, (1.5, 1.5))
    assert {type(each) for each in (seen.loss, seen.grad_norm, *seen.lr)} == {float}


def test_one_learning_rate_may_stand_alone():
    assert Observation(global_step=1, loss=0, lr=0.5).lr == (0.5,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", None),
        ("loss", "0.5"),
        ("loss", True),
        ("loss", torch.ones(2)),
        ("grad_norm", torch.ones(())[None, None].repeat(2, 1)),
        ("lr", ("x",)),
        ("scale", 1j),
        ("global_step", -1),
        ("global_step", 1.0),
        ("samples", True),
        ("batch_digest", 2**63),
    ],
)
def test_what_is_no_such_number_is_refused_and_named(field, value):
    with pytest.raises(InvalidInputError, match=field):
        Observation(**{"global_step": 1, "loss": 1.0, field: value})


@pytest.mark.parametrize("steps", [(102, 102), (102, 101)], ids=str)
def test_steps_ascend(steps):
    with pytest.raises(InvalidInputError, match="was observed after step"):
        Trace(100, tuple(Observation(global_step=step, loss=1.0) for step in steps), HERE)


def test_a_step_that_was_not_restored_can_be_told():
    assert Trace(100, (Observation(global_step=1, loss=1.0),), HERE).observations[0].global_step == 1


def test_a_trace_has_a_limit():
    steps = tuple(Observation(global_step=at + 1, loss=1.0) for at in range(MAX_STEPS + 1))
    with pytest.raises(InvalidInputError, match="1001 steps"):
        Trace(0, steps, HERE)


@pytest.mark.parametrize(
    "harm",
    [
        lambda value: value.pop("conditions"),
        lambda value: value.update(observations=None),
        lambda value: value["observations"][0].pop("loss"),
        lambda value: value["observations"][0].update(loss="much"),
        lambda value: value["observations"][0].update(batch_digest="xyz"),
        lambda value: value["observations"].append(value["observations"][0]),
        lambda value: value.update(start_step=True),
    ],
)
def test_json_that_is_no_trace_is_refused(harm):
    value = json.loads(json.dumps(Trace(100, (WHOLE,), HERE).as_json()))
    harm(value)
    with pytest.raises(IntegrityError, match="not that of a training"):
        Trace.from_json(value)


def test_a_later_release_may_say_more():
    value = {**Trace(100, (WHOLE,), HERE).as_json(), "more": 1}
    assert Trace.from_json(value).observations == (WHOLE,)
