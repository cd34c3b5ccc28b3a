"""Breadth first through all states, so that what is found first has a shortest trace."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.commit_model.collectors import collector_steps, left_behind
from benchmarks.commit_model.invariants import subjects, violation
from benchmarks.commit_model.readers import other_steps, reader_steps
from benchmarks.commit_model.state import Setting, State, Step, first
from benchmarks.commit_model.writers import writer_steps

LIMIT = 3_000_000


@dataclass(frozen=True)
class Explored:
    """What was found.

    Args:
        broken: The first violation, or "".
        trace: The steps to it.
        states: Distinct ones that were reached, all of them if nothing was found.
        steps: Transitions that were followed.
        depth: Steps to the farthest state.
        logs: Distinct logs among the states.
        subjects: In how many of the states each invariant has something to be broken.
        seconds: It took.
        complete: Nothing was left out within the bounds.
    """

    broken: str
    trace: tuple[str, ...]
    states: int
    steps: int
    depth: int
    logs: int
    subjects: dict[str, int]
    seconds: float
    complete: bool


def successors(state: State, setting: Setting) -> Iterator[Step]:
    """Yield every step from `state`: first what the store may take, then what each process may do."""
    for slot, record in sorted(state.net, key=repr):
        log = state.log.append(record)
        net = frozenset(request for request in state.net if request[0] > slot)
        broken = left_behind(state, record, setting) if record.kind == "COLLECTED" and log.last_is_valid else None
        yield Step(("store takes", slot, record), state._replace(log=log, net=net), broken)
    for i in range(len(state.writers)):
        yield from writer_steps(state, i, setting)
    for i in range(len(state.collectors)):
        yield from collector_steps(state, i, setting)
    yield from reader_steps(state, setting)
    yield from other_steps(state, setting)


def explore(setting: Setting, *, limit: int = LIMIT) -> Explored:
    """Visit every state that can be reached, and ask all invariants there, until one is broken."""
    began = time.process_time()
    start = first(setting)
    came: dict[State, State | None] = {start: None}
    todo = deque([(start, 0)])
    steps = depth = 0
    logs = {start.log}

    def ended(broken: str, trace: tuple[str, ...]) -> Explored:
        seconds = time.process_time() - began
        told = Counter(name for state in came for name in subjects(state)) if not broken else Counter()
        complete = not todo and not broken
        return Explored(broken, trace, len(came), steps, depth, len(logs), dict(told), seconds, complete)

    tracks_late = bool(setting.budget.late_puts)
    while todo and len(came) <= limit:
        state, depth = todo.popleft()
        for step in successors(state, setting):
            steps += 1
            then = step.state
            if not tracks_late and then.deleted:
                then = then._replace(deleted=frozenset())
            if step.broken is None and then in came:
                continue
            broken = step.broken or violation(then, setting)
            if broken is not None:
                return ended(broken, (*_trace(came, state, setting), _line(step)))
            came[then] = state
            logs.add(then.log)
            todo.append((then, depth + 1))
    return ended("", ())


def _trace(came: dict[State, State | None], state: State, setting: Setting) -> list[str]:
    lines: list[str] = []
    while (before := came[state]) is not None:
        found = (step for step in successors(before, setting) if _same(step.state, state))
        lines.append(_line(next(found)))
        state = before
    return lines[::-1]


def _same(one: State, other: State) -> bool:
    return one._replace(deleted=frozenset()) == other._replace(deleted=frozenset())


def _line(step: Step) -> str:
    return " ".join(str(word) for word in step.label)
