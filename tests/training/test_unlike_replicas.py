"""Replicas that are none: what ranks hold differently under one name is refused, or told and stored of one rank."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptstore import CheckpointStore
from ckptstore.errors import DisagreementError
from ckptstore.training import Checkpointer, TrainingState


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trained(url, wrap, extras=None):
    """Take two steps on samples of this rank's own, save, and return what was warned and what a resume says."""
    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("ckptstore.training").addHandler(handler)
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model=model, optimizer=optimizer, extras=extras)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        with Checkpointer(url, state, background=False, proof_steps=0) as checkpointer:
            checkpointer.save()
            checkpointer.save(checkpoint_id="again")
            report = checkpointer.resume()
    finally:
        logging.getLogger("ckptstore.training").removeHandler(handler)
    return [each for each in warned if "different tensors" in each], report.of_one_rank


def plain(model):
    return model


def replicas(model):
    return DistributedDataParallel(model)


def counting_for_themselves(model):
    return DistributedDataParallel(model, broadcast_buffers=False)


def of_each_rank(url, elements):
    trained(url, replicas, extras={"table": torch.full((elements,), float(dist.get_rank()))})


def run_plain(url):
    return trained(url, plain)


def run_replicas(url):
    return trained(url, replicas)


def run_counting(url):
    return trained(url, counting_for_themselves)


def test_replicas_are_nothing_to_remark(gang, tmp_path):
    assert gang.values(2, run_replicas, str(tmp_path)) == [([], ())] * 2


def test_ranks_that_exchange_no_gradients_are_told_once_and_when_they_resume(gang, tmp_path):
    (warned, stored), (_, other) = gang.values(2, run_plain, str(tmp_path))
    assert len(warned) == 1
    assert "different tensors of model" in warned[0]
    assert stored == other == ("model",)
    assert CheckpointStore.open(tmp_path).latest().commit.training_state["ranks_differ"] == ["model"]


def test_buffers_that_each_replica_counts_for_itself_are_told(gang, tmp_path):
    (warned, stored), _ = gang.values(2, run_counting, str(tmp_path))
    assert (len(warned), stored) == (1, ("model",))


def test_larger_tensors_of_a_value_that_all_must_hold_alike_are_refused_as_small_ones_are(gang, tmp_path):
    for elements in (4, 4000):
        errors = [each.error for each in gang.run(2, of_each_rank, str(tmp_path / str(elements)), elements)]
        assert [type(each) for each in errors] == [DisagreementError] * 2
        assert errors[0].facts["components"] == ["extras"]
        assert CheckpointStore.open(tmp_path / str(elements)).latest() is None
