"""Runs that are stopped in the middle of gradient accumulation."""

import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist

from ckptstore import CheckpointStore
from ckptstore.errors import IncompatibleStateError
from ckptstore.training import StoppedBySignal
from examples.train_accumulating import MICRO_STEPS, STEPS, train


def trained(url, wrap, stop_after=None, reduction="mean"):
    """Train with the example, ask it to stop after a batch, and return what was seen of all batches of this rank."""
    seen = []

    def note(progress, loss):
        summed = torch.tensor(loss)
        if dist.is_initialized():
            dist.all_reduce(summed)
        seen.append(((progress.global_step, progress.micro_step, progress.consumed_samples), summed.item()))
        if len(seen) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(seen) == stop_after

    try:
        report = train(url, wrap, reduction=reduction, on_batch=note)
    except StoppedBySignal:
        return seen, None
    except IncompatibleStateError as refused:
        return refused.hint, None
    return seen, report.proof and report.proof.verdict


def test_one_process_goes_on_between_two_micro_steps_bit_by_bit(tmp_path):
    control, _ = trained(str(tmp_path / "control"), "none")
    assert [counters[:2] for counters, _ in control[3:6]] == [(1, 0), (1, 1), (1, 2)]
    assert len(control) == STEPS * MICRO_STEPS
    before, _ = trained(str(tmp_path / "run"), "none", 7 * MICRO_STEPS + 3)
    saved = CheckpointStore.open(tmp_path / "run").latest()
    assert (saved.checkpoint_id, saved.commit.training_state["progress"]["micro_step"]) == ("step-7.micro-3", 3)
    after, _ = trained(str(tmp_path / "run"), "none")
    assert before + after == control


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_ranks_go_on_between_two_micro_steps_on_as_many_and_on_other_numbers(gang, tmp_path, wrap):
    """Bit by bit on as many. Under DDP each rank has gradients of its own until the last micro-step."""
    run = str(tmp_path / "run")
    (control, _), _ = gang.values(2, trained, str(tmp_path / "control"), wrap)
    (before, _), _ = gang.values(2, trained, run, wrap, 5 * MICRO_STEPS + 2)
    shutil.copytree(run, tmp_path / "other")
    for after, verdict in gang.values(2, trained, run, wrap):
        assert before + after == control
        assert verdict in ("proved", "no_trace")
    counters, losses = zip(*control[len(before) :], strict=True)
    for ranks in (3, 1):
        shutil.copytree(tmp_path / "other", tmp_path / f"on-{ranks}")
        for after, _ in gang.values(ranks, trained, str(tmp_path / f"on-{ranks}"), wrap):
            assert tuple(each for each, _ in after) == counters
            assert [loss for _, loss in after] == pytest.approx(losses, rel=1e-4)


def test_gradients_that_differ_by_rank_go_to_no_other_number_of_ranks_unless_it_is_said_how(gang, tmp_path):
    run = str(tmp_path / "run")
    gang.values(2, trained, run, "ddp", MICRO_STEPS + 1)
    for ranks in (3, 1):
        for hint, _ in gang.values(ranks, trained, run, "ddp", None, None):
            assert "gradient_reduction='mean'" in hint
    assert CheckpointStore.open(run).latest().checkpoint_id == "step-1.micro-1"  # and nothing was saved over it
