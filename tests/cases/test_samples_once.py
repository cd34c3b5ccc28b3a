"""Each sample is trained on once in an epoch and in the unbroken order, however often the run is interrupted."""

import itertools
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from trainings import seed_all

from ckptstore.training import Checkpointer, ElasticSampler, Progress, TrainingState

SAMPLES, BATCH, EPOCHS = 1000, 20, 2
IN_AN_EPOCH = SAMPLES // BATCH


class Ids:
    """A dataset whose samples are their own numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


def train(url, seed, stop):
    """Resume on two ranks; return the ids of this rank's part of each batch until `stop` batches were trained on.

    There the state is saved in the background, and three more batches are trained on, which nobody counts.
    """
    multiprocessing.current_process()._config["daemon"] = False  # which may not have workers of its own
    seed_all(seed + dist.get_rank())
    model, progress = nn.Linear(1, 1), Progress()
    model.weight.data.zero_()
    sampler = ElasticSampler(SAMPLES, batch_size=BATCH, seed=11)
    loader = DataLoader(Ids(), batch_sampler=sampler, num_workers=2, prefetch_factor=4, multiprocessing_context="fork")
    state = TrainingState(model=model, sampler=sampler, progress=progress)
    trained = {}
    with Checkpointer(url, state) as checkpointer:
        if not checkpointer.resume().is_fresh:
            assert model.weight.item() == progress.consumed_samples  # both are of the same moment
        while progress.epoch < EPOCHS:
            for ids in loader:
                samples = sampler.advance(progress=progress)
                model.weight.data += samples
                progress.global_step += 1
                trained[progress.global_step] = ids.tolist()
                if progress.global_step == stop:
                    checkpointer.save()
                if stop is not None and progress.global_step == stop + 3:
                    return {step: batch for step, batch in trained.items() if step <= stop}
    return trained


def batches_of(parts):
    """Return the ids of each batch, of both ranks together."""
    assert {step: len(batch) for step, batch in parts[0].items()} == dict.fromkeys(parts[1], BATCH // 2)
    return {step: [*parts[0][step], *parts[1][step]] for step in parts[0]}


@pytest.fixture(scope="module")
def unbroken(gang, tmp_path_factory):
    return batches_of(gang.values(2, train, str(tmp_path_factory.mktemp("unbroken")), 1, None))


def test_the_unbroken_run_has_each_id_once_in_an_epoch_and_another_order_in_the_next(unbroken):
    assert [*unbroken] == [*range(1, EPOCHS * IN_AN_EPOCH + 1)]
    epochs = [list(itertools.chain(*list(unbroken.values())[at:][:IN_AN_EPOCH])) for at in (0, IN_AN_EPOCH)]
    for ids in epochs:
        assert sorted(ids) == [*range(SAMPLES)]
        assert ids != sorted(ids)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("stops", [(30,), (30, IN_AN_EPOCH), (30, 40, 75)], ids=str)
def test_every_batch_of_an_interrupted_run_is_that_of_the_unbroken_one(gang, tmp_path, unbroken, stops):
    found = {}
    for number, stop in enumerate([*stops, None]):
        part = batches_of(gang.values(2, train, str(tmp_path / "run"), 10 * number, stop))
        assert not part.keys() & found.keys()
        found |= part
    assert found == unbroken


def test_an_evaluations_own_order_goes_on_beside_that_of_the_training(tmp_path):
    def made():
        samplers = {"train": ElasticSampler(50, batch_size=5, seed=1), "eval": ElasticSampler(12, batch_size=4, seed=2)}
        return samplers, TrainingState(model=nn.Linear(1, 1), sampler=samplers)

    def batches(sampler, count):
        for ids in itertools.islice(sampler, count):
            sampler.advance()
            yield ids

    torch.manual_seed(0)
    samplers, state = made()
    assert len([*batches(samplers["train"], 3), *batches(samplers["eval"], 2)]) == 5
    with Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.save()
    expected = {name: [*batches(each, 20)] for name, each in samplers.items()}
    assert {name: len(each) for name, each in expected.items()} == {"train": 7, "eval": 1}

    samplers, state = made()
    with Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.resume()
    assert {name: [*batches(each, 20)] for name, each in samplers.items()} == expected
