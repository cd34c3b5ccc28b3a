"""From a reshard that was tried to an entry of the matrix: what was compared, when, with which versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ckptstore.clock import Clock
from ckptstore.drills.degrees import Degrees
from ckptstore.drills.scenarios.reshard import Change
from ckptstore.errors import InvalidInputError
from ckptstore.training.compat import Entry, Matrix, spelled


@dataclass(frozen=True, slots=True)
class Evidence:
    """What turns an entry of the matrix to `verified`.

    Args:
        change: From what to what, as it was given.
        seen: What was compared, and the verdict.
        when: The day.
        versions: What it ran with, by name.
    """

    change: Change
    seen: str
    when: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, change: Change, seen: str, *, versions: Mapping[str, str], clock: Clock) -> Evidence:
        """Return the evidence of a drill that has passed now."""
        return cls(change, seen, clock.now().date().isoformat(), versions)

    def entry(self) -> Entry:
        """Return the entry that it is evidence for."""
        change = self.change
        built = f"{spelled(Degrees.read(change.saved).as_table())} to {spelled(Degrees.read(change.now).as_table())}"
        with_what = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        text = f"ckptstore drill reshard, {self.when}: {built} on gloo, with {with_what}; {self.seen}; passed"
        return Entry(dict(change.saved), dict(change.now), "verified", text)


def check_open(path: Path | None, change: Change) -> Matrix:
    """Return the matrix in a file, an empty one where there is none, if a drill may change what it says.

    Raises:
        InvalidInputError: It forbids the change, or another entry speaks of it too, or the file is no matrix.
    """
    matrix = Matrix.read(path) if path is not None and path.exists() else Matrix()
    saved, now = Degrees.read(change.saved).as_table(), Degrees.read(change.now).as_table()
    for entry in matrix.entries:
        if not entry.fits(saved, now):
            continue
        if entry.status == "forbidden":
            raise InvalidInputError(
                f"The matrix forbids it, and a drill does not change that: {entry}.",
                hint="Whoever forbade it can take the entry out.",
            )
        if entry.status != "verified" and not _is(entry, change):
            raise InvalidInputError(
                f"Another entry speaks of this change, and stays closed: {entry}.",
                hint=f"Drill that one: --from {spelled(entry.saved)} --to {spelled(entry.now)}.",
            )
    return matrix


def with_evidence(matrix: Matrix, evidence: Evidence) -> Matrix:
    """Return a matrix in which the change is verified; the entry stands where it stood."""
    entry, found = evidence.entry(), [_is(each, evidence.change) for each in matrix.entries]
    kept = tuple(entry if is_it else each for each, is_it in zip(matrix.entries, found, strict=True))
    return replace(matrix, entries=kept if any(found) else (*kept, entry))


def as_yaml(matrix: Matrix) -> str:
    """Return a matrix as it is written."""
    lines: Sequence[Mapping[str, Any]] = [
        {"from": dict(each.saved), "to": dict(each.now), "status": each.status}
        | ({} if each.evidence is None else {"evidence": each.evidence})
        for each in matrix.entries
    ]
    text: str = yaml.dump({"resume_compatibility": lines}, Dumper=_Dumper, sort_keys=False, width=120)
    return text


def _is(entry: Entry, change: Change) -> bool:
    """Whether an entry is the one of this change: it names the same degrees, but for those that are usual."""
    return _named(entry.saved) == _named(change.saved) and _named(entry.now) == _named(change.now)


def _named(degrees: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in degrees.items() if name == "fsdp" or value != int(name != "zero")}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Tables of degrees stand on one line, and nothing refers to anything."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  (PyYAML's)
        return True

    def represent_mapping(self, tag: Any, mapping: Any, flow_style: Any = None) -> Any:  # noqa: ARG002  (the same)
        flat = all(isinstance(value, int) for value in dict(mapping).values())
        return super().represent_mapping(tag, mapping, flow_style=flat)
