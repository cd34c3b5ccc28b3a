"""Where a run stands: what must be the same right after a resume, before a step is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format import canonical
from ckptstore.format.canonical import read_fields
from ckptstore.training.proof import columns


@dataclass(frozen=True, slots=True)
class Moments:
    """What an optimizer remembers, counted.

    Args:
        tensors: How many it keeps.
        elements: Of them together.
        nonzero: How many elements are not zero: moments that were dropped are.
        blake3: Of this rank's bytes, or of their beginning; empty if that is not known.
        layout: Of the names and of the shapes of this rank's pieces; empty if that is not known.
    """

    tensors: int
    elements: int
    nonzero: int
    blake3: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Summed:
    """An optimizer's moments over all ranks, where ranks hold other pieces of them than they saved.

    Args:
        missing: Names that were saved, and that a rank lacks that should have them.
        more: Names that were not saved.
        dropped: Some were not zero on some rank, and all are zero on every rank now.
    """

    missing: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands.

    Args:
        global_step, epoch, micro_step, consumed_samples: Its progress.
        world_size: Ranks. Digests of one rank's bytes are compared on the same number only.
        lr: Of every parameter group, by optimizer.
        scale: By gradient scaler.
        moments: By optimizer.
        cursors: By sampler: samples of this epoch that were trained on, all ranks together. None: it cannot say.
    """

    global_step: int
    epoch: int
    micro_step: int
    consumed_samples: int
    world_size: int
    lr: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)
    cursors: Mapping[str, int | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(self)},
            "lr": {name: list(rates) for name, rates in self.lr.items()},
            "moments": {name: dataclasses.asdict(each) for name, each in self.moments.items()},
            "scale": dict(self.scale),
            "cursors": dict(self.cursors),
        }

    def without(self, components: Collection[str]) -> Self:
        """Return it without what it says of these components."""
        return dataclasses.replace(
            self,
            lr={name: each for name, each in self.lr.items() if name not in components},
            scale={name: each for name, each in self.scale.items() if name not in components},
            moments={name: each for name, each in self.moments.items() if name not in components},
            cursors={name: each for name, each in self.cursors.items() if name not in components},
        )

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return what `as_json` returned, or JSON made of it.

        Raises:
            IntegrityError: It is none.
        """
        try:
            return read_fields(
                cls,
                value,
                lr=canonical.mapping(canonical.sequence(canonical.number)),
                scale=canonical.mapping(canonical.number),
                moments=canonical.mapping(lambda each: read_fields(Moments, each)),
                cursors=canonical.mapping(canonical.optional(canonical.integer)),
            )
        except InvalidInputError as error:
            raise IntegrityError(
                f"Where the run stood is not told: {error.message}", hint="Run `ckptstore verify URL --level full`."
            ) from error


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared.

    Args:
        name: What.
        saved, now: As JSON.
        ok: None: it could not be compared.
        message: What it means, if it is not right.
    """

    name: str
    saved: Any
    now: Any
    ok: bool | None
    message: str = ""

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: {self.now}"
        return f"{self.name}: {self.saved} saved, {self.now} now. {self.message}".strip()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return dataclasses.asdict(self)


def static_checks(saved: Standing, now: Standing, *, summed: Mapping[str, Summed] | None = None) -> list[Check]:
    """Compare where a run stands after a resume with where it stood; nothing is trained for it.

    What could not be compared has `ok` None; what is wrong has False.

    Args:
        saved: As it was said then.
        now: As it is.
        summed: Of optimizers whose moments are of other shapes here, or laid out otherwise: what one rank holds is then
            no measure, and this counts.
    """
    whole = {f"moments {name}".strip(): each for name, each in (summed or {}).items()}
    same_size = saved.world_size == now.world_size
    return [
        *(
            _equal(name, getattr(saved, name), getattr(now, name), _WRONG[name])
            for name in ("global_step", "epoch", "micro_step", "consumed_samples")
        ),
        *_each("scale", saved.scale, now.scale, _scale),
        *_each("lr", saved.lr, now.lr, _rates),
        *_each(
            "moments",
            saved.moments,
            now.moments,
            lambda label, *said: _moments(label, *said, summed=whole.get(label), same=same_size),
        ),
        *_each("cursor", saved.cursors, now.cursors, _cursor),
    ]


