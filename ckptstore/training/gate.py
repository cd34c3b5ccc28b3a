"""The gate: whether a checkpoint may be resumed here. Decided from facts alone, before anything is allocated or read.

Everything that differs must be accounted for: it is allowed by name, a migrator covers it, or the matrix opens it. The
rest is refused, all of it at once, with what it was and what it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import IncompatibleStateError, InvalidInputError
from ckptstore.training.compat import OTHER, Decision, Matrix
from ckptstore.training.differences import ABSENT, Difference, differences, named
from ckptstore.training.migrate import Migrator
from ckptstore.training.topology import normal

COMPONENTS = "components"
_PLACES = ("schedulers", "scalers", "samplers", "loaders")
"""Kinds of components whose state means nothing to one of another kind: where that is allowed, they begin anew."""
_ARCHITECTURE = ("models", "optimizers")
"""They decide which tensors there are: a name alone does not open them, but for what an optimizer was made with."""
_MAX_FACTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a checkpoint, or a program, says of itself.

    Args:
        fingerprints: Digests by name.
        documents: What stands behind them, by the same names, where it is known.
        parallelism: Degrees by name; empty if it does not say.
        world_size: Ranks.
        state: What its parts are: `components` by name, and facts by kind (`models`, `optimizers`, `precision`, …).
    """

    fingerprints: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateReport:
    """Why a checkpoint may be resumed.

    Args:
        decision: What the matrix says of the topology.
        accepted: Differences that were allowed by name.
        migrated: Differences that a migrator covers, with its name.
        fresh: Components that begin anew, because they were not saved, or another kind was: that was allowed.
        left: Components that were saved and are not taken: that was allowed.
        unchecked: Fingerprints that the checkpoint does not have.
    """

    decision: Decision
    accepted: tuple[Difference, ...] = ()
    migrated: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    unchecked: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "decision": self.decision.as_json(),
            "accepted": [each.as_json() for each in self.accepted],
            "migrated": list(self.migrated),
            "fresh": sorted(self.fresh),
            "left": sorted(self.left),
            "unchecked": list(self.unchecked),
        }


def check(
    saved: Facts,
    now: Facts,
    *,
    matrix: Matrix | None = None,
    migrators: Sequence[Migrator] = (),
    allow: Collection[str] = (),
    only: Collection[str] | None = None,
) -> GateReport:
    """Decide whether what was saved may be resumed by what is here.

    Args:
        saved: What the checkpoint says.
        now: What the program says.
        matrix: Which changes of topology are known to work; by default only data parallelism may change.
        migrators: What can make up for differences.
        allow: What may differ: fingerprints by name; components, which then begin anew or are left; other facts by
            their path, such as `precision` or `precision.autocast`; `parallelism` where the checkpoint says none.
        only: Components that are taken; the others are not compared. None: all.

    Raises:
        IncompatibleStateError: It may not; every difference is named with old and new, and what would open the way.
        InvalidInputError: `allow` or `only` is no collection of names.
    """
    judging = _Judging(
        saved, now, tuple(migrators), names_given("allow", allow), None if only is None else names_given("only", only)
    )
    decision = (matrix or Matrix()).judge(saved.parallelism, now.parallelism)
    if not saved.parallelism:
        decision = Decision(OTHER, "unknown", {}, normal(now.parallelism))
    judging.topology(decision)
    judging.fingerprints()
    judging.state()
    if judging.refused:
        raise judging.error(decision)
    return GateReport(
        decision,
        tuple(judging.accepted),
        tuple(f"{difference} (by {name})" for difference, name in judging.covered),
        frozenset(judging.fresh),
        frozenset(judging.left),
        tuple(sorted(now.fingerprints.keys() - saved.fingerprints.keys())),
    )


