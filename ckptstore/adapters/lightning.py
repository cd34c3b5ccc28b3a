"""Lightning's Trainer, saved and resumed whole.

```python
callback = CheckpointCallback(partial(Checkpointer, "s3://bucket/runs/llama-7b", every_steps=500, keep=Keep(last=3)))
trainer = Trainer(max_epochs=3, callbacks=[callback], enable_checkpointing=False)
trainer.fit(module, loader)  # goes on from the newest checkpoint that is whole, if there is one
```
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckptstore.adapters import missing
from ckptstore.adapters.also import Also, Make, Own, Resume, Told
from ckptstore.adapters.places import LoaderPlace
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import Checkpointer, Progress, ResumeReport, TrainingState, rng

try:
    import lightning
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["Also", "CheckpointCallback"]

REFUSED_STRATEGIES = ("DeepSpeedStrategy", "FSDPStrategy")
"""They keep weights or moments in forms of their own."""


class CheckpointCallback(Callback):  # type: ignore[misc]  # its library is not typed here
    """Saves all of a Trainer's training through a `Checkpointer`, and lets `fit` begin where it was.

    It saves when the Checkpointer's schedule says so, once a batch is wholly over: validated, logged, its schedulers
    stepped; and when `fit` ends. What is saved: the module, optimizers, schedulers, the precision plugin's scaler, the
    progress of all loops, callbacks with `state_dict`, what they and the module add in `on_save_checkpoint`, the
    datamodule's state, `callback_metrics`, the place in the data, random numbers.

    Lightning itself begins an epoch's data anew when it goes on in the middle of it. Here the batches that were trained
    on are left out, and compared; the others are read with the random numbers that they were read with; and the loops
    go on exactly as they stood. `on_train_epoch_start` is not called again for an epoch that goes on.

    A run goes on with the same number of ranks and the same batches. Not carried over: means over an epoch that
    Lightning makes (`log(on_epoch=True)`) are, after a resume in the middle of an epoch, those of its remaining
    batches; what workers of the loader draw themselves is drawn anew; hyper-parameters are the program's, compare them
    with `Also(fingerprints={"hparams": …})`.

    SIGTERM is the Checkpointer's where it handles it, so that the last save is made before `fit` ends.

    Args:
        make: Makes the Checkpointer of a training state: `partial(Checkpointer, url, every_steps=500)`.
        also: What is saved and compared beside.
        resume: How to begin: `lambda checkpointer: checkpointer.resume(source=url, only=("model",))`, say.
        allow_manual_optimization: Under manual optimization nobody knows whether gradients are pending between two
            batches: those are not saved. Say here that each batch ends with a step, or that they may be lost.

    Raises:
        InvalidInputError: An argument is not what it must be.

    If killed: see `Checkpointer.save`.
    """

    def __init__(
        self,
        make: Make,
        *,
        also: Also | None = None,
        resume: Resume = Checkpointer.resume,
        allow_manual_optimization: bool = False,
    ) -> None:
        if not callable(make) or not callable(resume):
            raise InvalidInputError(
                "make and resume must be functions.", hint="Pass partial(Checkpointer, url, every_steps=500)."
            )
        self._make, self._also, self._resume = make, also or Also(), resume
        self._allow_manual = allow_manual_optimization
        self._place: LoaderPlace | None = None
        self._followed: Any = None
        self.checkpointer: Checkpointer | None = None
        """Of the training under way, or of the last one."""
        self.report: ResumeReport | None = None
        """How it began."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what cannot be saved, and look for the loader that is trained on.

        Raises:
            UnsupportedError: Something cannot be saved; it is named.
        """
        _check(trainer, pl_module, allow_manual=self._allow_manual)
        self._trainer, self._module = trainer, pl_module
        self._place = self._followed = self.checkpointer = None
        strategy = trainer.strategy
        lightnings_own: Callable[[Any], Any] = strategy.process_dataloader

        def process(loader: Any) -> Any:
            processed = lightnings_own(loader)
            if trainer.training and self._place is None:  # the first is what is trained on; it is iterated right after
                place = LoaderPlace(generators=self._also.generators)
                place.follow(processed)
                self._place, self._followed = place, processed
                strategy.process_dataloader = lightnings_own
            return processed

        strategy.process_dataloader = process

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  (lightning's signature)
        """Resume, if there is something to resume from.

        Raises:
            InvalidInputError: `fit` was given a checkpoint of Lightning's, and the run has one, too.
            CkptStoreError: See `Checkpointer.resume`.
        """
        loop = trainer.fit_loop
        if loop._combined_loader.flattened != [self._followed] or type(loop._data_fetcher).__name__ == _ITERATES:  # noqa: SLF001  (Lightning's loops have no public names for what they stand on)
            raise UnsupportedError(
                "A training on several loaders, or one whose training_step iterates itself, cannot be followed.",
                hint="Train on one DataLoader, and take a batch in training_step.",
            )
        self._progress = Progress(global_step=trainer.global_step, epoch=trainer.current_epoch)
        self._loops: dict[str, Any] | None = None
        self._is_between = False
        self._ids: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._random: Any = None
        self._saved_step = -1
        before = trainer.global_step
        self.checkpointer = self._make(self._state())
        self._enter(self.checkpointer)
        self.report = self._resume(self.checkpointer)
        if self._told.was_put:
            if before:
                raise InvalidInputError(
                    f"fit was given a checkpoint of step {before}, and the run has a checkpoint, too.",
                    hint="Call trainer.fit without ckpt_path; or save to a run that is empty.",
                )
            self._go_on()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  (as above)
        """Set the loops as they stood when the run was saved, or save."""
        loops, self._loops = self._loops, None
        if loops is not None:
            _load_loops(trainer.fit_loop, loops)
            self._set_random()
            self._random = None
            del self._followed.state_dict, self._followed.load_state_dict
        self._count(batch_idx)
        assert self.checkpointer is not None  # noqa: S101  (training began)
        if self.checkpointer.due():
            self._save()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  (as above)
        """Count a batch as trained on."""
        assert self._place is not None  # noqa: S101  (training began)
        self._ids += self._place.trained()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
        if trainer.global_step > self._progress.global_step:
            self._count(batch_idx + 1)
            ids, losses = self._ids, self._losses
            self._ids, self._losses = [], []
            if losses:
                assert self.checkpointer is not None  # noqa: S101  (the same)
                self.checkpointer.observe(
                    loss=torch.stack(losses).mean(), batch_ids=ids
                )  # a tensor is read when it is wanted

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  (as above)
        """End the pass over the data."""
        assert self._place is not None  # noqa: S101  (training began)
        self._place.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  (as above)
        """Save what is not saved, and wait until it is.

        Raises:
            CkptStoreError: It failed.
        """
        assert self.checkpointer is not None  # noqa: S101  (training began)
        self._count(0)
        self._is_between = True
        if self._saved_step != self._progress.global_step:
            self._save()
        self.checkpointer.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  (as above)
        """Let go of signals; the last commit stays as it is."""
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _state(self) -> TrainingState:
        """Return all of the training that is about to begin."""
        trainer, plugin, place = self._trainer, self._trainer.precision_plugin, self._place
        assert place is not None  # noqa: S101  (the loader was seen)
        silent = [each for each in trainer.callbacks if each is not self and not _says_state(each)]
        self._also.check_callbacks(
            silent, library="lightning", says="Give it state_dict and load_state_dict", given=("log", "log_dict")
        )
        self._told = Told(self._said, self._take)
        scaler = getattr(plugin, "scaler", None)
        has_own = scaler is None and bool(plugin.state_dict())
        return self._also.state(
            model=trainer.model,
            optimizer=_named(trainer.optimizers),
            scheduler=_named([each.scheduler for each in trainer.lr_scheduler_configs]),
            scaler=scaler,
            loader={"data": place, "metrics": Own(self._metrics, self._take_metrics)},
            stateful={"trainer": self._told, **({"precision": plugin} if has_own else {})},
            generators=place.generators,
            progress=self._progress,
            batches={
                "batch_size": getattr(self._followed, "batch_size", None),
                "accumulation": trainer.accumulate_grad_batches,
                "loader": place.facts(),
            },
            precision={"plugin": str(getattr(plugin, "precision", "32-true"))},
        )

    def _enter(self, checkpointer: Checkpointer) -> None:
        """Begin to handle signals; Lightning would end `fit` at SIGTERM before the last save."""
        connector = self._trainer._signal_connector  # noqa: SLF001  (see above)
        environment = self._trainer._accelerator_connector.cluster_environment  # noqa: SLF001  (see above)
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        theirs, before = signal.getsignal(signal.SIGTERM), connector._original_handlers.get(signal.SIGTERM)  # noqa: SLF001  (see above)
        if requeues or before is None or threading.current_thread() is not threading.main_thread():
            checkpointer.__enter__()
            return
        signal.signal(signal.SIGTERM, before)
        checkpointer.__enter__()
        if signal.getsignal(signal.SIGTERM) == before:
            signal.signal(signal.SIGTERM, theirs)

    def _count(self, batch_idx: int) -> None:
        trainer = self._trainer
        self._progress.global_step, self._progress.epoch = trainer.global_step, trainer.current_epoch
        is_automatic = self._module.automatic_optimization
        ends = batch_idx in (0, trainer.num_training_batches)
        self._progress.micro_step = 0 if ends or not is_automatic else batch_idx % trainer.accumulate_grad_batches

    def _save(self) -> None:
        assert self.checkpointer is not None  # noqa: S101  (training began)
        assert self._place is not None  # noqa: S101  (the same)
        self._told.tell(self.checkpointer)
        _, (samples,) = self.checkpointer.meeting.sums([], [self._place.samples])
        self._progress.consumed_samples = samples
        self._saved_step = self._progress.global_step
        self.checkpointer.save()

    def _go_on(self) -> None:
        """Let the loops begin where the run was; they are about to begin with the first epoch."""
        place, loop, said = self._place, self._trainer.fit_loop, self._saved
        assert place is not None  # noqa: S101  (training began)
        self._saved_step = self._progress.global_step
        self._random = rng.capture({**place.generators, **self._also.generators})
        place.then(self._set_random)
        if said["is_between"]:
            _load_loops(loop, said["loops"])
            return
        loop.load_state_dict(said["loops"])
        loop.update_restart_stage()  # in the middle of an epoch
        iter(loop._data_fetcher)  # noqa: SLF001  (see above; the loader began before its place was known)
        self._loops = said["loops"]
        # Else Lightning warns that this loader begins anew. Only until it has begun: Lightning would save it, too.
        self._followed.state_dict, self._followed.load_state_dict = place.state_dict, place.load_state_dict

    def _set_random(self) -> None:
        place = self._place
        assert place is not None  # noqa: S101  (training began)
        if self._random is not None:
            rng.restore(self._random, {**place.generators, **self._also.generators})

    def _said(self) -> dict[str, Any]:
        """Return what the Trainer and all that hang on it know of the run."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)
        states = {each.state_key: each.state_dict() for each in trainer.callbacks if each is not self}
        data = trainer.datamodule
        return {
            "loops": loops,
            "is_between": self._is_between,
            "accumulation": trainer.accumulate_grad_batches,
            "callbacks": {key: state for key, state in states.items() if state},
            "datamodule": data.state_dict() if data is not None else {},
            "added": self._added(),
        }

    def _take(self, said: dict[str, Any]) -> None:
        trainer = self._trainer
        self._saved = said
        here = {each.state_key: each for each in trainer.callbacks if each is not self}
        for key, state in said["callbacks"].items():
            if key in here:
                here[key].load_state_dict(state)
            elif not key.startswith(tuple(self._also.stateless)):
                raise IncompatibleStateError(
                    f"The run was saved with the callback {key}, which the Trainer does not have.",
                    hint="Make it as it was, or pass Also(stateless=['Its class']) to let go of its state.",
                    callback=key,
                )
        if said["datamodule"]:
            if trainer.datamodule is None:
                raise IncompatibleStateError(
                    "The run was saved with the state of a datamodule, and there is none.", hint="Pass fit one."
                )
            trainer.datamodule.load_state_dict(said["datamodule"])
        trainer.accumulate_grad_batches = said["accumulation"]
        checkpoint = {**self._plain(), **said["added"]}
        for each, name in self._hooks("on_load_checkpoint"):
            del name
            _call(each, "on_load_checkpoint", trainer, self._module, checkpoint)

    def _added(self) -> dict[str, Any]:
        """Return what hooks add to a checkpoint.

        Raises:
            UnsupportedError: One changes what is not its own; it is named.
        """
        checkpoint = self._plain()
        for each, name in self._hooks("on_save_checkpoint"):
            _call(each, "on_save_checkpoint", self._trainer, self._module, checkpoint)
            if {key: checkpoint.get(key) for key in self._plain()} != self._plain():
                raise UnsupportedError(
                    f"{name}.on_save_checkpoint changes what others have put into the checkpoint.",
                    hint="Let it add keys of its own, or keep its state in state_dict.",
                    name=name,
                )
        return {key: value for key, value in checkpoint.items() if key not in self._plain()}

    def _plain(self) -> dict[str, Any]:
        """Return what hooks find in a checkpoint: tensors are saved elsewhere."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": {},
            "callbacks": {},
            "loops": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    def _hooks(self, hook: str) -> Iterator[tuple[Any, str]]:
        """Yield callbacks, datamodule and module that have a hook, with their names."""
        for each in self._trainer.callbacks:
            if each is not self and is_overridden(hook, each, Callback):
                yield each, type(each).__name__
        if self._trainer.datamodule is not None and is_overridden(hook, self._trainer.datamodule, LightningDataModule):
            yield self._trainer.datamodule, type(self._trainer.datamodule).__name__
        if is_overridden(hook, self._module, LightningModule):
            yield self._module, type(self._module).__name__

    def _metrics(self) -> dict[str, Any]:
        found = self._trainer._logger_connector._callback_metrics  # noqa: SLF001  (see above; the public one computes)
        return {name: each.detach().to("cpu", copy=True) for name, each in found.items()}

    def _take_metrics(self, said: Mapping[str, torch.Tensor]) -> None:
        device = self._trainer.strategy.root_device
        found = self._trainer._logger_connector._callback_metrics  # noqa: SLF001  (see above)
        found.update({name: each.to(device) for name, each in said.items()})


_ITERATES = "_DataLoaderIterDataFetcher"


def _check(trainer: Any, module: Any, *, allow_manual: bool) -> None:
    strategy = type(trainer.strategy).__name__
    if strategy in REFUSED_STRATEGIES:
        raise UnsupportedError(
            f"Under {strategy} weights or moments are kept in a form of its own.",
            hint="Use ModelParallelStrategy (FSDP2), DDPStrategy, or Lightning's own checkpoints.",
        )
    if not module.automatic_optimization and not allow_manual:
        raise UnsupportedError(
            f"{type(module).__name__} optimizes manually: nobody knows whether gradients are pending between batches.",
            hint="If each batch ends with a step, pass allow_manual_optimization=True.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise UnsupportedError(
            "Loaders that are made anew while fit goes on cannot be followed.",
            hint="Set reload_dataloaders_every_n_epochs=0.",
        )


def _says_state(callback: Any) -> bool:
    return any(is_overridden(name, callback, Callback) for name in ("state_dict", "on_save_checkpoint"))


def _call(each: Any, hook: str, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
    given = (trainer, module, checkpoint) if isinstance(each, Callback) else (checkpoint,)
    getattr(each, hook)(*given)


def _load_loops(loop: Any, state: Mapping[str, Any]) -> None:
    """Set the progress of a loop and of all within it, as if they had never stopped."""
    loop.load_state_dict(dict(state))
    within = [loop]
    while within:
        each = within.pop()
        each.on_iteration_done()  # it is not restarting, it goes on
        within += [inner for inner in vars(each).values() if hasattr(inner, "on_iteration_done")]


def _named(found: list[Any]) -> Any:
    """Return one alone, several by their place, or None."""
    if not found:
        return None
    return found[0] if len(found) == 1 else {str(index): each for index, each in enumerate(found)}
