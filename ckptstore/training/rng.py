"""Random number generators: captured without touching them, and set so that each goes on where it was.

What is captured is what a process draws from unasked (Python's, NumPy's legacy one, torch's on the CPU and on every
CUDA device) and the generators that the training has by name. Capturing starts nothing: NumPy's generator is left out
if nobody has imported `numpy.random`, CUDA's where CUDA is not initialised.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.checksum import digest
from ckptstore.format.strict_json import dump_json

if TYPE_CHECKING:
    import numpy as np

    Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

__all__ = ["RngReport", "capture", "derived_seed", "restore"]

_DOMAIN = b"ckptstore/1 rng seed\n"


@dataclass(frozen=True)
class RngReport:
    """What became of each generator: `python`, `numpy`, `torch`, `cuda:0`, …; those with names as `named:NAME`.

    Args:
        restored: They go on where they were.
        seeded: They began anew, from the seed that was given.
        left: They were not touched, or are not here, and why.
        reasons: Why those that were seeded could not be restored.
    """

    restored: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "restored": list(self.restored),
            "seeded": list(self.seeded),
            "left": dict(self.left),
            "reasons": dict(self.reasons),
        }


def capture(generators: Mapping[str, Generator] | None = None) -> dict[str, dict[str, Any]]:
    """Return the states of all generators, as values that typed JSON can store. None of them is changed.

    Args:
        generators: Those of the training, by name.

    Raises:
        UnsupportedError: One of them is of a kind that is not known, or has no state that could be set again.
        InvalidInputError: A name is no text.
    """
    return {name: {"kind": each.kind, "state": each.state()} for name, each in _sources(generators).items()}


def restore(
    saved: Mapping[str, Mapping[str, Any]] | None,
    generators: Mapping[str, Generator] | None = None,
    *,
    seed: int | None = None,
) -> RngReport:
    """Set each generator to its saved state; all of them, or none if that fails.

    CUDA is initialised if states of it were saved and there is one: seeds that wait for its start would undo them.

    Args:
        saved: What `capture` returned; None on a rank that has none.
        generators: The training's, by name.
        seed: Generators without a saved state that fits them begin anew, each from a seed that follows from this one
            and its name. None leaves them as they are.

    Raises:
        IncompatibleStateError: A state cannot be set; every generator is as it was before.
        UnsupportedError: A generator is of a kind that is not known.
        InvalidInputError: A name is no text, or `saved` is not what `capture` returns.
    """
    saved = {} if saved is None else saved
    _check_saved(saved)
    if any(name.startswith("cuda:") for name in saved) and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if "numpy" in saved:
        importlib.import_module("numpy.random")  # the program that saved had it
    here = _sources(generators)
    restored, seeded, left, reasons = [], [], {}, {}
    undo: list[tuple[_Source, Any]] = []
    for name in [*here, *(name for name in saved if name not in here)]:
        try:
            if (reason := _misfit(name, here, saved)) is None:
                undo.append((here[name], here[name].state()))
                here[name].set_state(saved[name]["state"])
                restored.append(name)
            elif name in here and seed is not None:
                undo.append((here[name], here[name].state()))
                here[name].seed(_seed_of(seed, name))
                seeded.append(name)
                reasons[name] = reason
            else:
                left[name] = reason
        except Exception as error:
            for source, state in reversed(undo):
                source.set_state(state)
            raise IncompatibleStateError(
                f"The generator {name} does not take its state: {type(error).__name__}: {error!s:.200}.",
                hint="Load an older checkpoint, or resume without the saved generators.",
                generator=name,
            ) from error
    if not saved and seed is not None and torch.cuda.is_available() and not _cuda_runs():
        torch.cuda.manual_seed_all(_seed_of(seed, "cuda"))  # takes effect when it is
        seeded.append("cuda")
        reasons["cuda"] = "no state of it was saved"
    return RngReport(tuple(restored), tuple(seeded), left, reasons)


def derived_seed(run: str, step: int, rank: int) -> int:
    """Return a seed of 63 bits for a rank that has no saved state: the same for the same run, step and rank."""
    return _hashed([run, step, rank])


def _seed_of(seed: int, name: str) -> int:
    return _hashed([seed, name])


def _hashed(parts: list[Any]) -> int:
    return int.from_bytes(digest(_DOMAIN + dump_json(parts, what="The parts of a seed"))[:8], "big") >> 1


def _misfit(name: str, here: Mapping[str, _Source], saved: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return why a saved state cannot be set, or None if it can."""
    if name not in here:
        if name.startswith("cuda:"):
            return f"there are {_cuda_devices()} CUDA devices here"
        return "no generator of this name is here"
    if name not in saved:
        return "no state of it was saved"
    was, now = saved[name]["kind"], here[name].kind
    return None if was == now else f"it was {was} when it was saved and is {now}"


