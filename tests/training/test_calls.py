"""`save` and `resume` for those who own their loop."""

import itertools

import pytest
import torch
import torch.distributed as dist
from stoppable import Tiny

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import IncompatibleStateError, InvalidInputError, NotFoundError
from ckptstore.training import Keep, resume, save

_runs = itertools.count()


@pytest.fixture
def url():
    return f"memory://calls-{next(_runs)}"


def weights(tiny):
    return [each.tolist() for each in tiny.model.parameters()]


@pytest.mark.parametrize("background", [True, False])
def test_what_one_call_saved_another_brings_back(url, background):
    tiny, known = Tiny(), []
    assert resume(tiny.state, url).is_fresh
    with sw.CkptStoreWriter(url) as writer:
        for _ in range(2):
            tiny.step()
            future = save(
                tiny.state, writer, metrics={"loss": 2.0}, tags=["a"], keep=Keep(last=2), background=background
            )
            assert (future is not None) is background
            writer.wait()
            known.append(weights(tiny))
        tiny.step()
        save(tiny.state, writer, checkpoint_id="by-name")
    named, *others = CheckpointStore.open(url).checkpoints()
    assert [each.checkpoint_id for each in (named, *others)] == ["by-name", "step-2", "step-1"]
    assert (others[0].commit.metrics, list(others[0].commit.tags)) == ({"loss": 2.0}, ["a"])
    found = Tiny(seed=5)
    assert resume(found.state, url).checkpoint_id == "by-name"
    assert weights(found) == weights(tiny)
    assert resume(found.state, url, step=1).global_step == 1
    assert weights(found) == known[0]
    found = Tiny(seed=5)
    resume(found.state, url, checkpoint_id="step-2", only=["model"])
    assert (weights(found), found.progress.global_step) == (known[1], 0)


def test_what_cannot_be_meant_is_refused(url):
    tiny = Tiny()
    with sw.CkptStoreWriter(url) as writer:
        with pytest.raises(InvalidInputError, match="TrainingState"):
            save(tiny.model, writer)
        with pytest.raises(InvalidInputError, match="background"):
            save(tiny.state, writer, background="yes")
        with pytest.raises(InvalidInputError, match="loss"):
            save(tiny.state, writer, metrics={"loss": "low"})
    with pytest.raises(InvalidInputError, match="TrainingState"):
        resume(tiny.model, url)
    with pytest.raises(InvalidInputError, match="only"):
        resume(tiny.state, url, only="model")
    with pytest.raises(NotFoundError):
        resume(tiny.state, url, step=4)


def test_another_optimizer_takes_the_weights_alone(url):
    tiny, other = Tiny(), Tiny(seed=5)
    tiny.step()
    with sw.CkptStoreWriter(url) as writer:
        save(tiny.state, writer)
    optimizer = torch.optim.AdamW(other.model.parameters())
    state = type(other.state)(model=other.model, optimizer=optimizer)
    with pytest.raises(IncompatibleStateError, match="SGD"):
        resume(state, url)
    resume(state, url, only=("model",))
    assert weights(other) == weights(tiny)


def of_a_group(root):
    group, tiny = dist.new_group([0, 1]), Tiny()
    tiny.step()
    with sw.CkptStoreWriter(root, process_group=group) as writer:
        for background in (True, False):
            save(tiny.state, writer, checkpoint_id=f"{background}", background=background, process_group=group)
    found = Tiny(seed=5)
    report = resume(found.state, root, process_group=group)
    return report.checkpoint_id, weights(found) == weights(tiny)


def test_ranks_save_and_resume_together(gang, tmp_path):
    assert gang.values(2, of_a_group, str(tmp_path / "run")) == [("False", True)] * 2
