"""What a checkpoint does not have, where that is allowed."""

import pytest
from trainings import Training, equal, weights

from ckptstore.errors import IncompatibleStateError
from ckptstore.training import Checkpointer


@pytest.mark.parametrize("component", ["scaler", "sampler", "scheduler"])
def test_a_component_that_was_not_saved_begins_anew_if_that_is_allowed(tmp_path, component):
    first = Training(options={component: None})
    with Checkpointer(tmp_path / "run", first.state, background=False) as checkpointer:
        first.train(3)
        checkpointer.save()
    second = Training(seed=2)
    checkpointer = Checkpointer(tmp_path / "run", second.state)
    with pytest.raises(IncompatibleStateError, match=f"components.{component}"):
        checkpointer.resume()
    report = checkpointer.resume(allow=[component])
    assert component not in report.restored
    assert f"state.components.{component}: absent" in report.accepted[0]
    assert second.progress.global_step == 3
    assert equal(weights(second.model), weights(first.model))
