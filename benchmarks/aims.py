"""What we aim at, as measured ratios: each row says how far, how much it varied, and whether it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import results
from ckptstore.options import TransferOptions
from ckptstore.units import MIB

Documents = Mapping[str, Mapping[str, Any] | None]
ALLOWANCE_MIB = 64.0
"""What may come on top of the budgets: connections, plans, records."""
CPU, WALL, MEMORY = "cpu_seconds_per_gib", "wall_seconds", "peak_extra_mib"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of what was measured, and where it lies."""

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, runs: list[float]) -> Spread:
        """Return the spread of `runs`."""
        told = results.spread(runs)
        return cls(told["median"], told["min"], told["max"], len(runs))


@dataclass(frozen=True, slots=True)
class Aim:
    """One row.

    Args:
        what: Is measured.
        limit: At most so much.
        found: What was measured; None: it was not.
        peers: What others need, by name.
    """

    what: str
    limit: float
    found: Spread | None
    peers: Mapping[str, float]

    @property
    def is_met(self) -> bool | None:
        """By the median; None: not measured."""
        return None if self.found is None else self.found.median <= self.limit


def aims_of(documents: Documents) -> list[Aim]:
    """Return all aims with what `documents` (by the benchmark's name) say of them."""
    look = _Look(documents)
    return [*_on_s3(look), *_memory(look), *_on_files(look), *_in_the_background(look), *_small(look)]


class _Look:
    """Finds rows of what was measured."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def row(self, name: str, **wanted: str) -> Mapping[str, Any] | None:
        document = self._documents.get(name)
        for row in document["rows"] if document else ():
            if all(row.get(key) == value for key, value in wanted.items()) and "failed" not in row:
                return row  # type: ignore[no-any-return]  # JSON
        return None

    def runs(self, name: str, field: str, **wanted: str) -> list[float] | None:
        row = self.row(name, **wanted)
        return None if row is None or field not in row else row[field]["runs"]

    def plain(self, name: str, field: str, **wanted: str) -> Spread | None:
        runs = self.runs(name, field, **wanted)
        return None if runs is None else Spread.of(runs)

    def ratio(self, name: str, peer: str, to: str, **wanted: str) -> Spread | None:
        """Return how many times the wall time of `to` `peer` needs, round by round: they took turns."""
        ours = self.runs(name, WALL, peer=peer, **wanted)
        theirs = self.runs(name, WALL, peer=to, **wanted)
        if ours is None or theirs is None:
            return None
        return Spread.of([own / other for own, other in zip(ours, theirs, strict=False)])

    def peers(self, names: tuple[str, ...], find: Callable[[str], Spread | None]) -> dict[str, float]:
        return {name: round(found.median, 2) for name in names if (found := find(name)) is not None}


OTHERS_ON_S3 = ("s3torchconnector", "FsspecWriter", "torch.save")
OTHERS_ON_FILES = ("torch_checkpointing", "torch.save", "raw-file")
_WIRE = {"ours": "checksum on the wire", "ours-unchecked": "no checksum on the wire"}
_CPU_LIMITS = {("save", "ours"): 1.4, ("save", "ours-unchecked"): 1.2, ("load", "ours"): 1.9}
_RAW_LIMITS = {"save": 1.10, "load": 1.2}
_RAW = {"ours": "raw", "ours-unchecked": "raw-unchecked"}
_DOES = {"save": "save, hashed", "load": "load, verified"}


def _on_s3(look: _Look) -> Iterator[Aim]:
    for (act, peer), limit in _CPU_LIMITS.items():

        def cpu(name: str, act: str = act) -> Spread | None:
            return look.plain(act, CPU, store="s3", peer=name)

        what = f"s3, {_DOES[act]}{f', {_WIRE[peer]}' if act == 'save' else ''}: client CPU s per GiB"
        yield Aim(what, limit, cpu(peer), look.peers(OTHERS_ON_S3, cpu))
    for act, limit in _RAW_LIMITS.items():
        for peer, raw in _RAW.items() if act == "save" else (("ours", "raw"),):

            def wall(name: str, act: str = act, raw: str = raw) -> Spread | None:
                return look.ratio(act, name, raw, store="s3")

            what = f"s3, {_DOES[act]}{f', {_WIRE[peer]}' if act == 'save' else ''}: wall ÷ raw"
            yield Aim(what, limit, wall(peer), look.peers(OTHERS_ON_S3, wall))


def _memory(look: _Look) -> Iterator[Aim]:
    limit = transfer_mib() + ALLOWANCE_MIB
    for act in ("save", "load"):

        def peak(name: str, act: str = act) -> Spread | None:
            return look.plain(act, MEMORY, store="s3", peer=name)

        yield Aim(f"s3, {act}: peak extra MiB", limit, peak("ours"), look.peers(OTHERS_ON_S3, peak))


def _on_files(look: _Look) -> Iterator[Aim]:
    for act, limit in (("save", 0.7), ("load", 0.8)):

        def wall(name: str, act: str = act) -> Spread | None:
            return look.ratio(act, name, "FileSystemWriter", store="file")

        what = f"files in memory, {_DOES[act]}: wall ÷ {_theirs(act)}"
        yield Aim(what, limit, wall("ours"), look.peers(OTHERS_ON_FILES, wall))


def _in_the_background(look: _Look) -> Iterator[Aim]:
    def stood(name: str) -> Spread | None:
        return look.plain("stall", "blocked_by_copies", act="stall", budget="whole", peer=name)

    what = "async, from the second save on, it fits the budget: time blocked ÷ one copy of the state"
    yield Aim(what, 1.3, stood("ours"), look.peers(("FileSystemWriter",), stood))
    for budget in ("whole", "half"):

        def held(name: str, budget: str = budget) -> Spread | None:
            return look.plain("stall", MEMORY, act="pile_up", budget=budget, peer=name)

        row = look.row("stall", act="pile_up", budget=budget, peer="ours")
        limit = (row["budgets_mib"]["median"] if row else 0.0) + ALLOWANCE_MIB
        what = f"async, three in a row, staging {budget} of the state: peak extra MiB"
        yield Aim(what, limit, held("ours"), look.peers(("FileSystemWriter",), held))


def _small(look: _Look) -> Iterator[Aim]:
    for act in ("save", "load"):

        def wall(name: str, act: str = act) -> Spread | None:
            return look.ratio("small", name, "FileSystemWriter", act=act)

        what = f"many tensors of 1 KiB, {act}: wall ÷ {_theirs(act)}"
        yield Aim(what, 0.45, wall("ours"), {"FileSystemWriter": 1.0})


def transfer_mib() -> float:
    """Return the budget for bytes on their way that a rank has by default, in MiB."""
    return TransferOptions().transfer_bytes / MIB


def _theirs(act: str) -> str:
    return "FileSystemWriter" if act == "save" else "FileSystemReader"
