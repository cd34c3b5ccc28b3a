"""Play many drawn histories of the real code, every enumeration, and every weakened protocol; count what was looked at.

The histories are those of `python -m ckptstore.testing.simulation --seed N`. Nothing may be broken in any of them, and
each weakened protocol must be caught.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.arguments import count
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.testing.enumeration import enumerations
from ckptstore.testing.simulation import play
from ckptstore.testing.weakened import WEAKENED

SEEDS = 10_000
AT_ONCE = 20
SHOWN = 50
INVARIANTS = tuple(f"I{number}" for number in range(1, 18) if number != 9)  # noqa: PLR2004  (reserved)


@dataclass
class Sum:
    """What many histories came to.

    Args:
        seeds: How many they were.
        steps: Store calls and arrivals in all of them.
        seconds: Of CPU.
        looks: How often each invariant was looked at.
        seeds_with: In how many each was looked at.
        killed_before: How many processes had died in those.
        faults: By kind.
        kills: By place.
        records: By kind.
        complaints: With their seeds.
    """

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    looks: Counter[str] = field(default_factory=Counter)
    seeds_with: Counter[str] = field(default_factory=Counter)
    killed_before: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def add(self, other: Sum) -> None:
        """Count `other` in."""
        self.seeds, self.steps, self.seconds = (
            self.seeds + other.seeds,
            self.steps + other.steps,
            self.seconds + other.seconds,
        )
        for name in ("looks", "seeds_with", "killed_before", "faults", "kills", "records"):
            getattr(self, name).update(getattr(other, name))
        self.complaints += other.complaints


def main(argv: list[str]) -> int:
    """Play them, and write `simulation.json`; return 1 if anything is broken or a weakened protocol is not caught."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulate", description=__doc__)
    parser.add_argument("--seeds", type=count, default=SEEDS, help=f"how many histories. [{SEEDS}]")
    parser.add_argument("--first", type=int, default=0, help="the first seed. [0]")
    parser.add_argument("--processes", type=count, default=2, help="that play at once. [2]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    parser.add_argument("--histories-only", action="store_true", help="no enumerations and no weakened protocols")
    given = parser.parse_args(argv)
    names, weakened = (0, 0) if given.histories_only else (None, len(WEAKENED))
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        total = _simulated(pool.imap_unordered(summed, _batches(given.first, given.seeds)), given.seeds)
        wall = time.monotonic() - began
        enumerated = dict(pool.imap_unordered(enumerated_plays, [*enumerations()][:names]))
        mutants = pool.map(caught, range(weakened), chunksize=1)
    about = {
        "seeds": total.seeds,
        "first_seed": given.first,
        "steps": total.steps,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(total.seconds, 1),
        "simulations_per_cpu_second": round(total.seeds / total.seconds, 2),
        "faults": dict(total.faults.most_common()),
        "kills": dict(total.kills.most_common()),
        "records": dict(total.records.most_common()),
        "broken": total.complaints[:SHOWN],
        "enumerations": enumerated,
        "mutants": mutants,
    }
    path = results.write("simulation", _rows(total), about=about, folder=given.results)
    uncaught = [mutant["name"] for mutant in mutants if mutant["caught"] is None]
    broken = total.complaints + [each for plays in enumerated.values() for each in plays["broken"]]
    for line in broken[:SHOWN] + [f"nothing catches {name}" for name in uncaught]:
        print(line)
    print(path, f"{total.seeds} seeds, {len(broken)} broken, {len(mutants) - len(uncaught)} of {len(mutants)} caught")
    return 1 if broken or uncaught else 0


def summed(seeds: range) -> Sum:
    """Play the histories of `seeds` and count them."""
    total, began = Sum(), time.process_time()
    for seed in seeds:
        one = play(seed)
        died = sum(one.kills.values())
        total.seeds, total.steps = total.seeds + 1, total.steps + one.steps
        total.seeds_with.update(one.looks.keys())
        total.killed_before.update(dict.fromkeys(one.looks, died))
        for name, counted in (("looks", one.looks), ("faults", one.faults), ("kills", one.kills)):
            getattr(total, name).update(counted)
        total.records.update(one.kinds)
        total.complaints += [f"seed {seed}: {complaint}" for complaint in one.complaints]
    total.seconds = time.process_time() - began
    return total


def enumerated_plays(name: str) -> tuple[str, dict[str, Any]]:
    """Play one enumeration; return how many plays it has, and what they broke."""
    made: list[MemoryStore] = []

    def make() -> MemoryStore:
        made.append(MemoryStore())
        return made[-1]

    broken = list(enumerations()[name](make))
    return name, {"plays": len(made), "broken": broken[:SHOWN]}


def caught(index: int) -> dict[str, Any]:
    """Play one weakened protocol until it is caught."""
    weakened, began = WEAKENED[index], time.process_time()
    found = weakened.caught()
    return {
        "name": weakened.weaken.__name__,
        "why": (weakened.weaken.__doc__ or "").strip(),
        "invariant": weakened.invariant,
        "by": weakened.enumeration or "simulation",
        "caught": found,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def _batches(first: int, seeds: int) -> list[range]:
    return [range(start, min(start + AT_ONCE, first + seeds)) for start in range(first, first + seeds, AT_ONCE)]


def _simulated(sums: Iterator[Sum], seeds: int) -> Sum:
    total = Sum()
    for some in sums:
        total.add(some)
        for complaint in some.complaints:
            print(complaint, flush=True)
        if total.seeds % 1000 == 0 or total.seeds == seeds:
            print(f"{total.seeds} of {seeds} histories, {total.seconds:.0f} s of CPU", flush=True)
    return total


def _rows(total: Sum) -> Sequence[dict[str, Any]]:
    return [
        {
            "invariant": name,
            "states": total.looks[name],
            "seeds": total.seeds_with[name],
            "kills": total.killed_before[name],
            "violations": sum(f": {name}:" in complaint for complaint in total.complaints),
        }
        for name in INVARIANTS
    ]
