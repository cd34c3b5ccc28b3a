"""What a training holds beside what its library knows of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.format.value_types import ValueTypes
from ckptstore.training import Checkpointer, Migrator, Progress, ResumeReport, TrainingState

Make = Callable[[TrainingState], Checkpointer]
"""Makes what saves and resumes a state: `functools.partial(Checkpointer, url, every_steps=500)`, say."""

Resume = Callable[[Checkpointer], ResumeReport]
"""How a run is resumed: `Checkpointer.resume`, or a function that calls it with arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Also:
    """What is saved and compared beside what the library holds. Each is as in `ckptstore.training.TrainingState`.

    Args:
        stateful: Anything with `state_dict`, by name.
        extras: A dict of values of your own.
        generators: Of random numbers, by name: those of the dataset and of the code that makes batches, too.
        fingerprints: What must be the same when the run goes on.
        precision, parallelism, migrators, types: See there.
        stateless: Names of classes of callbacks that hold nothing worth saving, though they hold something.
    """

    stateful: Mapping[str, Any] = field(default_factory=dict)
    extras: MutableMapping[str, Any] | None = None
    generators: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] | None = None
    parallelism: Mapping[str, int] | None = None
    migrators: Sequence[Migrator] = ()
    types: ValueTypes | None = None
    stateless: Collection[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stateless, str) or not all(isinstance(each, str) for each in self.stateless):
            raise InvalidInputError(
                f"stateless={self.stateless!r:.80} is no list of names of classes.",
                hint="Pass stateless=['MyCallback'], for instance.",
            )

    def state(  # noqa: PLR0913  (of few callers: what a library's training is made of)
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        loader: Mapping[str, Any],
        stateful: Mapping[str, Any],
        generators: Mapping[str, Any],
        progress: Progress,
        batches: Mapping[str, Any],
        precision: Mapping[str, Any],
    ) -> TrainingState:
        """Return all of a training.

        Args:
            model: The library's, as all that follow.
            optimizer: See there.
            scheduler: See there.
            scaler: See there.
            loader: Of this rank, by name.
            stateful: Of all ranks, by name.
            progress: See there.
            precision: See there.
            generators: Those of the loaders.
            batches: What must be the same, so that a place in the data means the same; it is a fingerprint.

        Raises:
            InvalidInputError: Two things have one name.
            UnsupportedError: Something cannot be saved; it is named.
        """
        if twice := sorted({*stateful, "batches"} & {*self.stateful, *self.fingerprints}):
            raise InvalidInputError(f"Also(...) names {twice[0]}, which the adapter names itself.", hint="Rename it.")
        return TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            loader=loader,
            progress=progress,
            stateful={**stateful, **self.stateful},
            extras=self.extras,
            generators={**generators, **self.generators},
            fingerprints={"batches": dict(batches), **self.fingerprints},
            precision={**precision, **(self.precision or {})},
            parallelism=self.parallelism,
            migrators=self.migrators,
            types=self.types,
        )

    def check_callbacks(
        self, callbacks: Iterable[object], *, library: str, says: str, given: Collection[str] = ()
    ) -> None:
        """Refuse callbacks that may hold a state which nobody can ask them for.

        Args:
            callbacks: Those of which the library does not know a state.
            library: Its own callbacks without a state have none.
            says: How a callback tells its state there.
            given: What the library itself gives to each.

        Raises:
            UnsupportedError: There is one; it is named.
        """
        for each in callbacks:
            kind = type(each)
            is_known = kind.__module__.partition(".")[0] == library or kind.__name__ in self.stateless
            held = sorted({*getattr(each, "__dict__", ())} - {*given})
            if held and not is_known:
                raise UnsupportedError(
                    f"The callback {kind.__name__} holds {', '.join(held)[:200]} and says nothing of a state: after a "
                    "resume it would begin anew.",
                    hint=f"{says}; or pass Also(stateless=[{kind.__name__!r}]) if that is no harm.",
                    callback=kind.__name__,
                )


@dataclass
class Told:
    """A state that rank 0 says for all: what ranks hold of it may differ in ways that do not matter, such as times.

    Args:
        now: Returns the state of this rank.
        put: Takes one.
    """

    now: Callable[[], Any]
    put: Callable[[Any], object]
    was_put: bool = False
    _said: Any = None

    def tell(self, checkpointer: Checkpointer) -> None:
        """Let all ranks hold what rank 0 holds now. Collective, before each save."""
        self._said = checkpointer.meeting.led("told", self.now)

    def state_dict(self) -> Any:
        """Return what was told last, or what there is now."""
        return self.now() if self._said is None else self._said

    def load_state_dict(self, state: Any) -> None:
        """Take a state."""
        self.put(state)
        self.was_put = True


@dataclass(frozen=True)
class Own:
    """A state that each rank has for itself.

    Args:
        now: Returns it.
        put: Takes one.
    """

    now: Callable[[], Any]
    put: Callable[[Any], object]

    def state_dict(self) -> Any:
        """Return it."""
        return self.now()

    def load_state_dict(self, state: Any) -> None:
        """Take one."""
        self.put(state)


def registered(accelerator: Any) -> dict[str, Any]:
    """Return what was registered with an accelerator to be saved, by name."""
    found = accelerator._custom_objects  # noqa: SLF001  (Accelerate has no public name for it)
    return {f"registered-{index}": each for index, each in enumerate(found)}


def precision_of(accelerator: Any) -> dict[str, Any]:
    """Return in what Accelerate lets a training compute."""
    said = str(getattr(accelerator, "mixed_precision", "no"))
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return {"mixed_precision": said, **({"autocast": dtypes[said]} if said in dtypes else {})}
