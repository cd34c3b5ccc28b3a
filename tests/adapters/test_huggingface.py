"""transformers' Trainer: what is resumed goes on bit by bit, and what cannot be carried is refused by name."""

import gc
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from trainings import equal, seed_all, weights
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckptstore import CheckpointStore
from ckptstore.adapters.huggingface import Also, CheckpointCallback
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import Checkpointer, StoppedBySignal

SAMPLES, VOCABULARY, LENGTH = 26, 32, 6  # 7 batches of 4 in an epoch, the last of 2
SAID = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss")


@pytest.fixture(autouse=True, scope="module")
def collects_its_own_garbage_only():
    """Each `train()` collects garbage, of all that was ever imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class Texts(Dataset):
    """Token ids that can be made again; with `is_noisy`, one of each is masked by the process's own random numbers."""

    def __init__(self, *, is_noisy=True):
        self.is_noisy, self.asked = is_noisy, []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.asked.append(index)
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        inputs = ids.clone()
        if self.is_noisy:
            inputs[torch.randint(LENGTH, ())] = 0
        return {"input_ids": inputs, "labels": ids}


class Killed(Exception):  # noqa: N818  (it is no error)
    pass


class Kills(TrainerCallback):
    """Ends a run before the step after so many, as a crash would; it holds nothing worth saving."""

    def __init__(self, after):
        self.after = after

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            raise Killed


class Terminated(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def trainer_of(tmp_path, *, seed, callbacks=(), dataset=None, eval_dataset=None, **given):
    seed_all(seed)
    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, loss_type="ForCausalLM", **sizes, **special))
    usual = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), seed=seed, **{**usual, **given})
    dataset = Texts(is_noisy=not arguments.dataloader_num_workers) if dataset is None else dataset
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=Texts() if arguments.eval_strategy != "no" else eval_dataset,
        callbacks=list(callbacks),
    )


def saved_by(trainer, tmp_path, *, also=None, **given):
    """Attach a callback to a trainer; saves have ended when the next step begins, so that a kill is not a race."""
    make = partial(Checkpointer, f"memory://{tmp_path.name}", **{"background": False, "proof_steps": 2, **given})
    callback = CheckpointCallback(make, also=also or Also(stateless=["Kills"]))
    callback.attach(trainer)
    return callback


def said(trainer):
    return [{name: line[name] for name in SAID if name in line} for line in trainer.state.log_history]


CASES = {
    "in the middle of an epoch": ({}, {"every_steps": 4}, 4, 7),
    "at an epoch's end that is evaluated": ({"eval_strategy": "epoch"}, {"every_steps": 7}, 7, 9),
    "between micro-batches ahead": ({"gradient_accumulation_steps": 3}, {"every_steps": 2}, 2, 3),
    "with workers": ({"dataloader_num_workers": 2}, {"every_steps": 9}, 9, 10),
    "evaluated before it is saved": (
        {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 2},
        {"every_steps": 5},
        5,
        7,
    ),
    "saved when the Trainer saves": (
        {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch", "save_total_limit": 1},
        {},
        7,
        10,
    ),
    "with an order from the process's own numbers": (
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"every_steps": 4},
        4,
        6,
    ),
}


@pytest.mark.parametrize(("given", "schedule", "step", "killed_after"), CASES.values(), ids=CASES)
def test_a_new_process_with_other_seeds_goes_on_bit_by_bit(tmp_path, given, schedule, step, killed_after):
    control = trainer_of(tmp_path, seed=1, **given)
    control.train()

    killed = trainer_of(tmp_path, seed=1, callbacks=[Kills(killed_after)], **given)
    callback = saved_by(killed, tmp_path, **schedule)
    with pytest.raises(Killed):
        killed.train()
    callback.checkpointer.close()  # what was recorded of the steps after the save is written by now

    resumed = trainer_of(tmp_path, seed=99, **given)
    callback = saved_by(resumed, tmp_path, **schedule)
    resumed.train()
    assert callback.report.global_step == step
    assert equal(weights(resumed.model), weights(control.model))
    assert said(resumed) == said(control)
    assert resumed.optimizer.param_groups[0]["lr"] == control.optimizer.param_groups[0]["lr"]
    assert resumed.state.epoch == control.state.epoch == 2
    assert callback.checkpointer.state.progress.as_json() == {
        "global_step": control.state.global_step,
        "epoch": 2,
        "micro_step": 0,
        "consumed_samples": 2 * SAMPLES,
    }
    if killed_after >= step + 2:
        assert callback.report.proof.verdict == "proved", callback.report.proof.table()


