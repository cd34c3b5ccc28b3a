"""Loops that train with Accelerate: what is resumed goes on bit by bit; what cannot be carried is refused by name."""

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainings import equal, seed_all, weights

from ckptstore.adapters.accelerate import Also, Prepared
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import Checkpointer

SAMPLES, FEATURES = 26, 5  # 7 batches of 4 in an epoch, the last of 2


class Rows(Dataset):
    """Numbers that can be made again; with `is_noisy`, each is disturbed by the process's own random numbers."""

    def __init__(self, *, is_noisy):
        self.is_noisy = is_noisy

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = torch.randn(FEATURES + 1, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(FEATURES) if self.is_noisy else 0.0
        return row[:FEATURES] + noise, row[FEATURES:]


class Remembers:
    """Something of the user's own, registered with the accelerator."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Loop:
    """One process's training."""

    def __init__(self, *, seed, accumulation=1, batch_size=4, configuration=None, prepares=True, **loading):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        seed_all(seed)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=configuration
        )
        model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Dropout(0.2), nn.Linear(7, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
        rows = Rows(is_noisy=loading.pop("is_noisy", not loading.get("num_workers")))
        loader = DataLoader(rows, batch_size=batch_size, **{"shuffle": True, **loading})
        self.model, self.optimizer, self.loader, self.scheduler = model, optimizer, loader, scheduler
        if prepares:
            prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
            self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.remembers = Remembers()
        self.accelerator.register_for_checkpointing(self.remembers)
        self.ids, self.report = [], None

    def train(self, url, *, until, save_at=None):
        """Train until a step and a micro-step, saving at another."""
        run = self.run = Prepared(self.accelerator, self.loader)
        with Checkpointer(url, run.state, background=False, proof_steps=2) as checkpointer:
            self.report = run.resume(checkpointer)
            while True:
                for inputs, labels in self.loader:
                    with self.accelerator.accumulate(self.model):
                        loss = nn.functional.mse_loss(self.model(inputs), labels)
                        self.accelerator.backward(loss)
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
                    ids = run.advance()
                    self.ids += ids
                    self.remembers.seen.append(self.scheduler.get_last_lr())
                    if self.accelerator.sync_gradients:
                        checkpointer.observe(loss=loss.detach(), batch_ids=ids)
                    at = run.progress.global_step, run.progress.micro_step
                    if at == save_at:
                        checkpointer.save()
                    if at == until:
                        return self


CASES = {
    "in the middle of an epoch": ({}, (3, 0)),
    "with the last batch of an epoch": ({}, (7, 0)),
    "in the second epoch": ({}, (9, 0)),
    "with an order from a seed": ({"configuration": DataLoaderConfiguration(use_seedable_sampler=True)}, (7, 0)),
    "in the middle of an accumulation": ({"accumulation": 3}, (4, 1)),
    "between two accumulations": ({"accumulation": 3}, (4, 0)),
    "with workers": ({"num_workers": 2}, (3, 0)),
    "with workers that stay": ({"num_workers": 1, "persistent_workers": True}, (7, 0)),
}


@pytest.mark.parametrize(("given", "saved"), CASES.values(), ids=CASES)
def test_a_new_process_with_other_seeds_goes_on_bit_by_bit(tmp_path, given, saved):
    url, until = f"memory://{tmp_path.name}", (11, 0) if "accumulation" not in given else (7, 0)
    control = Loop(seed=1, **given).train(url, until=until, save_at=saved)
    resumed = Loop(seed=99, **given).train(url, until=until)
    assert resumed.report.global_step == saved[0]
    assert equal(weights(resumed.model), weights(control.model))
    assert resumed.ids == control.ids[-len(resumed.ids) :]
    assert len(resumed.ids) < len(control.ids)
    assert resumed.run.progress == control.run.progress
    assert resumed.scheduler.get_last_lr() == control.scheduler.get_last_lr()
    assert resumed.remembers.seen == control.remembers.seen
    assert resumed.report.proof.verdict == "proved", resumed.report.proof.table()
    for each in (control.loader, resumed.loader):
        if each.persistent_workers:
            each._iterator._shutdown_workers()  # left to the garbage collector, they are waited for


@pytest.mark.parametrize(("workers", "later"), [(2, 0), (0, 2), (2, 1)])
def test_another_number_of_workers_reads_the_same(tmp_path, workers, later):
    url = f"memory://{tmp_path.name}"
    control = Loop(seed=1, num_workers=workers, is_noisy=False).train(url, until=(9, 0), save_at=(2, 0))
    resumed = Loop(seed=99, num_workers=later, is_noisy=False).train(url, until=(9, 0))
    assert resumed.ids == control.ids[8:]
    assert equal(weights(resumed.model), weights(control.model))


def test_a_process_with_other_seeds_trains_otherwise(tmp_path):
    """The cases above can fail: with other seeds and nothing restored, both order and weights are others."""
    control = Loop(seed=1).train(f"memory://{tmp_path.name}", until=(3, 0))
    other = Loop(seed=99).train(f"memory://{tmp_path.name}-other", until=(3, 0))
    assert other.ids != control.ids
    assert not equal(weights(other.model), weights(control.model))


def two_ranks(url):
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), ACCELERATE_USE_CPU="1")
    control = Loop(seed=1).train(url, until=(7, 0), save_at=(3, 0))
    resumed = Loop(seed=99 + rank).train(url, until=(7, 0))
    return {
        "kind": type(control.model).__name__,
        "step": resumed.report.global_step,
        "same": equal(weights(resumed.model), weights(control.model)),
        "ids": (control.ids, resumed.ids),
        "samples": resumed.run.progress.consumed_samples,
        "verdict": resumed.report.proof.verdict,
    }


