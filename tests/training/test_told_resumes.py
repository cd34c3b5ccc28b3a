"""What a resume cannot bring back, or what the program does otherwise now, is told."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.events import TailLost
from ckptstore.objectstore.urls import open_store
from ckptstore.training import Checkpointer, ElasticSampler, TrainingState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Run:
    def __init__(self, samples=6):
        self.model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.sampler = ElasticSampler(samples, batch_size=2)
        self.loader = DataLoader(TensorDataset(torch.ones(samples, 1)), batch_sampler=self.sampler)
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, sampler=self.sampler)
        self.progress = self.state.progress

    def train(self, checkpointer, epochs):
        while self.progress.epoch < epochs:
            for (rows,) in self.loader:
                self.model(rows).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.sampler.advance(progress=self.progress)
                self.progress.global_step += 1
            checkpointer.save()


def test_parameters_that_are_frozen_now_or_trained_again_are_told(tmp_path):
    run = Run()
    run.model[0].requires_grad_(requires_grad=False)
    with Checkpointer(tmp_path, run.state, background=False) as checkpointer:
        run.train(checkpointer, 1)
    again = Run()
    again.model[1].bias.requires_grad_(requires_grad=False)
    report = Checkpointer(tmp_path, again.state).resume()
    assert report.frozen_otherwise == (
        "0.weight: frozen then, trained now",
        "0.bias: frozen then, trained now",
        "1.bias: trained then, frozen now",
    )
    assert "1.bias: trained then, frozen now" in report.table()


def test_a_sampler_that_begins_anew_begins_the_epoch_that_the_run_is_in(tmp_path):
    run = Run()
    with Checkpointer(tmp_path, run.state, background=False) as checkpointer:
        run.train(checkpointer, 3)
    grown = Run(samples=8)
    with Checkpointer(tmp_path, grown.state, background=False) as checkpointer:
        checkpointer.resume(allow=["samplers.sampler.length"])
        assert (grown.progress.epoch, grown.sampler.epoch, grown.sampler.position) == (3, 3, 0)
        grown.train(checkpointer, 4)
    assert (grown.progress.epoch, grown.progress.global_step) == (4, 13)


def test_records_that_are_lost_are_told(tmp_path):
    run = Run()
    with Checkpointer(tmp_path, run.state, background=False) as checkpointer:
        run.train(checkpointer, 2)
    newest = CheckpointStore.open(tmp_path).latest().seq
    open_store(tmp_path).delete(f"log/{newest:012}.json")
    report = Checkpointer(tmp_path, Run().state).resume()
    assert (report.lost_from, report.global_step) == (newest, 3)
    assert f"records from slot {newest} on" in report.table()


def test_records_that_are_lost_are_told_though_the_claim_of_the_resume_stands_in_their_place(tmp_path, caplog):
    run, heard = Run(), []
    with Checkpointer(tmp_path, run.state, background=False) as checkpointer:
        run.train(checkpointer, 2)
    newest = CheckpointStore.open(tmp_path).latest().seq
    open_store(tmp_path).delete(f"log/{newest:012}.json")
    sw.begin_incarnation(tmp_path)
    again = Run()
    with Checkpointer(tmp_path, again.state, background=False, observer=heard.append) as checkpointer:
        report = checkpointer.resume()
        assert CheckpointStore.open(tmp_path).lost_from is None  # the claim stands there
        again.train(checkpointer, 3)  # an operator's loss stops no job
    assert (report.lost_from, report.global_step) == (newest, 3)
    assert [each for each in heard if isinstance(each, TailLost)] == [TailLost(hinted_seq=newest, log_end=newest)]
    assert f"latest.json named slot {newest}, and the log of {report.url} ended before it" in caplog.text
