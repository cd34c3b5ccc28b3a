"""The compatibility matrix: from which topology to which a run may be resumed, and what shows that it may.

```yaml
resume_compatibility:
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to: {dp: 4, tp: 16, pp: 1, zero: 1}
    status: verified        # or blocked_until_drill_passes, or forbidden
    evidence: reports/drill-2026-05-04.json
```

An entry means what it names; degrees that it does not name are 1, `zero` is 0, and `fsdp` may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml

from ckptstore.errors import IncompatibleStateError, InvalidInputError
from ckptstore.training.topology import NEUTRAL, normal
from ckptstore.units import MIB

Status = Literal["verified", "blocked_until_drill_passes", "forbidden"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""The weakest first."""
MAX_MATRIX_BYTES = MIB
MAX_ENTRIES = 10_000
MAX_LEVELS = 20
"""Of what stands within what in its text; a matrix has four."""

SAME, DATA_PARALLEL, OTHER = 0, 1, 2
"""Categories: the same topology; only data parallelism changes; anything else."""

_DATA_PARALLEL = frozenset({"dp", "fsdp"})
_ROOT: Final = "resume_compatibility"
_HINT = f"Write it as `{_ROOT}:` with a list of `from`, `to`, `status` and `evidence`."


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the matrix.

    Args:
        saved: Degrees when it was saved.
        now: Degrees when it is resumed.
        status: What is known of it.
        evidence: What shows it: the report of a drill, say.
    """

    saved: Mapping[str, int]
    now: Mapping[str, int]
    status: Status
    evidence: str | None = None

    def fits(self, saved: Mapping[str, int], now: Mapping[str, int]) -> bool:
        """Say whether it speaks of this change."""
        return _fits(self.saved, saved) and _fits(self.now, now)

    def __str__(self) -> str:
        return f"{spelled(self.saved)} → {spelled(self.now)}: {self.status}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a topology may take over from another one, and why.

    Args:
        category: 0 the same, 1 only data parallelism changes, 2 anything else.
        status: `same`, `allowed`, `unknown`, or the entry's.
        saved: Degrees when it was saved.
        now: Degrees now.
        entry: The entry that decided, if one did.
    """

    category: int
    status: Literal["same", "allowed", "unknown"] | Status
    saved: Mapping[str, int]
    now: Mapping[str, int]
    entry: Entry | None = None

    @property
    def evidence(self) -> str | None:
        """What shows that it may."""
        return self.entry.evidence if self.entry is not None else None

    @property
    def is_open(self) -> bool:
        """Whether it may. Anything but another number of data-parallel ranks needs evidence."""
        if self.category == OTHER:
            return self.status == "verified" and self.evidence is not None
        return self.status in ("same", "allowed", "verified")

    @property
    def drill(self) -> str:
        """The command that tries it."""
        return f"ckptstore drill reshard URL --from {spelled(self.saved)} --to {spelled(self.now)}"

    @property
    def way(self) -> str:
        """What would open it, as a sentence."""
        if self.status == "forbidden":
            return "The matrix forbids it: resume with another topology."
        if self.status == "verified":
            return f"Its entry names no evidence: run `{self.drill} --matrix FILE`, which enters it."
        return f"Run `{self.drill} --matrix FILE`, which enters it into the matrix as verified, with its evidence."

    def __str__(self) -> str:
        change = "the same topology" if self.category == SAME else f"{spelled(self.saved)} → {spelled(self.now)}"
        said = {"same": "", "allowed": ": only data parallelism changes", "unknown": ": no entry speaks of it"}
        shown = said.get(self.status, f": {self.status}" + (f" ({self.evidence})" if self.evidence else ""))
        return f"category {self.category}, {change}{shown}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "category": self.category,
            "status": self.status,
            "from": dict(self.saved),
            "to": dict(self.now),
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is known of changes of topology. Empty: only data parallelism may change.

    Args:
        entries: What was tried, or is forbidden.
    """

    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, source: Path | str | Sequence[Any] | Mapping[str, Any]) -> Matrix:
        """Return the matrix in a file, in YAML or JSON text, or in plain values.

        Args:
            source: A path; text; a list of entries; or a table with the list under `resume_compatibility`. Text of one
                line that ends in `.yaml`, `.yml` or `.json` is a path.

        Raises:
            InvalidInputError: It is no matrix: which entry, and what is wrong with it, is named.
        """
        if isinstance(source, str) and "\n" not in source and source.endswith((".yaml", ".yml", ".json")):
            source = Path(source)
        what = f"The matrix {source}" if isinstance(source, Path) else "The matrix"
        if isinstance(source, Path):
            source = _text_of(source)
        value = _parsed(source, what) if isinstance(source, str) else source
        if isinstance(value, Mapping):
            if set(value) != {_ROOT}:
                raise InvalidInputError(
                    f"{what} has the keys {sorted(map(str, value))[:8]}, not {_ROOT!r}.", hint=_HINT
                )
            value = value[_ROOT]
        if not isinstance(value, list | tuple) or len(value) > MAX_ENTRIES:
            raise InvalidInputError(f"{what} holds no list of at most {MAX_ENTRIES} entries.", hint=_HINT)
        entries = tuple(_entry(each, f"{what}: entry {place + 1}") for place, each in enumerate(value))
        _check_one_voice(entries, what)
        return cls(entries)

    def judge(self, saved: Mapping[str, int], now: Mapping[str, int]) -> Decision:
        """Return what is to be thought of a change; of several entries that speak of it the strictest counts."""
        saved, now = normal(saved), normal(now)
        differing = {name for name in {*saved, *now} if saved.get(name, 1) != now.get(name, 1)}
        category = SAME if not differing else DATA_PARALLEL if differing <= _DATA_PARALLEL else OTHER
        if category == SAME:
            return Decision(category, "same", saved, now)
        speaking = [entry for entry in self.entries if entry.fits(saved, now)]
        if not speaking:
            return Decision(category, "allowed" if category == DATA_PARALLEL else "unknown", saved, now)
        strictest = max(speaking, key=lambda entry: (STATUSES.index(entry.status), entry.evidence is None))
        return Decision(category, strictest.status, saved, now, strictest)

    def decide(self, saved: Mapping[str, int], now: Mapping[str, int]) -> Decision:
        """Return what allows a change.

        Raises:
            IncompatibleStateError: Nothing does; the drill that would is named.
        """
        decision = self.judge(saved, now)
        if not decision.is_open:
            raise IncompatibleStateError(
                f"This topology may not resume what was saved: {decision}.",
                hint=decision.way,
                **{name: value for name, value in decision.as_json().items() if name != "evidence"},
            )
        return decision


def spelled(degrees: Mapping[str, int]) -> str:
    """Return degrees as a command takes them: `dp=8,tp=8,pp=1,zero=1`."""
    usual = [name for name in NEUTRAL if name in degrees]
    return ",".join(f"{name}={degrees[name]}" for name in [*usual, *sorted(set(degrees) - set(NEUTRAL))])


def _fits(entry: Mapping[str, int], degrees: Mapping[str, int]) -> bool:
    meant = normal(entry)
    if "fsdp" not in entry:
        meant["fsdp"] = degrees["fsdp"]
    return meant == normal(degrees)


def _entry(value: object, what: str) -> Entry:
    if not isinstance(value, Mapping) or not {"from", "to", "status"} <= set(value) <= {
        "from",
        "to",
        "status",
        "evidence",
    }:
        raise InvalidInputError(f"{what} has not the keys from, to, status and evidence.", hint=_HINT)
    status, evidence = value["status"], value.get("evidence")
    if status not in STATUSES:
        raise InvalidInputError(f"{what} has the status {status!r:.80}.", hint=f"Use one of {', '.join(STATUSES)}.")
    if evidence is not None and not (isinstance(evidence, str) and evidence.strip()):
        raise InvalidInputError(f"{what} has evidence that is no text.", hint="Name the report of the drill.")
    return Entry(_degrees(value["from"], f"{what}, from"), _degrees(value["to"], f"{what}, to"), status, evidence)


def _degrees(value: object, what: str) -> dict[str, int]:
    if not isinstance(value, Mapping) or not value:
        raise InvalidInputError(f"{what} is no table of degrees.", hint="Write it as {dp: 8, tp: 8, pp: 1, zero: 1}.")
    for name, degree in value.items():
        wrong = isinstance(degree, bool) or not isinstance(degree, int) or degree < (0 if name == "zero" else 1)
        if not isinstance(name, str) or wrong:
            raise InvalidInputError(
                f"{what}: {name!r:.40} cannot be {degree!r:.40}.", hint="Degrees are whole numbers."
            )
    return dict(value)


def _check_one_voice(entries: Sequence[Entry], what: str) -> None:
    seen: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        change = tuple(
            spelled(normal(side) | ({} if "fsdp" in side else {"fsdp": 0})) for side in (entry.saved, entry.now)
        )
        other = seen.setdefault((change[0], change[1]), entry)
        if other is not entry:
            raise InvalidInputError(
                f"{what} speaks twice of one change: {other}, and {entry}.", hint="Keep one of them."
            )


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_MATRIX_BYTES:
            raise InvalidInputError(f"The matrix {path} is larger than {MAX_MATRIX_BYTES} bytes.", hint=_HINT)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"The matrix {path} cannot be read: {error}", hint=_HINT, path=str(path)) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML of few levels, without references, which make a small text large, and without keys that stand twice."""

    _levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError(f"a reference at {self.peek_event().start_mark}")
        if self._levels == MAX_LEVELS:
            raise yaml.YAMLError(f"more than {MAX_LEVELS} levels at {self.peek_event().start_mark}")
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  (PyYAML's)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if len(found) != len(node.value):
            raise yaml.YAMLError(f"a key stands twice at {node.start_mark}")
        return found


def _parsed(text: str, what: str) -> Any:
    if len(text) > MAX_MATRIX_BYTES:
        raise InvalidInputError(f"{what} is longer than {MAX_MATRIX_BYTES} letters.", hint=_HINT)
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (it is a SafeLoader)
    except Exception as error:  # whatever broken text makes of a constructor
        raise InvalidInputError(f"{what} is no YAML: {str(error)[:300]}", hint=_HINT) from error
