"""Ranks may hold different parts of a model, as the stages of a pipeline do: each gets its own back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptstore import CheckpointStore
from ckptstore.errors import ResumeError
from ckptstore.training import Checkpointer, Matrix, TrainingState

ENTRIES = [
    {"from": {"pp": one}, "to": {"pp": other}, "status": "verified", "evidence": "this test"}
    for one, other in ((1, 2), (2, 1))
]


class Stage(nn.Module):
    """The first layer on rank 0, two more on each other rank; alone, a rank has all of them."""

    def __init__(self, rank):
        super().__init__()
        for number in [0, 1, 2] if dist.get_world_size() == 1 else [0] if rank == 0 else [1, 2]:
            self.add_module(f"layer{number}", nn.Linear(3, 3))


class Job:
    def __init__(self, seed):
        torch.manual_seed(seed + min(dist.get_rank(), 1))
        self.model = Stage(dist.get_rank())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = self.made()

    def made(self, **more):
        degrees = {"pp": dist.get_world_size()}
        return TrainingState(model=self.model, optimizer=self.opt, parallelism=degrees, **more)

    def step(self):
        self.opt.zero_grad()
        sum(each.square().sum() for each in self.model.parameters()).backward()
        self.opt.step()

    def weights(self):
        return {name: each.tolist() for name, each in self.model.state_dict().items()}


def save(url):
    job = Job(1)
    job.step()
    with Checkpointer(url, job.state) as checkpointer:
        checkpointer.save()
    job.step()
    return job.weights()


def resume(url):
    job = Job(50)
    with Checkpointer(url, job.state, matrix=Matrix.read(ENTRIES)) as checkpointer:
        checkpointer.resume()
    job.step()
    return job.weights()


@pytest.mark.parametrize(("ranks", "now"), [(2, 1), (1, 2)])
def test_stages_are_put_together_and_taken_apart_where_the_matrix_says_so(gang, tmp_path, ranks, now):
    url = str(tmp_path / "run")
    expected = {name: each for part in gang.values(ranks, save, url) for name, each in part.items()}
    found = gang.values(now, resume, url)
    assert [len(each) for each in found] == ([6] if now == 1 else [2, 4])
    assert {name: each for part in found for name, each in part.items()} == expected


class Breaking:
    """It harms the moments while it is resumed, after they were restored."""

    def __init__(self, job, harm):
        self.job, self.harm = job, harm

    def state_dict(self):
        return {"nothing": 0}

    def load_state_dict(self, _):
        if self.harm == "last rank forgets" and dist.get_rank() == dist.get_world_size() - 1:
            self.job.opt.state.clear()
        if self.harm == "all are zero":
            for moments in self.job.opt.state.values():
                for tensor in moments.values():
                    tensor.zero_()


def save_with(url):
    job = Job(1)
    job.step()
    with Checkpointer(url, job.made(stateful={"breaking": Breaking(job, "")})) as checkpointer:
        checkpointer.save()


def harmed(url, harm):
    job = Job(50)
    state = job.made(stateful={"breaking": Breaking(job, harm)})
    checkpointer = Checkpointer(url, state, matrix=Matrix.read(ENTRIES))
    with pytest.raises(ResumeError) as refused:
        checkpointer.resume()
    return refused.value.message


@pytest.mark.parametrize(("ranks", "now"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("harm", "said"), [("last rank forgets", "oments are missing"), ("all are zero", "dropped: all are zero")]
)
def test_moments_that_are_lost_on_the_way_are_missed_on_any_layout(gang, tmp_path, ranks, now, harm, said):
    url = str(tmp_path / "run")
    gang.values(ranks, save_with, url)
    for message in gang.values(now, harmed, url, harm):
        assert said in message


def test_each_stage_goes_on_with_its_own_weights_and_moments(gang, tmp_path):
    url = str(tmp_path / "run")
    expected = gang.values(2, save, url)
    assert [len(each) for each in expected] == [2, 4]
    assert gang.values(2, resume, url) == expected
    keys = CheckpointStore.open(url).latest().keys
    assert {f"model.layer{number}.weight" for number in range(3)} <= keys.keys()


def test_replicas_of_a_stage_are_stored_once(gang, tmp_path):
    url = str(tmp_path / "run")
    expected = gang.values(3, save, url)
    assert expected[1] == expected[2]
    keys = CheckpointStore.open(url).latest().keys
    assert "values/optimizer" in keys
    assert [key for key in keys if key.startswith("ranks/") and key.endswith("/optimizer")] == ["ranks/00001/optimizer"]
    assert gang.values(3, resume, url) == expected
