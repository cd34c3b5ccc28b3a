"""Loops that train with Accelerate, saved and resumed whole.

```python
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
run = Prepared(accelerator, loader)
with Checkpointer("s3://bucket/runs/llama-7b", run.state, every_steps=500) as checkpointer:
    run.resume(checkpointer)
    while run.progress.epoch < epochs:
        for batch in loader:  # goes on where it was
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            ids = run.advance()  # now this batch counts
            checkpointer.observe(loss=loss.detach(), batch_ids=ids)
            if checkpointer.due():
                checkpointer.save()
```
"""

from __future__ import annotations

from typing import Any

from ckptstore.adapters import missing
from ckptstore.adapters.also import Also, Own, Resume, precision_of, registered
from ckptstore.adapters.places import LoaderPlace
from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.training import Checkpointer, Progress, ResumeReport, TrainingState, rng

try:
    from accelerate.data_loader import DataLoaderShard
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", error) from error

__all__ = ["Also", "Prepared"]

REFUSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Ways of Accelerate to distribute a training that keep its state to themselves."""


class Prepared:
    """All that an `Accelerator` has prepared, as a training state, with the place of one loader.

    Models, optimizers and schedulers are those that `accelerator.prepare` returned, without their wrappers; objects of
    `accelerator.register_for_checkpointing` are saved too, which must hold the same on all ranks, and how far gradients
    are accumulated. A scheduler that was
    not prepared belongs into `also`. Other loaders, for evaluation say, begin at their beginning.

    The loader reads one batch ahead. After a resume it gives out the batches that were not trained on, read with the
    random numbers that they were read with; what its workers draw themselves is drawn anew. A run goes on with the same
    number of ranks and the same batches.

    Args:
        accelerator: When it has prepared everything.
        loader: What is trained on, as `prepare` returned it.
        also: What is saved and compared beside.

    Raises:
        UnsupportedError: Something cannot be saved, or its place cannot be found; it is named.
        InvalidInputError: There is no model.
    """

    def __init__(self, accelerator: Any, loader: Any, *, also: Also | None = None) -> None:
        _check(accelerator, loader)
        self._accelerator, self._loader, self._also = accelerator, loader, also or Also()
        self._place = LoaderPlace(generators=self._also.generators)
        self._place.follow(loader)
        self._ended_in: int | None = None
        self._random: Any = None
        self.progress = Progress()
        """The counters; `advance` moves them on."""
        self.state: TrainingState = self._also.state(
            model=_named(accelerator._models),  # noqa: SLF001  (Accelerate has no public names for these)
            optimizer=_named([each.optimizer for each in accelerator._optimizers]),  # noqa: SLF001  (see above)
            scheduler=_named([each.scheduler for each in accelerator._schedulers]),  # noqa: SLF001  (see above)
            scaler=accelerator.scaler,
            loader={"data": self._place},
            stateful={"accelerator": Own(self._counts, self._take_counts), **registered(accelerator)},
            generators=self._place.generators,
            progress=self.progress,
            batches={
                "samples": loader.total_batch_size,
                "accumulation": accelerator.gradient_accumulation_steps,
                "loader": self._place.facts(),
            },
            precision=precision_of(accelerator),
        )
        """What a `Checkpointer` keeps."""

    def resume(self, checkpointer: Checkpointer, *, resume: Resume = Checkpointer.resume) -> ResumeReport:
        """Go on where the run was, and let the loader do so too. Collective, before the first batch.

        Args:
            checkpointer: Made with `state`.
            resume: How: `lambda checkpointer: checkpointer.resume(step=500)`, say.

        Raises:
            InvalidInputError: The Checkpointer keeps another state.
            CkptStoreError: See `Checkpointer.resume`.
        """
        if checkpointer.state is not self.state:
            raise InvalidInputError(
                "This Checkpointer keeps another state.", hint="Make it with Checkpointer(url, prepared.state)."
            )
        report = resume(checkpointer)
        self._random = rng.capture({**self._place.generators, **self._also.generators})
        self._place.then(self._set_random)
        return report

    def advance(self) -> list[Any]:
        """Count a batch as trained on, after its backward pass and the optimizer's step; return its samples' indices.

        The last batch of the loader ends the epoch. Every rank calls it, once for each batch.

        Raises:
            InvalidInputError: No batch was given out that is not counted already.
        """
        ids = self._place.trained()
        progress, loader = self.progress, self._loader
        if self._accelerator.sync_gradients:
            progress.global_step, progress.micro_step = progress.global_step + 1, 0
        else:
            progress.micro_step += 1
        samples = loader.total_batch_size
        if self._place.is_over:
            if loader.remainder > 0:
                samples = loader.remainder
            progress.epoch += 1
            self._ended_in = loader.iteration
            self._place.end()
        progress.consumed_samples += samples
        return ids

    def _set_random(self) -> None:
        found, self._random = self._random, None
        if found is not None:
            rng.restore(found, {**self._place.generators, **self._also.generators})

    def _counts(self) -> dict[str, int]:
        iteration = self._loader.iteration
        is_behind = self._ended_in == iteration  # the loader counts a pass when it is asked for one batch more
        return {"step": self._accelerator.step, "iteration": iteration + is_behind}

    def _take_counts(self, said: dict[str, int]) -> None:
        self._accelerator.step = said["step"]
        self._loader.set_epoch(said["iteration"])
        self._ended_in = None


def _check(accelerator: Any, loader: Any) -> None:
    if accelerator.distributed_type in [DistributedType(name) for name in REFUSED]:
        raise UnsupportedError(
            f"Accelerate distributes this training by {accelerator.distributed_type}, which keeps its state to itself.",
            hint="Train with DDP or FSDP2 (fsdp_version 2), or save with accelerator.save_state.",
        )
    if type(loader) is not DataLoaderShard:
        raise UnsupportedError(
            f"A {type(loader).__name__} cannot be followed: it reads on one rank for all, or was not prepared.",
            hint="Pass the loader that accelerator.prepare returned, of a dataset with __len__, and "
            "DataLoaderConfiguration(dispatch_batches=False).",
        )
    hooks = {**accelerator._save_model_state_pre_hook, **accelerator._load_model_state_pre_hook}  # noqa: SLF001  (see above)
    if hooks:
        names = sorted(getattr(each, "__qualname__", repr(each)) for each in hooks.values())
        raise UnsupportedError(
            f"The accelerator has hooks that change what is saved: {', '.join(names)[:200]}. They would not run.",
            hint="Leave out register_save_state_pre_hook and register_load_state_pre_hook; what they save belongs into "
            "Also(stateful=...).",
        )
    if not accelerator._models:  # noqa: SLF001  (see above)
        raise InvalidInputError(
            "The accelerator has prepared no model.", hint="Call accelerator.prepare(model, optimizer, loader) first."
        )


def _named(found: list[Any]) -> Any:
    """Return one alone, or several by their place."""
    return found[0] if len(found) == 1 else {str(index): each for index, each in enumerate(found)}
