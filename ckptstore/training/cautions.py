"""What a loop has probably forgotten, said once in the log. Nothing is refused for it: it may be meant."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ckptstore.training.progress import Progress
from ckptstore.training.sampler import ElasticSampler
from ckptstore.training.state import TrainingState

IDLE = 20
"""Calls at one place after which a loop has forgotten to move its progress on."""

_log = logging.getLogger("ckptstore.training")


@dataclass(slots=True)
class _Before:
    """Where a state stood when it was saved last.

    Args:
        at: Global step and micro-step.
        places: Epoch and position of the elastic sampler, if there is one.
        said: What was said already.
    """

    at: tuple[int, int]
    places: dict[str, tuple[int, int]]
    said: set[str] = field(default_factory=set)


_before: WeakKeyDictionary[TrainingState, _Before] = WeakKeyDictionary()


def caution(state: TrainingState) -> None:
    """Compare where `state` stands with where it stood at its last save, and say what did not move on though it should.

    Args:
        state: About to be saved; it is not changed.
    """
    now = _Before((state.progress.global_step, state.progress.micro_step), _places(state))
    last = _before.setdefault(state, now)
    if last is now:
        return
    now.said = last.said
    _before[state] = now
    if now.at == last.at:
        _say(now, "progress", f"global_step is {now.at[0]} at two saves: move progress on after each step.")
        return
    for name, place in now.places.items():
        if place == last.places.get(name) and last.at[0] < now.at[0]:
            steps = f"from step {last.at[0]} to {now.at[0]}"
            _say(now, name, f"The cursor of {name} has not moved {steps}: call advance() after each batch.")


class Idle:
    """Says, once, that a loop asks again and again whether to save, and stands where it stood."""

    def __init__(self) -> None:
        self._at, self._times, self._said = (-1, -1), 0, False

    def asked(self, progress: Progress, *, rank: int) -> None:
        """Note a call at this place; rank 0 says it."""
        here = (progress.global_step, progress.micro_step)
        self._at, self._times = here, self._times + 1 if here == self._at else 1
        if self._times == IDLE and not self._said and rank == 0:
            self._said = True
            _log.warning("%d calls of due() at global_step %d and micro_step %d: move progress on.", IDLE, *here)


def _places(state: TrainingState) -> dict[str, tuple[int, int]]:
    found = {name: each for name, each in state.samplers.items() if isinstance(each, ElasticSampler)}
    if len(found) != 1:  # of several, some may rest while another is trained on
        return {}
    return {name: (each.epoch, each.position) for name, each in found.items()}


def _say(now: _Before, what: str, text: str) -> None:
    if what not in now.said:
        now.said.add(what)
        _log.warning("%s", text)
