"""The proof of a resume where there is no trace: control and resumed are both run, for a few steps."""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ckptstore.errors import InvalidInputError
from ckptstore.training.proof import Proof, compare
from ckptstore.training.tolerances import Tolerances
from ckptstore.training.trace import MAX_STEPS, Conditions, Observation, Trace

S = TypeVar("S")

_UPDATE_OF = "one program"  # which chooses the same weights both times


@dataclass(frozen=True, slots=True)
class Program(Generic[S]):
    """A training in four pieces. Every rank calls each of them at the same time.

    Args:
        build: Returns everything as a new process makes it: model, optimizer, scheduler, sampler.
        resume: Restores the newest checkpoint of the run at a URL into it.
        save: Saves it to the run at a URL, and returns when it is committed.
        step: Takes one step and returns what was observed, all ranks together: an `Observation`, or its fields. It is
            told how many steps came before, for those who fix their samples by that.
        conditions: Under which it computes, if not under those of `Conditions.here`.
    """

    build: Callable[[], S]
    resume: Callable[[S, str], object]
    save: Callable[[S, str], object]
    step: Callable[[S, int], Observation | Mapping[str, Any]]
    conditions: Conditions | None = None


def prove_resume(
    program: Program[S],
    url: str,
    *,
    scratch: str | None = None,
    steps: int = 5,
    warm_steps: int = 2,
    tolerances: Tolerances | None = None,
) -> Proof:
    """Show that a state which was resumed from `url` survives being saved and resumed once more.

    The control is resumed from `url`, takes `warm_steps`, is saved to `scratch`, and goes on for `steps`. Then another
    one is built, with other seeds, resumed from `scratch`, and must do the same. The warm steps come first because a
    resume that forgets moments, scheduler or cursor would forget them in both, and both would agree. A third one is
    built and not resumed, to see that the first loss tells the difference; where it does not, a note says so.

    The caller's own states of random numbers are put back. Memory is needed for one state at a time.

    Args:
        program: The training.
        url: Root of the run whose newest checkpoint is resumed. Nothing is written there by this.
        scratch: Root of a run that does not exist yet, which stays; by default in a folder that is deleted again.
        steps: How many are compared.
        warm_steps: How many are taken before.
        tolerances: By default none: one machine computes the same again; on a GPU, what its arithmetic lets it.

    Raises:
        InvalidInputError: A number of steps is not from 1 on; `scratch` is `url`, or missing where several ranks run.
        CkptStoreError: What saving and resuming raise.

    If killed: perhaps a run at `scratch`.
    """
    _check(url, scratch, steps=steps, warm_steps=warm_steps)
    here = program.conditions or Conditions.here(world_size=_world_size())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_numbers_put_back())
        place = scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-proof-"))
        control = program.build()
        program.resume(control, url)
        start = [_observed(program.step(control, at)) for at in range(warm_steps)][-1].global_step
        program.save(control, place)
        expected = Trace(start, _steps(program, control, warm_steps, steps), here, _UPDATE_OF)
        del control
        _reseed(1)
        plain = program.build()
        restart = _observed(program.step(plain, warm_steps)).loss
        del plain
        gc.collect()
        _reseed(2)
        resumed = program.build()
        program.resume(resumed, place)
        found = Trace(start, _steps(program, resumed, warm_steps, steps), here, _UPDATE_OF)
    return compare(expected, found, tolerances=tolerances, restart_loss=restart)


def _steps(program: Program[S], state: S, start: int, steps: int) -> tuple[Observation, ...]:
    return tuple(_observed(program.step(state, start + at)) for at in range(steps))


def _observed(said: Observation | Mapping[str, Any]) -> Observation:
    if isinstance(said, Observation):
        return said
    if strange := sorted(map(str, said.keys() - set(Observation.__slots__))):
        raise InvalidInputError(
            f"A step returned {', '.join(strange)[:200]}, which nobody compares.",
            hint=f"Return {', '.join(Observation.__slots__)}, or some of them.",
        )
    if missing := sorted({"global_step", "loss"} - said.keys()):
        raise InvalidInputError(f"A step returned no {' and no '.join(missing)}.", hint="Return at least these two.")
    return Observation(**said)


def _check(url: str, scratch: str | None, *, steps: int, warm_steps: int) -> None:
    for name, value in (("steps", steps), ("warm_steps", warm_steps)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STEPS:
            raise InvalidInputError(f"{name} must be from 1 to {MAX_STEPS}, not {value!r:.80}.", field=name)
    if scratch is None and _world_size() > 1:
        raise InvalidInputError(
            "Several ranks need one place for the second save.", hint="Pass scratch='...', which all of them reach."
        )
    if scratch is not None and scratch.rstrip("/") == url.rstrip("/"):
        raise InvalidInputError("The second save would go to the run itself.", hint="Pass another scratch='...'.")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextlib.contextmanager
def _random_numbers_put_back() -> Iterator[None]:
    plain, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(legacy)  # noqa: NPY002  (what others may use)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)


def _reseed(seed: int) -> None:
    """Begin like another process: what a resume does not restore shall be seen."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (what others may use)
    torch.manual_seed(seed)
