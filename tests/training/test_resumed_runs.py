"""A run that is resumed does what it would have done."""

import pytest
import torch
from trainings import Training, equal, weights

from ckptstore import CheckpointStore
from ckptstore.training import Checkpointer


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_a_new_process_with_other_seeds_goes_on_bit_by_bit(tmp_path, optimizer, background):
    control = Training(seed=1, optimizer=optimizer)
    with Checkpointer(tmp_path / "run", control.state, every_steps=7, background=background) as checkpointer:
        assert checkpointer.resume().is_fresh
        control.train(18, checkpointer)
    control.train(64)

    resumed = Training(seed=99, optimizer=optimizer)
    with Checkpointer(tmp_path / "run", resumed.state, every_steps=100) as checkpointer:
        report = checkpointer.resume()
        assert (report.global_step, report.is_fresh) == (14, False)
        resumed.train(64, checkpointer)
        assert report.proof is None or report.proof.verdict == "proved", report.proof.table()
    assert equal(weights(resumed.model), weights(control.model))
    assert resumed.extras == control.extras
    assert resumed.opt.param_groups[0]["lr"] == control.opt.param_groups[0]["lr"]
    assert resumed.scaler.state_dict() == control.scaler.state_dict()
    assert report.proof.verdict == "proved", report.proof.table()
    assert CheckpointStore.open(tmp_path / "run").latest().proved.startswith("proved: 4 steps, exact")
    torch.manual_seed(0)
