"""transformers' Trainer, saved and resumed whole.

```python
callback = CheckpointCallback(partial(Checkpointer, "s3://bucket/runs/llama-7b", every_steps=500, keep=Keep(last=3)))
trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[callback])
callback.attach(trainer)
trainer.train()  # goes on from the newest checkpoint that is whole, if there is one
```
"""

from __future__ import annotations

import dataclasses
import numbers
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ckptstore.adapters import missing
from ckptstore.adapters.also import Also, Make, Own, Resume, Told, precision_of, registered
from ckptstore.adapters.places import LoaderPlace
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import Checkpointer, Progress, ResumeReport, TrainingState, rng

try:
    import transformers
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as error:
    raise missing("huggingface", error) from error

__all__ = ["Also", "CheckpointCallback"]

STANDS_ON = ("_run_epoch", "_load_rng_state", "_maybe_log_save_evaluate")
"""Methods of a Trainer that are called through this module while it is attached."""
COUNTS = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"),
    *("_initial_global_step", "_initial_num_input_tokens_seen"),
)
"""What a Trainer adds up between two lines of its log, and where it says that it began."""
CONFIGURED = {
    *("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
    *("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params"),
    "stateful_callbacks",
}
"""Fields of a TrainerState that follow from the program; all others are saved. Callbacks are, on their own."""
OURS = "ckptstore"
"""Stands where a Trainer expects the folder of a checkpoint."""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # its library is not typed here
    """Saves all of a Trainer's training through a `Checkpointer`, and lets `train()` begin where it was.

    It saves when the Checkpointer's schedule says so, when the Trainer saves (`save_strategy`; the Trainer still writes
    its own folder then, so `"no"` writes none), and when training ends; each time after the Trainer has logged and
    evaluated. What is saved: the model, optimizer, scheduler, scaler, the TrainerState with its log, callbacks that are
    an ExportableState or have `state_dict`, losses that are not logged yet, the place in the data, random numbers.

    The Trainer itself would skip the batches of an epoch that are trained on, with a sampler that follows from the seed
    of this process and random numbers set after the first batch was read. Here the sampler's seed is restored, the
    batches that are skipped are compared with those that were trained on, and each batch is read with the random
    numbers that it was read with. `TrainingArguments.seed` and `data_seed` of the resumed process do not matter.

    A run goes on with the same number of ranks, batch size and accumulation. Not carried over: the flags of
    TrainerControl, which the Trainer sets anew at each step; arguments of callbacks, which are the program's; what
    workers of the loader draw themselves; a folder in `best_model_checkpoint` that is not here.

    Args:
        make: Makes the Checkpointer of a training state: `partial(Checkpointer, url, every_steps=500)`.
        also: What is saved and compared beside.
        resume: How to begin: `lambda checkpointer: checkpointer.resume(source=url, only=("model",))`, say.

    Raises:
        InvalidInputError: An argument is not what it must be.

    If killed: see `Checkpointer.save`.
    """

    def __init__(self, make: Make, *, also: Also | None = None, resume: Resume = Checkpointer.resume) -> None:
        if not callable(make) or not callable(resume):
            raise InvalidInputError(
                "make and resume must be functions.", hint="Pass partial(Checkpointer, url, every_steps=500)."
            )
        self._make, self._also, self._resume = make, also or Also(), resume
        self._trainer: Any = None
        self.checkpointer: Checkpointer | None = None
        """Of the training under way, or of the last one."""
        self.report: ResumeReport | None = None
        """How it began."""

    def attach(self, trainer: Any) -> None:
        """Let a Trainer begin where the run was, and save through this callback, which is added if it was not.

        Raises:
            InvalidInputError: It is attached already.
            UnsupportedError: This Trainer cannot be followed: what stands in the way is named.
        """
        if self._trainer is not None:
            raise InvalidInputError("This callback has a Trainer already.", hint="Make a callback for each Trainer.")
        _check_names(trainer, STANDS_ON)
        _check_arguments(trainer)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        ways: dict[str, Callable[..., Any]] = {
            "_run_epoch": self._run_epoch,
            "_load_rng_state": self._load_random,
            "_maybe_log_save_evaluate": self._after,
        }
        for name, way in ways.items():
            setattr(trainer, name, partial(way, getattr(trainer, name)))
        handler = trainer.callback_handler
        handler.on_epoch_begin = partial(self._begin_epoch, handler.on_epoch_begin)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002  (transformers' signature)
        """Resume, if there is something to resume from.

        Raises:
            InvalidInputError: The Trainer was given a checkpoint of its own, and the run has one, too.
            CkptStoreError: See `Checkpointer.resume`.
        """
        if self._trainer is None:
            raise InvalidInputError(
                "The callback does not know its Trainer.", hint="Call callback.attach(trainer) before trainer.train()."
            )
        _check_names(self._trainer, COUNTS)
        self._progress = Progress(global_step=state.global_step)
        self._epoch, self._batches_in_epoch, self._skipped_epochs = 0, 0, 0
        self._has_stepped, self._was_saved_by_trainer, self._saved_step = False, False, -1
        self._ids: list[Any] = []
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        self._random: Any = None
        self._resumed_epoch: int | None = None
        before = state.global_step
        training = self._state()
        self.checkpointer = self._make(training)
        self.checkpointer.__enter__()
        try:
            self.report = self._resume(self.checkpointer)
            if self._told.was_put:
                self._go_on(control, before=before)
            self._loss_before = self._trainer._tr_loss.detach().clone()  # noqa: SLF001  (see COUNTS)
        except BaseException:
            self._leave()
            raise

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002  (as above)
        """Count a batch whose gradients are accumulated."""
        self._ids += self._place.trained()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002  (as above)
        """Count the last batch of a step."""
        self._ids += self._place.trained()
        self._has_stepped = True
        self._progress.global_step = state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002  (as above)
        """Keep what was measured, for the save of this step."""
        numbers_only = {name: float(value) for name, value in (given.get("metrics") or {}).items() if _is_number(value)}
        self._metrics = (state.global_step, numbers_only)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002  (as above)
        """Note that the Trainer saves."""
        self._was_saved_by_trainer = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002  (as above)
        """Wait until the last save has ended.

        Raises:
            CkptStoreError: It failed.
        """
        assert self.checkpointer is not None  # noqa: S101  (training began)
        self.checkpointer.__exit__(None, None, None)

    def _state(self) -> TrainingState:
        """Return all of the training that is about to begin."""
        trainer = self._trainer
        self._place = LoaderPlace(generators=self._also.generators, leaves_out=False)
        self._place.follow(trainer.callback_handler.train_dataloader)
        self._told = Told(self._said, self._take)
        callbacks = [each for each in trainer.callback_handler.callbacks if each is not self and not _has_state(each)]
        self._also.check_callbacks(
            callbacks, library="transformers", says="Let it inherit from transformers.trainer_callback.ExportableState"
        )
        return self._also.state(
            model=trainer.model_wrapped,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            loader={"data": self._place, "losses": Own(self._losses, self._take_losses)},
            stateful={"trainer": self._told, **registered(trainer.accelerator)},
            generators=self._place.generators,
            progress=self._progress,
            batches={
                "samples_in_step": trainer.get_total_train_batch_size(trainer.args),
                "accumulation": trainer.args.gradient_accumulation_steps,
                "loader": self._place.facts(),
            },
            precision=precision_of(trainer.accelerator),
        )

    def _go_on(self, control: Any, *, before: int) -> None:
        """Let the Trainer begin where the run was: it is about to begin with its first epoch."""
        trainer = self._trainer
        if before:
            raise InvalidInputError(
                f"The Trainer was resumed from a folder at step {before}, and the run has a checkpoint, too.",
                hint="Call trainer.train() without resume_from_checkpoint; or save to a run that is empty.",
            )
        trainer._initial_global_step = trainer.state.global_step  # noqa: SLF001  (see COUNTS)
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen  # noqa: SLF001  (the same)
        self._saved_step = self._progress.global_step
        self._resumed_epoch = self._skipped_epochs = self._progress.epoch
        self._random = rng.capture({**self._place.generators, **self._also.generators})
        self._place.then(self._set_random)
        if trainer.state.global_step >= trainer.state.max_steps:
            control.should_training_stop = True
            self._skipped_epochs = sys.maxsize

    def _begin_epoch(self, trainers_own: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Tell callbacks that an epoch begins, but not of one that is over."""
        if self._skipped_epochs > 0:
            self._skipped_epochs -= 1
            return control
        return trainers_own(args, state, control)

    def _run_epoch(self, trainers_own: Callable[..., Any], **given: Any) -> None:
        """Run an epoch as the Trainer does; of those that are over none, and of the one that is not the rest."""
        if self._trainer.control.should_training_stop:
            return
        epoch, first = given["epoch"], self._resumed_epoch
        if first is not None and epoch < first:
            return
        self._epoch, self._batches_in_epoch = epoch, given["steps_in_epoch"]
        self._progress.epoch = epoch
        if epoch == first:
            given |= {
                "resume_from_checkpoint": OURS,
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": self._place.batches,
            }
        elif epoch == given["epochs_trained"] and given["steps_trained_in_current_epoch"]:
            self._place.leave_out(given["steps_trained_in_current_epoch"])  # the Trainer was resumed from a folder
        try:
            trainers_own(**given)
        except BaseException:
            self._leave()
            raise

    def _load_random(self, trainers_own: Callable[..., Any], checkpoint: Any) -> None:
        """Set the random numbers of the save, unless the followed loader has done so when it was right."""
        if checkpoint == OURS:
            self._place.settle()
            self._set_random()
        else:
            trainers_own(checkpoint)

    def _set_random(self) -> None:
        found, self._random = self._random, None
        if found is not None:
            rng.restore(found, {**self._place.generators, **self._also.generators})

    def _after(self, trainers_own: Callable[..., Any], *args: Any, **given: Any) -> None:
        """Log, evaluate and save as the Trainer does, and then save. It comes after a step, and after an epoch."""
        was_step, self._has_stepped = self._has_stepped, False
        if was_step:
            self._observe(given["grad_norm"] if "grad_norm" in given else args[1])
        trainers_own(*args, **given)
        self._loss_before = self._trainer._tr_loss.detach().clone()  # noqa: SLF001  (see COUNTS)
        control = self._trainer.control
        is_epoch_over = self._place.batches in (0, self._batches_in_epoch) or control.should_epoch_stop
        if is_epoch_over and was_step:
            return  # the Trainer comes again, when it has logged and evaluated what belongs to the epoch
        if is_epoch_over:
            self._place.end()
            self._progress.epoch = self._epoch + 1
        self._save_if_due(is_last=control.should_training_stop)

    def _observe(self, grad_norm: Any) -> None:
        assert self.checkpointer is not None  # noqa: S101  (training began)
        trainer, ids = self._trainer, self._ids
        self._ids = []
        loss = trainer._tr_loss.detach() - self._loss_before  # noqa: SLF001  (see COUNTS)
        self.checkpointer.observe(loss=loss, grad_norm=grad_norm, batch_ids=ids)

    def _save_if_due(self, *, is_last: bool) -> None:
        assert self.checkpointer is not None  # noqa: S101  (training began)
        step = self._progress.global_step
        is_due = self.checkpointer.due()
        asked, self._was_saved_by_trainer = self._was_saved_by_trainer, False
        if not is_due and not ((asked or is_last) and step != self._saved_step):
            return
        self._trainer.store_flos()
        self._told.tell(self.checkpointer)
        _, (samples,) = self.checkpointer.meeting.sums([], [self._place.samples])
        self._progress.consumed_samples = samples
        self._saved_step = step
        at, metrics = self._metrics
        self.checkpointer.save(metrics=metrics if at == step else None)

    def _leave(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.__exit__(*sys.exc_info())

    def _said(self) -> dict[str, Any]:
        """Return what the Trainer and its callbacks know of the run."""
        trainer = self._trainer
        names = [each.name for each in dataclasses.fields(trainer.state) if each.name not in CONFIGURED]
        return {
            "state": {name: getattr(trainer.state, name) for name in names},
            "callbacks": [[type(each).__name__, _state_of(each)] for each in self._callbacks()],
        }

    def _take(self, said: Mapping[str, Any]) -> None:
        trainer = self._trainer
        here = self._callbacks()
        for kind, state in said["callbacks"]:
            each = next((each for each in here if type(each).__name__ == kind), None)
            if each is not None:
                here.remove(each)
                _put_state(each, state)
            elif kind not in self._also.stateless:
                raise IncompatibleStateError(
                    f"The run was saved with a {kind}, which is not among the Trainer's callbacks.",
                    hint=f"Add it, or pass Also(stateless=[{kind!r}]) to let go of its state.",
                    callback=kind,
                )
        for name, value in said["state"].items():
            setattr(trainer.state, name, value)
        best = trainer.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            trainer.state.best_model_checkpoint = None

    def _callbacks(self) -> list[Any]:
        """Return those that have a state."""
        return [each for each in self._trainer.callback_handler.callbacks if each is not self and _has_state(each)]

    def _losses(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "since_logged": trainer._tr_loss.detach().to("cpu", copy=True),  # noqa: SLF001  (see COUNTS)
            "logged_step": trainer._globalstep_last_logged,  # noqa: SLF001  (the same)
        }

    def _take_losses(self, said: Mapping[str, Any]) -> None:
        trainer, loss = self._trainer, said["since_logged"]
        trainer._tr_loss = loss.to(trainer.args.device)  # noqa: SLF001  (see COUNTS)
        trainer._globalstep_last_logged = said["logged_step"]  # noqa: SLF001  (the same)
        trainer._total_loss_scalar = -loss.item()  # noqa: SLF001  (`train_loss` is the mean over the steps of this process)


def _check_names(trainer: Any, names: tuple[str, ...]) -> None:
    if lacking := [name for name in names if not hasattr(trainer, name)]:
        raise UnsupportedError(
            f"{type(trainer).__name__} of transformers {transformers.__version__} has no {', '.join(lacking)}.",
            hint="Run: pip install 'ckptstore[huggingface]', which names the releases that are known to work.",
        )


def _check_arguments(trainer: Any) -> None:
    args = trainer.args
    refused = {
        "ignore_data_skip": "batches would come twice in the epoch that goes on",
        "auto_find_batch_size": "the place in the data means something else with another batch size",
        "load_best_model_at_end": "the best model's folder is on the machine that wrote it",
        "push_to_hub": "what is pushed is the Trainer's own folder",
    }
    if args.dataloader_persistent_workers and args.dataloader_num_workers:
        refused["dataloader_persistent_workers"] = "workers that start anew draw a number more than those that stay"
    for name in ("load_best_model_at_end", "push_to_hub"):
        if args.save_strategy != "no":
            refused.pop(name)
    for name, why in refused.items():
        if getattr(args, name):
            raise UnsupportedError(f"TrainingArguments({name}=True): {why}.", hint=f"Set {name}=False.", argument=name)
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise UnsupportedError(
            "DeepSpeed keeps weights and moments to itself.",
            hint="Train with DDP or FSDP2 (fsdp_version 2), or save with the Trainer's own checkpoints.",
        )


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState) or all(
        callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _state_of(callback: Any) -> Any:
    return callback.state()["attributes"] if isinstance(callback, ExportableState) else callback.state_dict()


def _put_state(callback: Any, state: Any) -> None:
    if not isinstance(callback, ExportableState):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