def test_two_ranks_go_on_each_with_its_own_batches(tmp_path, gang):
    found = gang.values(2, two_ranks, str(tmp_path / "run"))
    for each in found:
        assert (each["kind"], each["step"], each["same"]) == ("DistributedDataParallel", 3, True)
        control, resumed = each["ids"]
        assert resumed == control[12:]  # three batches of 4 before
        assert each["verdict"] == "proved"
        assert each["samples"] == SAMPLES + 3 * 8  # 4 steps end the epoch
    assert found[0]["ids"] != found[1]["ids"]


def test_another_number_of_batches_is_refused_before_anything_is_changed(tmp_path):
    url = f"memory://{tmp_path.name}"
    Loop(seed=1).train(url, until=(3, 0), save_at=(3, 0))
    other = Loop(seed=2, batch_size=2)
    before = weights(other.model)
    with pytest.raises(IncompatibleStateError, match="batches"):
        other.train(url, until=(4, 0))
    assert equal(weights(other.model), before)


def test_a_resume_without_the_adapter_is_refused_at_the_first_batch(tmp_path):
    url = f"memory://{tmp_path.name}"
    Loop(seed=1).train(url, until=(3, 0), save_at=(3, 0))
    other = Loop(seed=2)
    run = Prepared(other.accelerator, other.loader)
    with Checkpointer(url, run.state, background=False) as checkpointer:
        checkpointer.resume()
        with pytest.raises(InvalidInputError, match="random numbers"):
            next(iter(other.loader))


def test_a_checkpointer_of_another_state_is_refused(tmp_path):
    loop, other = Loop(seed=1), Loop(seed=1)
    run = Prepared(loop.accelerator, loop.loader)
    with (
        Checkpointer(f"memory://{tmp_path.name}", Prepared(other.accelerator, other.loader).state) as checkpointer,
        pytest.raises(InvalidInputError, match="another state"),
    ):
        run.resume(checkpointer)


def test_a_batch_is_counted_once():
    loop = Loop(seed=1)
    run = Prepared(loop.accelerator, loop.loader)
    with pytest.raises(InvalidInputError, match="No batch"):
        run.advance()
    assert run.progress.global_step == 0


def test_a_loader_that_one_rank_reads_for_all_is_refused_by_name():
    loop = Loop(seed=1, configuration=DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(UnsupportedError, match="DataLoaderDispatcher"):
        Prepared(loop.accelerator, loop.loader)


def test_a_loader_that_was_not_prepared_is_refused_by_name():
    loop = Loop(seed=1, prepares=False)
    with pytest.raises(UnsupportedError, match="DataLoader cannot be followed"):
        Prepared(loop.accelerator, loop.loader)


def test_hooks_that_would_not_run_are_refused_by_name():
    def shrinks(models, weights, folder):
        weights.clear()

    loop = Loop(seed=1)
    loop.accelerator.register_save_state_pre_hook(shrinks)
    with pytest.raises(UnsupportedError, match="shrinks"):
        Prepared(loop.accelerator, loop.loader)


def test_names_that_the_adapter_uses_itself_are_refused():
    loop = Loop(seed=1)
    with pytest.raises(InvalidInputError, match="accelerator"):
        Prepared(loop.accelerator, loop.loader, also=Also(stateful={"accelerator": Remembers()}))
    with pytest.raises(InvalidInputError, match="stateless"):
        Also(stateless="Kills")
