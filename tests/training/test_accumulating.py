"""Runs that are stopped in the middle of gradient accumulation."""

import os
import signal

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