def _check_saved(saved: Mapping[str, Any]) -> None:
    for name, each in saved.items():
        if not isinstance(name, str) or not isinstance(each, Mapping) or each.keys() != {"kind", "state"}:
            raise InvalidInputError(
                f"The saved generator {name!r:.60} is {each!r:.60}.", hint="Pass what `capture` returned."
            )


class _Source(NamedTuple):
    """A generator: what it is, how its state is got and set, how it begins anew."""

    kind: str
    state: Callable[[], Any]
    set_state: Callable[[Any], None]
    seed: Callable[[int], Any]


def _sources(generators: Mapping[str, Generator] | None) -> dict[str, _Source]:
    return dict(_found(generators or {}))


def _found(generators: Mapping[str, Generator]) -> Iterator[tuple[str, _Source]]:
    yield "python", _of_python(random)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        yield "numpy", _of_random_state(numpy_random.mtrand._rand)  # noqa: SLF001  (what np.random.rand draws from)
    yield "torch", _of_torch(torch.default_generator)
    for index in range(_cuda_devices() if _cuda_runs() else 0):
        yield f"cuda:{index}", _of_torch(torch.cuda.default_generators[index])
    for name, generator in generators.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"A generator is called {name!r:.60}.", hint="Give it a name that is text.")
        yield f"named:{name}", _of(generator, name)


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _of(generator: Any, name: str) -> _Source:
    numpy_random = sys.modules.get("numpy.random")
    if isinstance(generator, torch.Generator):
        return _of_torch(generator)
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return _of_python(generator)
    if numpy_random is not None and isinstance(generator, numpy_random.Generator):
        return _of_numpy(generator)
    if numpy_random is not None and isinstance(generator, numpy_random.RandomState):
        return _of_random_state(generator)
    raise UnsupportedError(
        f"The generator {name} is a {type(generator).__module__}.{type(generator).__qualname__}, whose state cannot be "
        "set again.",
        hint="Pass a torch.Generator, numpy.random.Generator, numpy.random.RandomState or random.Random.",
        generator=name,
    )


def _of_python(generator: Any) -> _Source:
    kind = "random.Random" if generator is random else f"{type(generator).__module__}.{type(generator).__qualname__}"
    return _Source(kind, generator.getstate, generator.setstate, generator.seed)


def _of_torch(generator: torch.Generator) -> _Source:
    def set_state(state: Any) -> None:
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
            raise TypeError(f"it is {getattr(state, 'dtype', type(state))}, not a tensor of uint8")
        generator.set_state(state.detach().to("cpu").contiguous())  # a load may have put it on a device

    return _Source(f"torch.Generator {generator.device.type}", generator.get_state, set_state, generator.manual_seed)


def _of_numpy(generator: np.random.Generator) -> _Source:
    bits: Any = generator.bit_generator
    kind = f"numpy.random.Generator {type(bits).__name__}"

    def set_state(state: Any) -> None:
        bits.state = state

    return _Source(kind, lambda: bits.state, set_state, lambda seed: set_state(type(bits)(seed).state))


def _of_random_state(generator: np.random.RandomState) -> _Source:
    """Return a legacy generator; it draws normal numbers in pairs, and the second may wait in its state."""
    bits: Any = generator._bit_generator  # noqa: SLF001  (it has no public name)
    kind = f"numpy.random.RandomState {type(bits).__name__}"

    def seed(number: int) -> None:
        generator.set_state({**type(bits)(number).state, "has_gauss": 0, "gauss": 0.0})

    return _Source(kind, lambda: generator.get_state(legacy=False), generator.set_state, seed)
