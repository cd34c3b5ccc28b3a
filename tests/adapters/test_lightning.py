"""Lightning's Trainer: what is resumed goes on bit by bit, and what cannot be carried is refused by name."""

import gc
import os
import signal
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainings import equal, seed_all, weights

from ckptstore import CheckpointStore
from ckptstore.adapters.lightning import Also, CheckpointCallback
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import Checkpointer, StoppedBySignal

pytestmark = [
    # Lightning 2.6 asks torch 2.13 for a class that it calls by another name by now.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    # Lightning's advice on speed; the loaders here are small.
    pytest.mark.filterwarnings("ignore:The .* does not have many workers:UserWarning"),
    # Lightning prints where to go for its service.
    pytest.mark.filterwarnings("ignore:.*litlogger.*:UserWarning"),
]

SAMPLES, FEATURES = 26, 5  # 7 batches of 4 in an epoch, the last of 2


@pytest.fixture(autouse=True, scope="module")
def collects_its_own_garbage_only():
    """Lightning collects garbage when it ends, of all that was ever imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class Rows(Dataset):
    """Numbers that can be made again; with `is_noisy`, each is disturbed by the process's own random numbers."""

    def __init__(self, *, is_noisy=True):
        self.is_noisy = is_noisy

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = torch.randn(FEATURES + 1, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(FEATURES) if self.is_noisy else 0.0
        return index, row[:FEATURES] + noise, row[FEATURES:]


class Module(LightningModule):
    def __init__(self, *, plateau=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Dropout(0.2), nn.Linear(7, 1))
        self.plateau, self.seen = plateau, []

    def training_step(self, batch, batch_idx):
        ids, inputs, labels = batch
        self.seen.append((self.current_epoch, batch_idx, ids.tolist(), self.optimizers().param_groups[0]["lr"]))
        loss = nn.functional.mse_loss(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        _, inputs, labels = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), labels), batch_size=len(inputs))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Killed(Exception):  # noqa: N818  (it is no error)
    pass


