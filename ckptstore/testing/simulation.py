"""Many histories of the real code, each drawn from a seed: `python -m ckptstore.testing.simulation --seed 7`.

Trainers, readers, operators and collectors share one store. Exactly one of them goes on at a time; at every store call
the seed decides who, which fault the call meets, and what arrives that was under way. After each step that changed the
store a `Watch` looks at it. The same seed gives the same history, so that a failing one is played again by its number.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from ckptstore.errors import CkptStoreError
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.testing import actors, collectors, simulated
from ckptstore.testing.actors import Process
from ckptstore.testing.reference import Watch
from ckptstore.testing.simulated import ManualClock
from ckptstore.testing.tapped import WRITES, Act, Call, TappedStore
from ckptstore.testing.turns import Actor, TurnClock, Turns, in_turn
from ckptstore.testing.weather import BIT_FLIPPED, HINT_CORRUPTED, HINT_DELETED, StormyStore, Weather
from ckptstore.units import MIB

AGED_SAVES = 67
MAX_STEPS = 700
STEP_SECONDS = 0.05
FOREIGN = ("data/0/notes.txt", "data/0/step-1.t0001.a0001.x/rank-00000.safetensors", "data/f/rank-00015.safetensors")
"""Keys that no writer spells: nobody may delete them."""
HASTE = (0.01, 0.03, 0.1)
"""How probable it is at a step that the next process comes: few overlap, or many."""
DEADLINES_SECONDS = (2.0, 20.0, 120.0)

Role = Callable[[Process], None]


@dataclass
class Played:
    """What one simulation came to.

    Args:
        seed: Its number.
        complaints: What was broken: nothing at best.
        steps: Store calls, and what arrived beside them.
        looks: How often each invariant was looked at.
        faults: What went wrong, by kind.
        kills: Where processes died.
        kinds: Records in the log at the end, by kind.
        digest: Of the history: the same for the same seed.
        history: A line for each step, if asked for.
    """

    seed: int
    complaints: list[str]
    steps: int
    looks: Counter[str]
    faults: Counter[str]
    kills: Counter[str]
    kinds: Counter[str]
    digest: str
    history: list[str] = field(default_factory=list)


class DrawnIds:
    """Identifiers of one process, and jitter from the seed."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.first, self._count, self._chance = f"{number:08x}", 0, chance

    def nonce(self) -> str:
        """Return the next identifier."""
        self._count += 1
        return f"{self.first}{self._count:024x}"

    def fraction(self) -> float:
        """Return a drawn jitter."""
        return self._chance.random()


