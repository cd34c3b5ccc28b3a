"""`TrainingState`: all that a run needs to go on, gathered without changing any of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.value_types import ValueTypes
from ckptstore.format.values import encode_value
from ckptstore.training import gradients, models, optimizers, rng
from ckptstore.training.checks import Moments, Standing
from ckptstore.training.fingerprints import Fingerprint, fingerprint
from ckptstore.training.loaders import PerRank, source_of
from ckptstore.training.meeting import digest_of
from ckptstore.training.migrate import Migrator
from ckptstore.training.optimizer_fit import class_of
from ckptstore.training.parts import (
    ExtrasPart,
    ModelPart,
    OptimizerPart,
    Part,
    ProgressPart,
    Stateful,
    StatefulPart,
    Tensors,
    by_name,
)
from ckptstore.training.precision import recorded
from ckptstore.training.progress import Progress
from ckptstore.training.sampler import ElasticSampler
from ckptstore.training.topology import topology
from ckptstore.training.values import value_types
from ckptstore.units import MIB
from storage_writers import TypedValue

VALUES = "values"
RNG, PENDING, STANDING = "rng", "pending", "standing"
"""What each rank holds for itself, beside its loaders; `pending` says which gradients it has."""
GRADIENTS = "gradients"
"""Their tensors."""
DIGESTED_BYTES = 4 * MIB
"""So much of each optimizer's moments is told apart by its bytes, when a resume is checked."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One rank's part of a checkpoint.

    Args:
        tensors: By key; the training's own, not copied.
        values: By component, of what all ranks hold alike.
        mergeable: Those of them that may differ by rank, not encoded.
        local: By component, of this rank alone.
    """

    tensors: Tensors
    values: Mapping[str, TypedValue]
    mergeable: Mapping[str, Any]
    local: Mapping[str, TypedValue]

    @property
    def digests(self) -> dict[str, str]:
        """What tells whether ranks hold the same values."""
        return {name: hexdigest(value.body) for name, value in self.values.items()}

    def state_dict(self, rank: int, *, own: Collection[str] = (), without: Collection[str] = ()) -> dict[str, Any]:
        """Return what this rank gives to DCP.

        Args:
            rank: In the group that saves.
            own: Components of which this rank, which is not 0, stores what it holds.
            without: Tensors that another rank gives.
        """
        state: dict[str, Any] = nested({key: each for key, each in self.tensors.items() if key not in without})
        for name, value in self.values.items():
            if rank == 0:
                state[f"{VALUES}/{name}"] = value
            elif name in own:
                state[local_key(rank, name)] = value
        for name, value in self.local.items():
            state[local_key(rank, name)] = value
        return state


@dataclass(frozen=True, slots=True)
class Facts:
    """What a state is made of.

    Args:
        values: As JSON.
        digest: Tells them apart.
    """

    values: Mapping[str, Any]
    digest: str


def nested(tensors: Tensors) -> dict[str, Any]:
    """Return tensors under their components: DCP takes time for each entry of a state dict, not for what is in it."""
    state: dict[str, Any] = {}
    for key, tensor in tensors.items():
        component, _, rest = key.partition(".")
        state.setdefault(component, {})[rest] = tensor
    return state


def local_key(rank: int, name: str) -> str:
    """Return the key of what one rank holds for itself."""
    return f"ranks/{rank:05}/{name}"


class TrainingState:
    """All that a run needs to go on. Holds references only; saving and loading change nothing but what was saved.

    Where a component may be several, pass them by name: `optimizer={"actor": …, "critic": …}`.

    Args:
        model: Modules: plain, DDP, FSDP2, compiled, wrapped.
        optimizer: Of their parameters.
        scheduler: Of learning rates; anything with `state_dict`.
        scaler: A GradScaler.
        sampler: What says the order of samples and how far it was trained: an `ElasticSampler`, or anything whose
            state is the same on all ranks.
        loader: What says so for its own rank: a `PerRank`, or a loader with `state_dict`.
        progress: The counters; the loop moves them on.
        fingerprints: What must be the same when the run goes on, by name: objects, files, folders, digests. Rank 0's
            count; the other ranks read no file for them.
        ema: Averages of weights, or anything with `state_dict`.
        stateful: Anything else with `state_dict`, by name.
        generators: Of random numbers, by name, beside Python's, NumPy's and torch's own.
        extras: A dict of values of your own; what was saved replaces all that it holds.
        precision: What torch cannot be asked, e.g. `{"autocast": torch.bfloat16}`.
        parallelism: Degrees by name (dp, tp, pp, zero, fsdp), if they are not to be read from the modules.
        gradient_reduction: How gradients that are not reduced yet would be: `mean` or `sum` over the ranks. Without it
            a run that was saved between micro-steps goes on with the same number of ranks only.
        migrators: What can turn a saved state into one whose tensors have other shapes or dtypes, or are more.
        types: What typed values may hold; start from `value_types()`.

    Raises:
        InvalidInputError: An argument is not what it must be.
        UnsupportedError: A module, an optimizer or a loader cannot be saved; it is named.
    """

    def __init__(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        scaler: Any = None,
        sampler: Stateful | Mapping[str, Stateful] | None = None,
        loader: Any = None,
        progress: Progress | None = None,
        fingerprints: Mapping[str, Any] | None = None,
        ema: Stateful | Mapping[str, Stateful] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        generators: Mapping[str, Any] | None = None,
        extras: MutableMapping[str, Any] | None = None,
        precision: Mapping[str, Any] | None = None,
        parallelism: Mapping[str, int] | None = None,
        gradient_reduction: gradients.Reduction | None = None,
        migrators: Sequence[Migrator] = (),
        types: ValueTypes | None = None,
    ) -> None:
        self.models: dict[str, nn.Module] = by_name("model", model)
        self.optimizers: dict[str, torch.optim.Optimizer] = by_name("optimizer", optimizer)
        self.schedulers = by_name("scheduler", scheduler)
        self.scalers = by_name("scaler", scaler)
        self.samplers = by_name("sampler", sampler)
        sources = {name: source_of(each, name=name) for name, each in by_name("loader", loader).items()}
        self.samplers |= {name: each for name, each in sources.items() if not isinstance(each, PerRank)}
        self.loaders = {name: each for name, each in sources.items() if isinstance(each, PerRank)}
        self.progress = progress if progress is not None else Progress()
        self.generators = dict(generators or {})
        self.migrators = tuple(migrators)
        self.gradient_reduction = gradient_reduction
        self.types = types or value_types()
        self._given_precision, self._given_parallelism = precision, parallelism
        self._fingerprints = dict(fingerprints or {})
        self._facts: Facts | None = None
        averages = by_name("ema", ema) | by_name("stateful", dict(stateful) if stateful else None)
        cursors = self.schedulers | self.scalers | self.samplers
        for name, each in (averages | cursors).items():
            _check_stateful(name, each)
        self.parts: dict[str, Part] = {
            **{name: ModelPart(name, each) for name, each in self.models.items()},
            **{name: OptimizerPart(name, each, self.parameters) for name, each in self.optimizers.items()},
            **{name: StatefulPart(name, each) for name, each in (averages | cursors).items()},
            **({} if extras is None else {"extras": ExtrasPart("extras", extras)}),
            "progress": ProgressPart("progress", self.progress),
        }
        """In the order in which they are restored. Random numbers come after them, last of all."""

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name; with several models, after the model's."""
        found: dict[str, nn.Parameter] = {}
        for name, module in self.models.items():
            _, _, own = name.partition(".")
            prefix = f"{own}." if own else ""
            found |= {f"{prefix}{key}": each for key, each in models.named_parameters(module).items()}
        return found

    @cached_property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """What must be the same when the run goes on, by name; files are read once."""
        return {name: fingerprint(each) for name, each in self._fingerprints.items()}

    @property
    def parallelism(self) -> dict[str, int]:
        """Degrees by name."""
        return topology(list(self.models.values()), self._given_parallelism)

    def facts(self) -> Facts:
        """Return what the state is made of: what is compared before anything is loaded.

        The same object comes back as long as it says the same: what is made of it, takes its time.
        """
        now = self._made_of()
        if self._facts is None or self._facts.values != now:
            self._facts = Facts(now, digest_of(now))
        return self._facts

    def _made_of(self) -> dict[str, Any]:
        return {
            "components": sorted([*self.parts, *self.loaders]),
            "models": {name: models.facts(each) for name, each in self.models.items()},
            "optimizers": {name: optimizers.facts(each, self.parameters) for name, each in self.optimizers.items()},
            "schedulers": {name: _scheduler(each) for name, each in self.schedulers.items()},
            "scalers": {name: bool(each.is_enabled()) for name, each in self.scalers.items()},
            "samplers": {name: _sampler(each) for name, each in self.samplers.items()},
            "loaders": {name: class_of(each.stateful) for name, each in self.loaders.items()},
            "precision": recorded(list(self.models.values()), self._given_precision),
        }

    def capture(self, rank: int, world_size: int) -> Captured:
        """Return what this rank saves. Nothing is changed: no step, no draw, no gradient.

        Args:
            rank: In the group that saves.
            world_size: Of that group.

        Raises:
            UnsupportedError: A value cannot be stored; its place is named.
            InvalidInputError: Two parts use one key.
        """
        tensors: Tensors = {}
        values: dict[str, TypedValue] = {}
        mergeable: dict[str, Any] = {}
        moments: dict[str, Tensors] = {}
        for name, part in self.parts.items():
            taken = part.take()
            _add(tensors, taken.tensors)
            values[name] = self._typed(name, taken.value)
            if part.differs_by_rank:
                mergeable[name] = taken.value
            if name in self.optimizers:
                moments[name] = {key[len(name) + 1 :]: each for key, each in taken.tensors.items()}
        local = {name: self._typed(name, each.stateful.state_dict()) for name, each in self.loaders.items()}
        local[RNG] = self._typed(RNG, rng.capture(self.generators))
        local[STANDING] = self._typed(STANDING, self.standing(world_size, moments=moments).as_json())
        if self.progress.micro_step:
            pending = gradients.capture(self.parameters, models=self.models.values())
            _add(tensors, {f"{GRADIENTS}.{key}": each for key, each in pending.shared.items()})
            _add(tensors, {local_key(rank, f"{GRADIENTS}.{key}"): each for key, each in pending.local.items()})
            local[PENDING] = self._typed(PENDING, gradients.facts(pending))
        return Captured(tensors, values, mergeable, local)

    def learning_rates(self) -> list[float]:
        """Return the learning rate of every group of every optimizer, in the order of their names."""
        return [rate for _, each in sorted(self.optimizers.items()) for rate in _rates(each)]

    def scales(self) -> list[float]:
        """Return the scale of every scaler, in the order of their names."""
        return [float(each.get_scale()) for _, each in sorted(self.scalers.items())]

    def standing(self, world_size: int, *, moments: Mapping[str, Tensors] | None = None) -> Standing:
        """Return where the run stands, in a few numbers.

        Args:
            world_size: Of the group that saves.
            moments: The tensors of each optimizer, if they are captured already.
        """
        digests = {}
        for name, each in self.optimizers.items():
            if moments is None:
                found = optimizers.digest(each, self.parameters, max_bytes=DIGESTED_BYTES)
            else:
                found = optimizers.digest_of(moments[name], max_bytes=DIGESTED_BYTES)
            digests[name] = Moments(
                int(found["tensors"]),
                int(found["elements"]),
                int(found["nonzero"]),
                str(found["blake3"]),
                str(found["layout"]),
            )
        return Standing(
            **self.progress.as_json(),
            world_size=world_size,
            lr={name: tuple(_rates(each)) for name, each in self.optimizers.items()},
            scale={name: float(each.get_scale()) for name, each in self.scalers.items()},
            moments=digests,
            cursors={name: getattr(each, "position", None) for name, each in self.samplers.items()},
        )

    @property
    def dtype(self) -> torch.dtype:
        """What most of the arithmetic is done in: what autocast was said to use, else the dtype of most parameters."""
        said = (self._given_precision or {}).get("autocast")
        if isinstance(said, torch.dtype):
            return said
        sizes: dict[torch.dtype, int] = {}
        for each in self.parameters.values():
            sizes[each.dtype] = sizes.get(each.dtype, 0) + each.numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    def encoded(self, name: str, value: Any) -> bytes:
        """Return a value as typed JSON; `name` is for messages."""
        return encode_value(value, types=self.types, name=name)

    def _typed(self, name: str, value: Any) -> TypedValue:
        return TypedValue.of(value, types=self.types, name=name)


def _add(tensors: Tensors, more: Tensors) -> None:
    if twice := sorted(tensors.keys() & more.keys()):
        raise InvalidInputError(f"Two parts of the state use the key {twice[0]}.", hint="Rename one of them.")
    tensors.update(more)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _scheduler(each: Any) -> str:
    """Return its class, and those of the schedulers that it is made of."""
    inner = getattr(each, "_schedulers", ())
    return f"{class_of(each)}({', '.join(map(_scheduler, inner))})" if inner else class_of(each)


def _sampler(each: Any) -> dict[str, Any]:
    return {"class": class_of(each), **(each.order if isinstance(each, ElasticSampler) else {})}


def _check_stateful(name: str, each: Any) -> None:
    if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
        raise UnsupportedError(
            f"{name} is a {class_of(each)}, which has no state_dict and load_state_dict.",
            hint="Give it both, or put what is to be saved into extras={...}.",
        )
