"""A resume is compared with the run that went on; what it forgot must show, and nothing else may."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from ckptstore.errors import InvalidInputError
from ckptstore.training.proof import compare
from ckptstore.training.tolerances import Tolerances
from ckptstore.training.trace import Conditions, Observation, Trace

sys.path.insert(0, str(Path(__file__).parent))
from small_training import HERE, Training, resumed

FAULTS = {
    "scheduler not restored": "lr",
    "moments dropped": "update_norm",
    "cursor at epoch start": "batch_digest",
    "rng not restored": "loss",
    "scaler reset": "scale",
    "gradients lost": "grad_norm",
    "micro-step lost": "samples",
}


@pytest.fixture(scope="module")
def run():
    """The states that a run had, by step, and the five steps that followed one saved amid an accumulation."""
    torch.manual_seed(1)
    training = Training()
    states = {}
    for _ in range(5):
        training.step()
        states[training.progress["global_step"]] = training.state()
    training.micro_step()
    states["saved"] = training.state()
    return states, training.trace(5)


def observed(step, loss, **more):
    return Observation(global_step=step, loss=loss, **more)


def trace(*losses, start=10, conditions=HERE, **more):
    steps = tuple(observed(start + at + 1, loss, **more) for at, loss in enumerate(losses))
    return Trace(start, steps, conditions, "w" * 16)


ELSEWHERE = dataclasses.replace(HERE, world_size=3)


def test_a_resume_that_forgot_nothing_did_the_very_same(run):
    states, control = run
    proof = compare(control, resumed(states["saved"]).trace(5))
    assert (proof.verdict, proof.steps, proof.steps_needed) == ("proved", 5, 5)
    assert proof.tolerances.is_exact
    assert (proof.resume_loss_delta, proof.first_batch) == (0.0, "same")
    assert {row.delta for row in proof.rows} == {0.0, None}
    assert {row.quantity for row in proof.rows if row.within} == {
        *("global_step", "samples", "batch_digest", "loss", "grad_norm", "lr", "scale", "update_norm")
    }
    assert proof.notes == ()


@pytest.mark.parametrize("conditions", [HERE, ELSEWHERE], ids=["exact", "on another world size"])
@pytest.mark.parametrize(("fault", "quantity"), FAULTS.items(), ids=list(FAULTS))
def test_what_a_resume_forgot_shows_where_it_is_expected(run, fault, quantity, conditions):
    states, control = run
    found = dataclasses.replace(resumed(states["saved"], fault=fault).trace(5), conditions=conditions)
    proof = compare(control, found)
    assert proof.verdict == "differs"
    assert quantity in {row.quantity for row in proof.differing}
    assert proof.tolerances.is_exact is (conditions == HERE)
    assert quantity in proof.table()


def test_another_cursor_is_another_first_batch_and_everything_else_is_the_same_one(run):
    states, control = run
    first = {fault: compare(control, resumed(states["saved"], fault=fault).trace(5)).first_batch for fault in FAULTS}
    assert {fault for fault, batch in first.items() if batch == "other"} == {"cursor at epoch start", "micro-step lost"}
    assert set(first.values()) == {"same", "other"}


@pytest.mark.parametrize("steps_older", [1, 3])
def test_older_weights_are_too_far_off_in_the_first_step_under_every_tolerance(run, steps_older):
    """A plain restart: everything is right but the weights."""
    states, control = run
    stale = {**states["saved"], "weights": states[5 - steps_older]["weights"]}
    found = resumed(stale).trace(5)
    for dtype in ("float64", "float32", "tf32", "float16", "bfloat16"):
        proof = compare(control, found, tolerances=Tolerances.of_dtype(dtype))
        assert [row.quantity for row in proof.differing if row.global_step == 6][:1] == ["loss"], dtype


def test_a_resume_on_another_world_size_may_round_otherwise_and_no_more():
    control = trace(2.0, 1.9, 1.8)
    assert compare(control, trace(2.0, 1.9, 1.8, conditions=ELSEWHERE)).verdict == "proved"
    assert compare(control, trace(2.00001, 1.9001, 1.8001, conditions=ELSEWHERE)).verdict == "proved"
    assert compare(control, trace(2.00001, 1.9001, 1.8001)).verdict == "differs"  # the same place computes the same
    later = compare(control, trace(2.0, 1.9, 1.801, conditions=ELSEWHERE))
    assert [(row.global_step, row.quantity) for row in later.differing] == [(13, "loss")]
    first = compare(control, trace(2.0001, 1.9, 1.8, conditions=ELSEWHERE))  # nothing has drifted yet
    assert [(row.global_step, row.quantity) for row in first.differing] == [(11, "loss")]


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another"},
        {"threads": 99},
        {"torch_version": "1.0"},
        {"dtype": "bfloat16"},
        {"parallelism": "dp=2,fsdp=2"},
    ],
)
def test_bits_are_asked_for_only_where_all_conditions_are_the_same(change):
    other = dataclasses.replace(HERE, **change)
    assert not Tolerances.between(HERE, other).is_exact
    assert not Tolerances.between(other, HERE).is_exact
    assert Tolerances.between(other, other).is_exact
    loose = dataclasses.replace(HERE, is_deterministic=False)
    assert Tolerances.between(loose, loose) == Tolerances()
    (note,) = compare(
        trace(1.0, grad_norm=1.0, batch_digest=1), trace(1.0, grad_norm=1.0, batch_digest=1, conditions=other)
    ).notes
    assert next(iter(change)) in note


def test_the_coarser_dtype_of_both_decides():
    half = dataclasses.replace(HERE, dtype="bfloat16")
    assert Tolerances.between(HERE, half) == Tolerances.between(half, HERE) == Tolerances.of_dtype("bfloat16")
    assert Tolerances.of_dtype("float5") == Tolerances.of_dtype("bfloat16")
    assert Tolerances.of_dtype("float32") == Tolerances()


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("control", "found", "verdict"),
    [
        ((1.0, NAN), (1.0, NAN), "proved"),
        ((1.0, INF), (1.0, INF), "proved"),
        ((1.0, NAN), (1.0, 1.0), "differs"),
        ((1.0, 1.0), (1.0, NAN), "differs"),
        ((1.0, INF), (1.0, -INF), "differs"),
        ((1.0, INF), (1.0, NAN), "differs"),
        ((1.0, INF), (1.0, 1e300), "differs"),
        ((NAN, NAN), (NAN, NAN), "too_few_steps"),
    ],
)
@pytest.mark.parametrize("conditions", [HERE, ELSEWHERE], ids=["exact", "near"])
def test_what_is_not_finite_is_equal_to_itself_only_and_alone_proves_nothing(control, found, verdict, conditions):
    proof = compare(trace(*control), trace(*found, conditions=conditions))
    assert proof.verdict == verdict
    assert any("not finite" in note for note in proof.notes) is not all(map(math.isfinite, control))
    json.loads(json.dumps(proof.as_json()))


def step_of(scale, grad_norm, update_norm, step=11):
    return Trace(10, (observed(step, 2.0, scale=scale, grad_norm=grad_norm, update_norm=update_norm),), ELSEWHERE, "w")


def test_a_step_that_the_scaler_skipped_is_skipped_again():
    skipped, taken = step_of(64.0, INF, 0.0), step_of(64.0, 3.0, 0.5)
    proof = compare(skipped, skipped)
    assert proof.verdict == "proved"
    assert any("step 11 were not finite in both runs" in note for note in proof.notes)
    for one, other, where in ((skipped, taken, "in the control only"), (taken, skipped, "in the resumed run only")):
        proof = compare(one, other)
        assert {row.quantity for row in proof.differing} == {"grad_norm", "update_norm"}
        assert any(where in note for note in proof.notes)


def test_a_scale_is_never_near_and_never_gone():
    control = step_of(64.0, 3.0, 0.5)
    for other in (63.99999, 128.0, None):
        (row,) = compare(control, step_of(other, 3.0, 0.5)).differing
        assert (row.quantity, row.control, row.resumed) == ("scale", 64.0, other)


@pytest.mark.parametrize("lr", [(1e-3,), (1e-3, 1e-4, 1e-5), (1e-3, 2e-4), None], ids=str)
def test_every_learning_rate_of_every_group_is_compared(lr):
    control, found = trace(1.0, lr=(1e-3, 1e-4)), trace(1.0, lr=lr, conditions=ELSEWHERE)
    assert [row.quantity for row in compare(control, found).differing] == ["lr"]
    assert compare(control, trace(1.0, lr=(1e-3, 1e-4), conditions=ELSEWHERE)).is_proved


def test_what_one_run_did_not_measure_is_told_and_not_called_equal():
    control = trace(1.0, grad_norm=2.0, batch_digest=7, samples=8)
    proof = compare(control, trace(1.0))
    assert proof.verdict == "proved"
    assert proof.first_batch == "unknown"
    assert {row.quantity for row in proof.rows if row.within is None} == {"grad_norm", "batch_digest", "samples"}
    assert any("grad_norm" in note for note in proof.notes)
    assert any("batches were the same is not known" in note for note in proof.notes)


def test_norms_of_other_weights_are_not_compared_and_that_others_move_is_a_difference():
    control = trace(1.0, update_norm=0.5)
    proof = compare(control, dataclasses.replace(trace(1.0, update_norm=0.7), update_of="other"))
    assert (proof.verdict, [row.quantity for row in proof.differing]) == ("differs", ["update_of"])
    assert any("update_norm" in note for note in proof.notes)
    assert compare(control, trace(1.0, update_norm=0.7)).verdict == "differs"


def test_without_a_trace_nothing_is_proved():
    for control in (None, trace()):
        proof = compare(control, trace(1.0))
        assert (proof.verdict, proof.is_proved, proof.rows) == ("no_trace", False, ())
        assert "no_trace" in proof.table()


def test_as_long_as_too_few_steps_are_taken_nothing_is_proved_but_a_difference_is_told():
    control = trace(1.0, 0.9, 0.8)
    assert [compare(control, trace(*(1.0, 0.9, 0.8)[:taken])).verdict for taken in range(4)] == [
        *("too_few_steps",) * 3,
        "proved",
    ]
    assert compare(control, trace()).resume_loss_delta is None
    assert compare(control, trace(1.0, 0.7)).verdict == "differs"
    assert compare(control, trace(1.0, 0.9), steps=2).verdict == "proved"
    assert compare(control, trace(1.0, 0.9, 0.8, 0.1)).verdict == "proved"  # what comes later is nobody's business


def test_a_step_that_was_left_out_shows():
    skipping = Trace(10, (observed(12, 1.0),), HERE)
    (row,) = compare(trace(1.0), skipping).differing
    assert (row.quantity, row.control, row.resumed, row.delta) == ("global_step", 11, 12, 1)


def test_a_note_tells_where_the_loss_does_not_tell_old_weights_from_these():
    flat = compare(trace(2.0, 2.000001, 1.999999), trace(2.0, 2.000001, 1.999999, conditions=ELSEWHERE))
    assert flat.verdict == "proved"
    assert any("does not tell these weights from older ones" in note for note in flat.notes)
    assert not any(
        "older ones" in note for note in compare(trace(2.0, 1.9), trace(2.0, 1.9, conditions=ELSEWHERE)).notes
    )


@pytest.mark.parametrize(
    ("loss", "verdict"), [(2.0, "proved"), (2.000004, "proved"), (2.000006, "differs"), (2.00001, "differs")]
)
def test_a_loss_must_be_nearer_to_the_control_than_to_a_restart_with_older_weights(loss, verdict):
    proof = compare(trace(2.0), trace(loss, conditions=ELSEWHERE), restart_loss=2.00001)
    assert proof.verdict == verdict
    assert {row.quantity for row in proof.differing} <= {"loss_of_a_restart"}


@pytest.mark.parametrize("restart", [2.0, NAN, INF])
def test_a_restart_that_tells_nothing_is_said_to(restart):
    proof = compare(trace(2.0), trace(2.0), restart_loss=restart)
    assert proof.verdict == "proved"
    assert any("does not tell them apart" in note for note in proof.notes)


def test_a_person_reads_what_differs_and_a_program_reads_everything(run):
    states, control = run
    proof = compare(control, resumed(states["saved"], fault="moments dropped").trace(5))
    lines = proof.table().splitlines()
    assert lines[0].startswith("differs: ")
    assert next(line for line in lines if line.startswith("lr ")).endswith("the same")
    assert next(line for line in lines if line.startswith("update_norm ")).endswith("differs from step 6 on")
    assert len(lines) < 30
    assert max(map(len, lines)) <= 110
    value = json.loads(json.dumps(proof.as_json(), allow_nan=False))
    assert value["verdict"] == "differs"
    assert len(value["rows"]) == 5 * 8
    row = next(row for row in value["rows"] if row["quantity"] == "update_norm")
    assert row["delta"] == row["resumed"] - row["control"]
    assert row["within"] is False


def test_the_line_that_the_log_keeps_says_what_was_compared(run):
    states, control = run
    assert compare(control, resumed(states["saved"]).trace(5)).summary() == (
        "proved: 5 steps, exact, first batch same, resume_loss_delta 0"
    )


@pytest.mark.parametrize("value", [-1, 2, math.nan, True, "1e-3", None])
def test_a_tolerance_is_a_number_from_0_to_1(value):
    with pytest.raises(InvalidInputError, match="grad_norm"):
        Tolerances(grad_norm=value)


def test_conditions_here_are_deterministic_on_a_cpu_only():
    assert HERE.is_deterministic
    assert HERE.device.startswith("cpu ")
    assert not Conditions.here(device="meta").is_deterministic
    assert Conditions.here(device="meta", is_deterministic=True).is_deterministic
    assert Conditions.here(dtype=torch.bfloat16, world_size=4) == dataclasses.replace(
        HERE, dtype="bfloat16", world_size=4
    )
