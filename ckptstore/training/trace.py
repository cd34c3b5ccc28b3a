"""What a run does step by step, in a few numbers: the trace that a resume is compared with.

Every number here says the same on every world size, as far as arithmetic lets it. Ranks are added up by the caller.
"""

from __future__ import annotations

import dataclasses
import numbers
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format import canonical
from ckptstore.format.canonical import read_fields
from ckptstore.training.batches import DIGEST_MASK

MAX_STEPS = 1000

_DIGEST_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of training, all ranks together. What was not measured is None.

    Args:
        global_step: The step that was taken: 101 is the first after a checkpoint of step 100.
        loss: Of the step's global batch, before the update. A tensor of one element is read.
        grad_norm: Of all gradients, unscaled; before clipping or after it, but always the same.
        lr: Of every parameter group, one optimizer after the other.
        scale: Of the gradient scaler.
        batch_digest: Which samples these were, see `batches.batch_digest`.
        samples: How many samples these were.
        update_norm: Of the change of the weights, see `update_norm.UpdateNorm`.

    Raises:
        InvalidInputError: One is no such number; it is named.
    """

    global_step: int
    loss: float
    grad_norm: float | None = None
    lr: tuple[float, ...] | None = None
    scale: float | None = None
    batch_digest: int | None = None
    samples: int | None = None
    update_norm: float | None = None

    def __post_init__(self) -> None:
        plain: dict[str, object] = {
            "global_step": _whole("global_step", self.global_step),
            "loss": _number("loss", self.loss),
        }
        for name in ("grad_norm", "scale", "update_norm"):
            value = getattr(self, name)
            plain[name] = None if value is None else _number(name, value)
        for name in ("batch_digest", "samples"):
            value = getattr(self, name)
            plain[name] = None if value is None else _whole(name, value)
        if self.lr is not None:
            several = self.lr if isinstance(self.lr, Sequence) else (self.lr,)
            plain["lr"] = tuple(_number(f"lr[{at}]", each) for at, each in enumerate(several))
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; a digest is hexadecimal, because not every reader has integers of 63 bits."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain["lr"] = None if self.lr is None else list(self.lr)
        plain["batch_digest"] = None if self.batch_digest is None else f"{self.batch_digest:0{_DIGEST_DIGITS}x}"
        return plain

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return what `as_json` returned, or JSON made of it.

        Raises:
            InvalidInputError: It is none.
        """
        number = canonical.optional(canonical.number)
        return read_fields(
            cls,
            value,
            loss=canonical.number,
            grad_norm=number,
            lr=canonical.optional(canonical.sequence(canonical.number)),
            scale=number,
            batch_digest=canonical.optional(_digest),
            update_norm=number,
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which arithmetic a run went on: what decides how near a resume can come.

    Args:
        world_size: Ranks.
        device: What computes: the processor's or the device's name.
        dtype: Of most of the arithmetic: `float32`, or the autocast dtype.
        threads: Of one process, on a CPU; 0 elsewhere.
        torch_version: For two versions need not compute the same.
        is_deterministic: The same program computes the same bits again.
        parallelism: How ranks share the work, as text; empty if nobody said.
    """

    world_size: int
    device: str
    dtype: str
    threads: int
    torch_version: str
    is_deterministic: bool
    parallelism: str = ""

    @classmethod
    def here(
        cls,
        *,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        is_deterministic: bool | None = None,
        parallelism: str = "",
    ) -> Self:
        """Return those of this process.

        Args:
            world_size: Ranks.
            device: Where the model is.
            dtype: Of most of the arithmetic.
            is_deterministic: By default: on a CPU, and elsewhere if torch was told to use deterministic algorithms.
            parallelism: How ranks share the work.
        """
        kind = torch.device(device)
        on_cpu = kind.type == "cpu"
        if kind.type == "cuda":
            name = torch.cuda.get_device_name(kind)
        else:
            name = (
                f"{kind.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability() if on_cpu else ''}".strip()
            )
        return cls(
            world_size=world_size,
            device=name,
            dtype=str(dtype).removeprefix("torch."),
            threads=torch.get_num_threads() if on_cpu else 0,
            torch_version=torch.__version__,
            is_deterministic=(on_cpu or torch.are_deterministic_algorithms_enabled())
            if is_deterministic is None
            else is_deterministic,
            parallelism=parallelism,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps that followed a checkpoint, or a resume from it.

    Args:
        start_step: `global_step` of the checkpoint.
        observations: The steps after it, in order.
        conditions: Under which they were taken.
        update_of: Of which weights the update norms are, see `UpdateNorm.of`.

    Raises:
        InvalidInputError: The steps do not ascend, or are more than 1,000.
    """

    start_step: int
    observations: tuple[Observation, ...]
    conditions: Conditions
    update_of: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "observations", tuple(self.observations))
        if len(self.observations) > MAX_STEPS:
            raise InvalidInputError(
                f"A trace of {len(self.observations)} steps; {MAX_STEPS} are allowed.", hint="Observe fewer steps."
            )
        before = -1
        for each in self.observations:
            if each.global_step <= before:
                raise InvalidInputError(
                    f"Step {each.global_step} was observed after step {before}.",
                    hint="Observe a step once, after `global_step` was moved on.",
                    before=before,
                    step=each.global_step,
                )
            before = each.global_step

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values, for `CheckpointStore.write_trace`."""
        return {
            "start_step": self.start_step,
            "observations": [each.as_json() for each in self.observations],
            "conditions": dataclasses.asdict(self.conditions),
            "update_of": self.update_of,
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return the trace in `value`: what `Checkpoint.trace` returned.

        Raises:
            IntegrityError: It is no trace of a training.
        """
        try:
            return read_fields(
                cls,
                value,
                observations=canonical.sequence(Observation.from_json),
                conditions=lambda conditions: read_fields(Conditions, conditions),
            )
        except InvalidInputError as error:
            raise IntegrityError(
                f"The trace is not that of a training: {error.message}",
                hint="Resume without it; nothing but the proof depends on it.",
            ) from error


def _digest(value: object) -> int:
    try:
        return int(canonical.text(value), 16) & DIGEST_MASK
    except ValueError as error:
        raise InvalidInputError(f"expected hexadecimal digits, found {value!r:.80}.") from error


def _number(name: str, value: object) -> float:
    if isinstance(value, DTensor):
        raise InvalidInputError(
            f"{name} is a DTensor, of which this rank may hold a share.", hint=f"Pass {name}.full_tensor().", field=name
        )
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidInputError(
            f"{name} must be one number, not {type(value).__name__} {value!r:.80}.",
            hint="Correct it where observe() is called.",
            field=name,
        )
    return float(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= DIGEST_MASK:
        raise InvalidInputError(
            f"{name} must be a whole number from 0 to 2^63 - 1, not {value!r:.80}.",
            hint="Correct it where observe() is called.",
            field=name,
        )
    return int(value)