class Kills(Callback):
    """Ends a run before the step after so many, as a crash would; it holds nothing worth saving."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.after:
            raise Killed


class Fit:
    """One process's training."""

    def __init__(self, *, seed, url=None, schedule=None, callbacks=(), module=None, also=None, **given):
        seed_all(seed)
        loading = {name: given.pop(name) for name in ("num_workers", "persistent_workers") if name in given}
        self.module = module or Module(plateau=given.pop("plateau", False))
        self.callback = None
        if url is not None:
            make = partial(Checkpointer, url, background=False, proof_steps=2, **(schedule or {}))
            self.callback = CheckpointCallback(make, also=also or Also(stateless=["Kills"]))
            callbacks = [self.callback, *callbacks]
        if given.pop("is_scaled", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
            given["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        usual = {"max_epochs": 2, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1, **silent}
        self.trainer = Trainer(callbacks=list(callbacks), **{**usual, **given})
        self.loader = DataLoader(Rows(is_noisy=not loading), batch_size=4, shuffle=True, **loading)
        self.validation = DataLoader(Rows(), batch_size=SAMPLES)

    def run(self, **given):
        self.trainer.fit(
            self.module, **(given or {"train_dataloaders": self.loader, "val_dataloaders": self.validation})
        )
        return self

    @property
    def loops(self):
        return self.trainer.fit_loop.state_dict()


def killed(after, **given):
    fit = Fit(callbacks=[Kills(after)], **given)
    with pytest.raises(Killed):
        fit.run()
    fit.callback.checkpointer.close()  # what was recorded of the steps after the save is written by now
    return fit


CASES = {
    "in the middle of an epoch": ({}, 4, 7),
    "at an epoch's end": ({}, 7, 8),
    "in the second epoch": ({}, 9, 12),
    "between accumulated batches ahead": ({"accumulate_grad_batches": 3}, 2, 3),
    "with the last, shorter accumulation": ({"accumulate_grad_batches": 3}, 3, 4),
    "right after a validation": ({"val_check_interval": 2}, 4, 7),
    "between two validations": ({"val_check_interval": 2}, 3, 5),
    "with scaled gradients": ({"is_scaled": True}, 5, 8),
    "with a scheduler that looks at validations": ({"plateau": True, "max_epochs": 3}, 9, 10),
    "with steps that are limited": ({"max_steps": 12, "max_epochs": -1}, 9, 10),
    "with batches that are limited": ({"limit_train_batches": 5}, 6, 7),
    "with workers": ({"num_workers": 2}, 4, 5),
    "with workers that stay": ({"num_workers": 1, "persistent_workers": True}, 7, 8),
}


@pytest.mark.parametrize(("given", "step", "killed_after"), CASES.values(), ids=CASES)
def test_a_new_process_with_other_seeds_goes_on_bit_by_bit(tmp_path, given, step, killed_after):
    url = f"memory://{tmp_path.name}"
    control = Fit(seed=1, **given).run()
    killed(killed_after, seed=1, url=url, schedule={"every_steps": step}, **given)
    resumed = Fit(seed=99, url=url, **given).run()
    report = resumed.callback.report
    assert report.global_step == step
    assert equal(weights(resumed.module), weights(control.module))
    assert resumed.module.seen == control.module.seen[-len(resumed.module.seen) :]
    assert len(resumed.module.seen) < len(control.module.seen)
    assert resumed.loops == control.loops
    assert resumed.trainer.callback_metrics["val_loss"] == control.trainer.callback_metrics["val_loss"]
    if killed_after >= step + 3:
        assert report.proof.verdict == "proved", report.proof.table()


def test_nothing_is_drawn_for_a_run_that_is_saved(tmp_path):
    control = Fit(seed=1).run()
    saved = Fit(seed=1, url=f"memory://{tmp_path.name}", schedule={"every_steps": 2}).run()
    assert equal(weights(saved.module), weights(control.module))
    steps = [each.global_step for each in CheckpointStore.open(f"memory://{tmp_path.name}").checkpoints()]
    assert steps == [14, 12, 10, 8, 6, 4, 2]


def test_a_run_that_has_ended_trains_no_more_and_with_more_epochs_goes_on(tmp_path):
    url = f"memory://{tmp_path.name}"
    control = Fit(seed=1, max_epochs=3).run()
    first = Fit(seed=1, url=url).run()
    again = Fit(seed=99, url=url).run()
    assert again.module.seen == []
    assert equal(weights(again.module), weights(first.module))
    longer = Fit(seed=99, url=url, max_epochs=3).run()
    assert equal(weights(longer.module), weights(control.module))
    assert longer.module.seen == control.module.seen[14:]


class Adds(Module):
    """A module that adds to checkpoints, and reads it again."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(2000)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.table += 1

    def on_save_checkpoint(self, checkpoint):
        checkpoint["table"] = self.table

    def on_load_checkpoint(self, checkpoint):
        self.table = checkpoint["table"].clone()


class Data(LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader, self.seen = loader, 0

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return DataLoader(Rows(), batch_size=SAMPLES)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")  # the first run's
def test_callbacks_hooks_and_datamodules_go_on_with_their_state(tmp_path):
    def fit(seed, *callbacks):
        stops = EarlyStopping("loss", patience=9, stopping_threshold=-1.0, check_on_train_epoch_end=True)
        kept = ModelCheckpoint(tmp_path / "kept", monitor="loss")
        url = f"memory://{tmp_path.name}"
        more = {"enable_checkpointing": True, "max_epochs": 3, "schedule": {"every_steps": 9}}
        made = Fit(seed=seed, url=url, callbacks=[stops, kept, *callbacks], module=Adds(), **more)
        return made, stops, kept, Data(made.loader)

    first, stops, kept, data = fit(1, Kills(10))
    data.seen = 5
    with pytest.raises(Killed):
        first.run(datamodule=data)
    resumed, stops_2, kept_2, data_2 = fit(99, Kills(9))  # it ends before it has trained
    with pytest.raises(Killed):
        resumed.run(datamodule=data_2)
    assert stops_2.state_dict() == stops.state_dict()
    assert stops.state_dict()["best_score"] > 0
    assert kept_2.best_model_path == kept.best_model_path != ""
    assert data_2.seen == 5
    assert torch.equal(resumed.module.table, torch.full((2000,), 9.0))


def test_a_signal_saves_the_step_and_ends_the_process_as_schedulers_expect(tmp_path):
    class Terminated(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    url = f"memory://{tmp_path.name}"
    control = Fit(seed=1).run()
    with pytest.raises(StoppedBySignal) as raised:
        Fit(seed=1, url=url, callbacks=[Terminated()]).run()
    assert raised.value.code == 128 + signal.SIGTERM
    resumed = Fit(seed=99, url=url).run()
    assert resumed.callback.report.global_step == 3
    assert equal(weights(resumed.module), weights(control.module))


def test_another_accumulation_is_refused_before_anything_is_changed(tmp_path):
    url = f"memory://{tmp_path.name}"
    Fit(seed=1, url=url, max_steps=2).run()
    other = Fit(seed=2, url=url, accumulate_grad_batches=2)
    before = weights(other.module)
    with pytest.raises(IncompatibleStateError, match="accumulation"):
        other.run()
    assert equal(weights(other.module), before)


def test_a_checkpoint_of_lightnings_own_and_a_run_are_not_both_resumed(tmp_path):
    url = f"memory://{tmp_path.name}"
    first = Fit(seed=1, url=url, max_epochs=1).run()
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = Fit(seed=1, url=url)
    with pytest.raises(InvalidInputError, match="checkpoint of step 7"):
        other.run(train_dataloaders=other.loader, val_dataloaders=other.validation, ckpt_path=tmp_path / "last.ckpt")


class Counts(Callback):
    """Holds something, and tells nobody."""

    def __init__(self):
        self.seen = 0


class Swaps(Callback):
    """Puts other weights into a checkpoint."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["state_dict"]["net.0.weight"] = torch.zeros(1)


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"callbacks": [Counts()]}, "Counts holds seen"),
        ({"callbacks": [Swaps()]}, "Swaps.on_save_checkpoint"),
        ({"module": Manual}, "Manual optimizes manually"),
        ({"reload_dataloaders_every_n_epochs": 1}, "made anew"),
    ],
    ids=["a silent callback", "a hook that swaps weights", "manual optimization", "loaders made anew"],
)
def test_what_cannot_be_carried_is_refused_by_name(tmp_path, given, named):
    given = {**given, **({"module": given["module"]()} if "module" in given else {})}
    with pytest.raises(UnsupportedError, match=named):
        Fit(seed=1, url=f"memory://{tmp_path.name}", max_steps=1, **given).run()


def test_several_loaders_are_refused_by_name(tmp_path):
    fit = Fit(seed=1, url=f"memory://{tmp_path.name}")
    with pytest.raises(UnsupportedError, match="several loaders"):
        fit.run(train_dataloaders=[fit.loader, fit.loader], val_dataloaders=fit.validation)


def test_without_its_callback_a_saved_state_is_refused_by_name(tmp_path):
    url = f"memory://{tmp_path.name}"
    Fit(seed=1, url=url, max_steps=2, callbacks=[EarlyStopping("loss")]).run()
    with pytest.raises(IncompatibleStateError, match="EarlyStopping"):
        Fit(seed=1, url=url).run()
    also = Also(stateless=["EarlyStopping"])
    assert Fit(seed=1, url=url, max_steps=2, also=also).run().callback.report.global_step == 2