def test_samples_come_in_the_order_in_which_they_would_have_come(tmp_path):
    control = trainer_of(tmp_path, seed=1)
    control.train()
    killed = trainer_of(tmp_path, seed=1, callbacks=[Kills(10)])
    saved_by(killed, tmp_path, every_steps=9)
    with pytest.raises(Killed):
        killed.train()
    resumed = trainer_of(tmp_path, seed=99)
    saved_by(resumed, tmp_path)
    resumed.train()
    trained = SAMPLES + 2 * 4  # an epoch, and two batches of the next one
    assert resumed.train_dataset.asked == control.train_dataset.asked[trained:]


def test_callbacks_that_say_their_state_go_on_with_it(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss", "learning_rate": 0.0}
    killed = trainer_of(tmp_path, seed=1, callbacks=[EarlyStoppingCallback(4, 9.0), Kills(7)], **given)
    saved_by(killed, tmp_path, every_steps=6)
    with pytest.raises(Killed):
        killed.train()
    stops = EarlyStoppingCallback(4, 9.0)
    resumed = trainer_of(tmp_path, seed=99, callbacks=[stops], **given)
    saved_by(resumed, tmp_path)
    resumed.train()
    assert resumed.state.global_step == 10  # the best at 2; none better at 4, 6, 8 and 10
    assert stops.early_stopping_patience_counter == 4


def test_without_its_callback_a_saved_state_is_refused_by_name(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss", "max_steps": 2}
    first = trainer_of(tmp_path, seed=1, callbacks=[EarlyStoppingCallback(4)], **given)
    saved_by(first, tmp_path)
    first.train()
    other = trainer_of(tmp_path, seed=1, **given)
    saved_by(other, tmp_path)
    with pytest.raises(IncompatibleStateError, match="EarlyStoppingCallback"):
        other.train()


def test_a_run_that_has_ended_is_saved_and_trains_no_more(tmp_path):
    first = trainer_of(tmp_path, seed=1, max_steps=5)
    saved_by(first, tmp_path)
    first.train()
    assert [each.global_step for each in CheckpointStore.open(f"memory://{tmp_path.name}").checkpoints()] == [5]
    again = trainer_of(tmp_path, seed=99, max_steps=5)
    saved_by(again, tmp_path)
    again.train()
    assert again.state.global_step == 5
    assert again.train_dataset.asked == []
    assert equal(weights(again.model), weights(first.model))


def test_a_signal_saves_the_step_and_ends_the_process_as_schedulers_expect(tmp_path):
    control = trainer_of(tmp_path, seed=1, max_steps=6)
    control.train()
    stopped = trainer_of(tmp_path, seed=1, max_steps=6, callbacks=[Terminated()])
    saved_by(stopped, tmp_path)
    with pytest.raises(StoppedBySignal) as raised:
        stopped.train()
    assert raised.value.code == 128 + signal.SIGTERM
    resumed = trainer_of(tmp_path, seed=99, max_steps=6)
    callback = saved_by(resumed, tmp_path)
    resumed.train()
    assert callback.report.global_step == 3
    assert equal(weights(resumed.model), weights(control.model))


def test_only_weights_are_taken_from_another_run_that_is_fine_tuned(tmp_path):
    first = trainer_of(tmp_path, seed=1, max_steps=3)
    saved_by(first, tmp_path)
    first.train()
    tuned = trainer_of(tmp_path, seed=2, max_steps=2, learning_rate=0.0)
    make = partial(Checkpointer, f"memory://{tmp_path.name}-tuned", background=False)
    callback = CheckpointCallback(
        make, resume=lambda one: one.resume(source=f"memory://{tmp_path.name}", only=("model",))
    )
    callback.attach(tuned)
    tuned.train()
    assert tuned.state.global_step == 2
    assert equal(weights(tuned.model), weights(first.model))


def test_another_batch_size_is_refused_before_anything_is_changed(tmp_path):
    first = trainer_of(tmp_path, seed=1, max_steps=2)
    saved_by(first, tmp_path)
    first.train()
    other = trainer_of(tmp_path, seed=2, max_steps=4, per_device_train_batch_size=2)
    before = weights(other.model)
    saved_by(other, tmp_path)
    with pytest.raises(IncompatibleStateError, match="samples_in_step"):
        other.train()
    assert equal(weights(other.model), before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_folder_of_the_trainers_own_and_a_run_are_not_both_resumed(tmp_path):
    given = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    first = trainer_of(tmp_path, seed=1, **given)
    saved_by(first, tmp_path)
    first.train()
    other = trainer_of(tmp_path, seed=1, **{**given, "max_steps": 4})
    saved_by(other, tmp_path)
    with pytest.raises(InvalidInputError, match="folder"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_a_run_that_began_in_a_folder_of_the_trainers_own_goes_on_in_a_store(tmp_path):
    given = {"max_steps": 9, "dataset": Texts(is_noisy=False)}
    control = trainer_of(tmp_path, seed=1, **given)
    control.train()
    first = trainer_of(tmp_path, seed=1, callbacks=[Kills(3)], save_strategy="steps", save_steps=3, **given)
    with pytest.raises(Killed):
        first.train()
    second = trainer_of(tmp_path, seed=1, callbacks=[Kills(6)], **given)
    saved_by(second, tmp_path, every_steps=5)
    with pytest.raises(Killed):
        second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    third = trainer_of(tmp_path, seed=99, **given)
    callback = saved_by(third, tmp_path)
    third.train()
    assert callback.report.global_step == 5
    assert equal(weights(third.model), weights(control.model))


class Counts(TrainerCallback):
    """Holds something, and tells nobody."""

    def __init__(self):
        self.seen = 0


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "dataloader_persistent_workers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_under_which_a_run_cannot_go_on_are_refused_by_name(tmp_path, given, named):
    trainer = trainer_of(tmp_path, seed=1, **given)
    with pytest.raises(UnsupportedError, match=named):
        saved_by(trainer, tmp_path)


def test_a_callback_that_may_hold_a_state_is_refused_by_name(tmp_path):
    trainer = trainer_of(tmp_path, seed=1, callbacks=[Counts()])
    saved_by(trainer, tmp_path)
    with pytest.raises(UnsupportedError, match="Counts holds seen"):
        trainer.train()


def test_a_release_that_works_otherwise_is_refused_before_it_trains(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, seed=1)
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(UnsupportedError, match="has no _run_epoch"):
        saved_by(trainer, tmp_path)


def test_a_stream_is_refused_by_name(tmp_path):
    trainer = trainer_of(tmp_path, seed=1, dataset=Stream(), max_steps=2)
    saved_by(trainer, tmp_path)
    with pytest.raises(UnsupportedError, match="Stream is a stream"):
        trainer.train()


def test_a_callback_that_was_not_attached_says_so(tmp_path):
    callback = CheckpointCallback(partial(Checkpointer, tmp_path / "run"))
    trainer = trainer_of(tmp_path, seed=1, callbacks=[callback])
    with pytest.raises(InvalidInputError, match="does not know its Trainer") as raised:
        trainer.train()
    assert "attach" in raised.value.hint
    callback.attach(trainer)
    with pytest.raises(InvalidInputError, match="has a Trainer already"):
        callback.attach(trainer)


def two_ranks(url, folder):
    rank = torch.distributed.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="1")
    given = {"max_steps": 6, "ddp_backend": "gloo", "eval_strategy": "steps", "eval_steps": 2}
    control = trainer_of(Path(folder), seed=1, **given)
    CheckpointCallback(partial(Checkpointer, url, every_steps=3, background=False)).attach(control)
    control.train()
    resumed = trainer_of(Path(folder), seed=99, **given)
    make = partial(Checkpointer, url, background=False)
    callback = CheckpointCallback(make, resume=lambda checkpointer: checkpointer.resume(step=3))
    callback.attach(resumed)
    resumed.train()
    return {
        "kind": type(control.model_wrapped).__name__,
        "step": callback.report.global_step,
        "same": equal(weights(resumed.model), weights(control.model)),
        "said": said(resumed) == said(control),
        "asked": (control.train_dataset.asked, resumed.train_dataset.asked),
        "samples": callback.checkpointer.state.progress.consumed_samples,
        "verdict": callback.report.proof.verdict,
    }


def test_two_ranks_go_on_each_with_its_own_batches(tmp_path, gang):
    found = gang.values(2, two_ranks, str(tmp_path / "run"), str(tmp_path))
    for each in found:
        assert (each["kind"], each["step"]) == ("DistributedDataParallel", 3)
        assert each["same"]
        assert each["said"]
        control, resumed = each["asked"]
        assert resumed == control[12:]  # three batches of 4 before
        assert each["samples"] == 32 + 2 * 8  # 4 steps end the epoch; the last is filled up with samples of the first
    assert found[0]["asked"] != found[1]["asked"]
    assert {each["verdict"] for each in found} == {"proved"}