class Simulation:
    """One history.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)  # noqa: S311  (to be repeated)
        self.turns = Turns(self.chance)
        self.weather = Weather.drawn(self.chance)
        self.memory = MemoryStore(clock=TurnClock(self.turns))
        self.store = TappedStore(self.memory, self._shown)
        self.watch = Watch(self.memory)
        self.actors: list[Actor] = []
        self.views: list[StormyStore] = []
        self.history: list[str] = []
        self.complaints: list[str] = []
        self.steps = 0
        self._touched: set[str] = set()
        self._roles = self._cast()
        self._haste = self.chance.choice(HASTE)

    def play(self) -> Played:
        """Play it, and return what it came to."""
        RunLog.create(MemoryStore(clock=ManualClock()))  # a store is asked what it can once per process: not in here
        aged = aged_run()
        try:
            with in_turn(self.turns):
                self._begin_with(aged)
                while self.steps < MAX_STEPS and not self.complaints and self._step():
                    pass
                if not self.complaints:
                    self._calm_down()
        finally:
            for actor in self.actors:
                actor.end()
        kinds = Counter(str(record["kind"]) for record in self.watch.told.records)
        digest = blake3("\n".join(self.history).encode()).hexdigest()
        looks, faults, kills = self.watch.looks, self.weather.faults, self.weather.kills
        return Played(self.seed, self.complaints, self.steps, looks, faults, kills, kinds, digest, self.history)

    def _begin_with(self, aged: list[dict[str, bytes]]) -> None:
        """Begin with nothing, with some checkpoints, or with so many that the next snapshot is near."""
        saves = (0, self.chance.randint(2, 8), self.chance.randint(61, len(aged) - 1))
        for key, body in aged[self.chance.choices(saves, (3, 6, 1))[0]].items():
            self.memory.put(key, body)
        for key in FOREIGN:
            self.memory.put(key, b"not ours")
        self.complaints += self.watch.look()

    def _cast(self) -> list[Role]:
        """Return who will come, in which order."""
        roles: Sequence[Role] = (actors.trains, actors.reads, actors.operates, collectors.collects)
        return self.chance.choices(roles, (7, 2, 3, 4), k=self.chance.randint(3, 10))

    def _enter(self, role: Role) -> Actor:
        number = len(self.actors) + 1
        name, clock = f"{role.__name__}-{number}", TurnClock(self.turns)
        view = StormyStore(self.store, turns=self.turns, clock=clock, weather=self.weather)
        options = LogOptions(deadline_seconds=self.chance.choice(DEADLINES_SECONDS))
        job = f"job-{self.chance.randint(1, 2)}"
        ids = DrawnIds(number, self.chance)
        own = random.Random(self.chance.random())  # noqa: S311
        process = Process(name, ids.first, view, clock, ids, self.watch, own, job, options)
        actor = Actor(self.turns, name, lambda: role(process))
        self.views.append(view)
        self.actors.append(actor)
        return actor

    def _step(self) -> bool:
        """Let one thing happen; False if nothing is left that could."""
        alive = [actor for actor in self.actors if not actor.is_over]
        if self._roles and (not alive or self.chance.random() < self._haste):
            alive.append(self._enter(self._roles.pop(0)))
        if not alive:
            return False
        self.turns.seconds += self.chance.expovariate(1 / STEP_SECONDS)
        event = self.chance.random()
        if event < 0.05:  # noqa: PLR2004
            self._deliver()
        elif self.weather.happens(HINT_DELETED, self.chance):
            self._delete_hint()
        elif self.weather.happens(HINT_CORRUPTED, self.chance):
            self._corrupt_hint()
        elif self.weather.happens(BIT_FLIPPED, self.chance):
            self._flip_bit()
        else:
            if event > 0.97:  # noqa: PLR2004  (one is slow for a while, or fast)
                self.chance.choice(alive).weight = self.chance.choice((0.02, 1.0, 4.0))
            self._go_on(self.chance.choices(alive, [actor.weight for actor in alive])[0])
        self._look()
        return True

    def _go_on(self, actor: Actor) -> None:
        self.turns.go_on(actor)
        if actor.error is not None:
            self.complaints.append(f"{actor.name} ended with {actor.error!r}")

    def _deliver(self) -> None:
        """Let one request arrive that was under way."""
        under_way = [(view, act) for view in self.views for act in view.under_way]
        if under_way:
            view, act = self.chance.choice(under_way)
            view.under_way.remove(act)
            self.history.append("arrives:")
            with contextlib.suppress(CkptStoreError):  # nobody waits for the answer
                act()

    def _hints(self) -> list[str]:
        keys = [info.key for info in self.memory.list("")]
        return [key for key in keys if key.startswith(("latest.json", "state/")) or key.endswith("/COMMITTED")]

    def _delete_hint(self) -> None:
        """Delete a hint (I10)."""
        hints = self._hints()
        if hints:
            self.weather.faults[HINT_DELETED] += 1
            self.store.delete(self.chance.choice(hints))

    def _corrupt_hint(self) -> None:
        """Let a hint hold anything: a flipped bit, a piece of itself, nothing, or what another one holds (I10)."""
        hints = self._hints()
        if hints:
            self.weather.faults[HINT_CORRUPTED] += 1
            key, other = self.chance.choice(hints), self.chance.choice(hints)
            body = bytearray(self.memory.get(key, max_bytes=MIB)) or bytearray(1)
            at = self.chance.randrange(len(body))
            body[at] ^= 1 << self.chance.randrange(8)
            bodies = (bytes(body), bytes(body[:at]), b"", self.memory.get(other, max_bytes=MIB))
            self.store.put(key, self.chance.choice(bodies))

    def _flip_bit(self) -> None:
        """Damage an object that a kept checkpoint names (I13)."""
        told = self.watch.told
        keys = self.watch.objects_of(self.chance.choice(sorted(told.kept))) if told.kept else []
        keys = [key for key in keys if key not in self.watch.damaged]
        if keys:
            self.weather.faults[BIT_FLIPPED] += 1
            key = self.chance.choice(keys)
            body = bytearray(self.memory.get(key, max_bytes=MIB))
            body[self.chance.randrange(len(body))] ^= 1 << self.chance.randrange(8)
            self.watch.damaged.add(key)
            self.store.put(key, bytes(body))

    def _shown(self, call: Call, act: Act) -> Any:
        """Note a call that reaches the store, and what it changes."""
        who = self.turns.current.name if self.turns.current else "-"
        self.steps += 1
        self.history.append(f"{self.steps} {self.turns.seconds:.3f} {who}: {call.operation} {call.key}")
        if call.operation in WRITES:
            self._touched.add(call.key)
        return act()

    def _look(self) -> None:
        touched, self._touched = self._touched, set()
        if touched or self.watch.has_heard:
            self.complaints += self.watch.look(touched)

    def _calm_down(self) -> None:
        """End all faults and processes, let all arrive, and see that a new start of the job can go on."""
        self.weather.is_calm = True
        for actor in self.actors:
            actor.end()
        while any(view.under_way for view in self.views) and not self.complaints:
            self._deliver()
            self._look()
        for role in (collectors.collects_to_the_end, actors.goes_on, actors.reads, collectors.verifies_all):
            actor = self._enter(role)
            while not actor.is_over and not self.complaints:
                self._go_on(actor)
                self._look()
        self.complaints += self.watch.look()


@functools.cache
def aged_run() -> list[dict[str, bytes]]:
    """Return what a store holds after each of `AGED_SAVES` saves of one process, and before the first: nothing."""
    store, clock, chance = MemoryStore(clock=ManualClock()), ManualClock(), random.Random(0)  # noqa: S311
    log = RunLog.create(store, clock=clock, ids=DrawnIds(0, chance))
    incarnation = Incarnation("0" * 32, job="job-0", host="aged")
    held: list[dict[str, bytes]] = [{}]
    for step in range(1, AGED_SAVES + 1):
        simulated.save(log, incarnation, f"step-{step}", step=step, seed=step, world_size=1)
        held.append({info.key: store.get(info.key, max_bytes=MIB) for info in store.list("")})
    return held


def play(seed: int) -> Played:
    """Play the simulation of one seed."""
    return Simulation(seed).play()


def played(seeds: range) -> Iterator[Played]:
    """Play many, one after the other."""
    for seed in seeds:
        yield play(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one seed, or many; print what is broken. Returns 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m ckptstore.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=1, help="how many")
    parser.add_argument("--history", action="store_true", help="print each step")
    given = parser.parse_args(arguments)
    broken = 0
    for one in played(range(given.seed, given.seed + given.count)):
        if given.history:
            print("\n".join(one.history))  # noqa: T201
        for complaint in one.complaints:
            print(f"seed {one.seed}: {complaint}")  # noqa: T201
        broken += bool(one.complaints)
    print(f"{given.count} simulations, {broken} broken.")  # noqa: T201
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
