"""Ranks may hold different parts of a model, as the stages of a pipeline do: each gets its own back."""

import torch
import torch.distributed as dist
from torch import nn

from ckptstore import CheckpointStore
from ckptstore.training import Checkpointer, TrainingState


class Stage(nn.Module):
    """The first layer on rank 0, two more on each other rank."""

    def __init__(self, rank):
        super().__init__()
        for number in [0] if rank == 0 else [1, 2]:
            self.add_module(f"layer{number}", nn.Linear(3, 3))


class Job:
    def __init__(self, seed):
        torch.manual_seed(seed + min(dist.get_rank(), 1))
        self.model = Stage(dist.get_rank())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = TrainingState(model=self.model, optimizer=self.opt, parallelism={"pp": dist.get_world_size()})

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
    with Checkpointer(url, job.state) as checkpointer:
        checkpointer.resume()
    job.step()
    return job.weights()


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