@dataclass
class _Judging:
    """One judgement."""

    saved: Facts
    now: Facts
    migrators: tuple[Migrator, ...]
    allow: frozenset[str]
    only: frozenset[str] | None
    refused: list[Difference] = field(default_factory=list)
    accepted: list[Difference] = field(default_factory=list)
    covered: list[tuple[Difference, str]] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    openers: set[str] = field(default_factory=set)
    """What `allow` would have to name."""

    def topology(self, decision: Decision) -> None:
        """Judge what the matrix does not open."""
        if decision.is_open:
            return
        if not self.saved.parallelism:
            shown = dict(decision.now)
            self._judge(Difference("parallelism", ABSENT, shown), "parallelism")
            return
        names = [*decision.saved, *(name for name in decision.now if name not in decision.saved)]
        found = [
            Difference(f"parallelism.{name}", decision.saved.get(name, 1), decision.now.get(name, 1))
            for name in names
            if decision.saved.get(name, 1) != decision.now.get(name, 1)
        ]
        migrators = [self._migrator(each) for each in found]
        if decision.status == "forbidden" or not all(migrators):
            self.refused += found
            return
        self.covered += [(each, by.name) for each, by in zip(found, migrators, strict=True) if by is not None]

    def fingerprints(self) -> None:
        """Judge every fingerprint that the checkpoint has."""
        for name, digest in sorted(self.saved.fingerprints.items()):
            other = self.now.fingerprints.get(name)
            if digest == other:
                continue
            for each in self._behind(name, digest, other):
                self._judge(each, name)

    def _behind(self, name: str, digest: str, other: str | None) -> list[Difference]:
        """Return what two digests differ in, as far as the documents behind them say."""
        if other is not None and name in self.saved.documents and name in self.now.documents:
            found = differences(self.saved.documents[name], self.now.documents[name], at=("fingerprints", name))
            if found or digest.partition(":")[0] != other.partition(":")[0]:  # two kinds of digest of one document
                return found
        return [Difference(f"fingerprints.{name}", digest, ABSENT if other is None else other)]

    def state(self) -> None:
        """Judge which components there are, and what they are."""
        saved, now = self.saved.state, self.now.state
        if not saved and not now:
            return
        if not saved:
            self._judge(Difference("state", ABSENT, sorted(now.get(COMPONENTS, []))), "state")
            return
        there, here = ({*side.get(COMPONENTS, [])} for side in (saved, now))
        alone = {name for name in there ^ here if self._is_wanted(name)}
        for name in sorted(alone):
            sides = ("saved", ABSENT) if name in there else (ABSENT, "used")
            if self._judge(Difference(f"state.{COMPONENTS}.{name}", *sides), name):
                (self.left if name in there else self.fresh).add(name)
        skipped = (there ^ here) | {name for name in there | here if not self._is_wanted(name)}
        for kind in sorted({*saved, *now} - {COMPONENTS}):
            was, is_now = (_without(side.get(kind, {}), skipped) for side in (saved, now))
            for name in sorted({*was, *is_now}):
                found = differences(was.get(name, ABSENT), is_now.get(name, ABSENT), at=("state", kind, name))
                self._facts(kind, name, found)

    def _facts(self, kind: str, name: str, found: Sequence[Difference]) -> None:
        """Judge how one component, or one setting, differs."""
        for each in found:
            allowed = self._judge(each, None if _is_architecture(each) else each.path.removeprefix("state."))
            if allowed and kind in _PLACES:
                self.fresh.add(name)

    def _is_wanted(self, component: str) -> bool:
        return self.only is None or bool({component, component.partition(".")[0]} & self.only)

    def _judge(self, difference: Difference, opener: str | None) -> bool:
        """Account for a difference if something does; return whether it was allowed by name."""
        if opener is not None and any(name in self.allow for name in _prefixes(opener)):
            self.accepted.append(difference)
            return True
        migrator = self._migrator(difference)
        if migrator is not None:
            self.covered.append((difference, migrator.name))
            return False
        self.refused.append(difference)
        if opener is not None:
            self.openers.add(opener)
        return False

    def _migrator(self, difference: Difference) -> Migrator | None:
        return next((each for each in self.migrators if each.covers(difference)), None)

    def error(self, decision: Decision) -> IncompatibleStateError:
        """Return the refusal, with all that is known."""
        covered = [f"{difference} (covered by {name})" for difference, name in self.covered]
        facts = [each.as_json() for each in self.refused]
        facts += [{**difference.as_json(), "covered_by": name} for difference, name in self.covered]
        ways = list(self._ways(decision))
        return IncompatibleStateError(
            f"The checkpoint does not fit this program in {len(self.refused)} "
            f"{'thing' if len(self.refused) == 1 else 'things'}: {named([*self.refused, *covered])}.",
            hint=" ".join(ways),
            differences=facts[:_MAX_FACTS],
            count=len(self.refused),
            ways=ways,
        )

    def _ways(self, decision: Decision) -> Iterator[str]:
        """Yield a sentence for each kind of what was refused: what would open it."""
        kinds = {_kind(each) for each in self.refused}
        if "parallelism" in kinds and self.saved.parallelism:
            yield decision.way
        if any(map(_is_architecture, self.refused)):
            yield "Build the model and the optimizer as they were saved, or pass a Migrator that covers what changed."
        if self.openers:
            names = ", ".join(repr(name) for name in sorted(self.openers))
            yield f"If a difference is meant, name what may differ: allow=[{names[:400]}]."


def _kind(difference: Difference) -> str:
    """Return what a difference is of: `parallelism`, `fingerprints`, or the kind of facts."""
    domain, _, rest = difference.path.partition(".")
    return rest.partition(".")[0] if domain == "state" else domain


def _is_architecture(difference: Difference) -> bool:
    return _kind(difference) in _ARCHITECTURE and ".defaults" not in difference.path


def _prefixes(opener: str) -> Iterator[str]:
    """Yield a path and all above it: `precision.autocast`, `precision`."""
    while opener:
        yield opener
        opener = opener.rpartition(".")[0]


def _without(facts: Any, skipped: set[str]) -> Mapping[str, Any]:
    """Return facts of one kind without components that are not compared."""
    if not isinstance(facts, Mapping):
        return {"": facts}
    return {name: value for name, value in facts.items() if name not in skipped}


def names_given(what: str, value: object) -> frozenset[str]:
    """Return what was given as names; one text is not its letters.

    Raises:
        InvalidInputError: It is no collection of texts.
    """
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(each, str) for each in value):
        raise InvalidInputError(f"{what} must be a list of names, not {value!r:.80}.", hint=f"Say {what}=['…'].")
    return frozenset(value)