def failed(checks: Iterable[Check]) -> list[Check]:
    """Return those that found something wrong."""
    return [each for each in checks if each.ok is False]


def checks_table(checks: Iterable[Check]) -> str:
    """Return them for people, a line for each."""
    words = {True: "ok", False: "WRONG", None: "unknown"}
    rows = [(each.name, each.saved, each.now, words[each.ok], each.message) for each in checks]
    return "\n".join(columns(("CHECKED", "SAVED", "NOW", "", ""), rows))


_WRONG = {
    "global_step": "The step was not restored.",
    "epoch": "The epoch was not restored.",
    "micro_step": "Accumulated gradients would be lost, or counted twice.",
    "consumed_samples": "The count of samples was not restored.",
}


def _equal(name: str, saved: Any, now: Any, wrong: str) -> Check:
    same = saved == now or (saved != saved and now != now)  # noqa: PLR0124  (two NaN)
    return Check(name, saved, now, same, "" if same else wrong)


def _each(
    what: str, saved: Mapping[str, Any], now: Mapping[str, Any], check: Callable[[str, Any, Any], Check]
) -> Iterator[Check]:
    for name in sorted(saved.keys() | now.keys()):
        label = f"{what} {name}".strip()
        if name in saved and name in now:
            yield check(label, saved[name], now[name])
        else:
            where = "was saved, and is not here" if name in saved else "is here, and was not saved"
            mine, theirs = _plain(saved.get(name)), _plain(now.get(name))
            yield Check(label, mine, theirs, ok=False, message=f"It {where}.")


def _scale(label: str, saved: float, now: float) -> Check:
    return _equal(label, saved, now, "The gradient scaler was not restored: it begins anew.")


def _rates(label: str, saved: tuple[float, ...], now: tuple[float, ...]) -> Check:
    wrong = (
        f"There were {len(saved)} parameter groups, and are {len(now)}."
        if len(saved) != len(now)
        else "The scheduler or the optimizer was not restored."
    )
    return _equal(label, list(saved), list(now), wrong)


def _moments(label: str, saved: Moments, now: Moments, *, summed: Summed | None, same: bool) -> Check:
    mine, theirs = _plain(saved), _plain(now)
    if summed is not None:
        return _summed(label, mine, theirs, summed)
    if not same:
        return Check(label, mine, theirs, None, "Another number of ranks holds other pieces of them.")
    if saved.tensors != now.tensors:
        return Check(label, mine, theirs, ok=False, message="Moments are missing, or there are more.")
    if saved.nonzero and not now.nonzero:
        return Check(label, mine, theirs, ok=False, message="The moments were dropped: all are zero.")
    differs = [name for name in ("elements", "nonzero") if getattr(saved, name) != getattr(now, name)]
    if saved.blake3 and now.blake3 and saved.blake3 != now.blake3:
        differs.append("blake3")
    wrong = f"The moments are not those that were saved: {', '.join(differs)}." if differs else ""
    return Check(label, mine, theirs, not differs, wrong)


def _summed(label: str, mine: Any, theirs: Any, summed: Summed) -> Check:
    wrong = [
        *([f"Moments are missing: {', '.join(summed.missing[:8])}."] if summed.missing else []),
        *([f"There are more moments than were saved: {', '.join(summed.more[:8])}."] if summed.more else []),
        *(["The moments were dropped: all are zero."] if summed.dropped else []),
    ]
    return Check(label, mine, theirs, not wrong, " ".join(wrong))


def _cursor(label: str, saved: int | None, now: int | None) -> Check:
    if saved is None or now is None:
        return Check(label, saved, now, None, "It cannot say where it is.")
    if now == 0 != saved:
        return Check(label, saved, now, ok=False, message="It stands at the beginning of the epoch.")
    return _equal(label, saved, now, "Samples would be left out, or come twice.")


def _plain(value: Any) -> Any:
    if isinstance(value, Moments):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value
