"""The proof of a resume: its first steps against those of the run that went on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ckptstore.training.tolerances import Tolerances, distance, is_within
from ckptstore.training.trace import Observation, Trace

Outcome = Literal["proved", "differs", "no_trace", "too_few_steps"]
FirstBatch = Literal["same", "other", "unknown"]

MAX_SHOWN = 10

_EXACT = ("global_step", "samples", "batch_digest", "scale")
_ALWAYS = ("scale", "lr")
"""What a run has or has not: one that has it does not go on as one that has not."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of one step, in both runs.

    Args:
        global_step: The control's.
        quantity: A field of `Observation`.
        control, resumed: As JSON; None: not measured.
        delta: By how much the resumed one is greater; of several, the greatest. None: not numbers.
        allowed: By how much it may differ.
        within: None: not compared, because one run did not measure it.
    """

    global_step: int
    quantity: str
    control: Any
    resumed: Any
    delta: float | None
    allowed: float | None
    within: bool | None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Proof:
    """What a comparison found.

    Args:
        verdict: `proved`; `differs`; `no_trace`: there is nothing to compare with; `too_few_steps`: nothing differs
            so far.
        rows: Every number of every compared step.
        resume_loss_delta: The first step's loss, resumed minus control; None if there is none.
        first_batch: Whether both began with the same samples.
        steps: How many were compared.
        steps_needed: How many must be.
        tolerances: What was allowed.
        notes: What a reader should know beside the verdict.
    """

    verdict: Outcome
    rows: tuple[Row, ...] = ()
    resume_loss_delta: float | None = None
    first_batch: FirstBatch = "unknown"
    steps: int = 0
    steps_needed: int = 0
    tolerances: Tolerances | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_proved(self) -> bool:
        """Whether the resumed run did what the other did."""
        return self.verdict == "proved"

    @property
    def differing(self) -> tuple[Row, ...]:
        """The numbers that are too far apart."""
        return tuple(row for row in self.rows if row.within is False)

    def summary(self) -> str:
        """Return it in a line: what the log records of a resume that was proved."""
        if self.verdict == "no_trace":
            return "no_trace: nothing is known of how the run went on"
        if self.verdict == "too_few_steps":
            return f"too_few_steps: {self.steps} of {self.steps_needed} steps, nothing differs so far"
        how = "exact" if self.tolerances is not None and self.tolerances.is_exact else "within tolerances"
        first = f"first batch {self.first_batch}, resume_loss_delta {_shown(self.resume_loss_delta)}"
        if self.verdict == "proved":
            return f"proved: {self.steps} steps, {how}, {first}"
        row = self.differing[0]
        names = ", ".join(dict.fromkeys(each.quantity for each in self.differing))
        return f"differs: {names}; first at step {row.global_step}, {first}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; numbers that are not finite are floats."""
        return {
            "verdict": self.verdict,
            "resume_loss_delta": self.resume_loss_delta,
            "first_batch": self.first_batch,
            "steps": self.steps,
            "steps_needed": self.steps_needed,
            "tolerances": None if self.tolerances is None else self.tolerances.as_json(),
            "notes": list(self.notes),
            "rows": [row.as_json() for row in self.rows],
        }

    def table(self) -> str:
        """Return it for people: a line for each quantity, then what differs."""
        lines = [self.summary()]
        if self.rows:
            names = dict.fromkeys(row.quantity for row in self.rows)
            lines += [
                "",
                *columns(_HEAD, [_line(name, [r for r in self.rows if r.quantity == name]) for name in names]),
            ]
        if self.differing:
            body = [
                (row.global_step, row.quantity, _shown(row.control), _shown(row.resumed), _shown(row.delta))
                for row in self.differing[:MAX_SHOWN]
            ]
            lines += ["", *columns(("STEP", "DIFFERS", "CONTROL", "RESUMED", "DELTA"), body)]
            if len(self.differing) > MAX_SHOWN:
                lines.append(f"... and {len(self.differing) - MAX_SHOWN} more")
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])


def compare(
    control: Trace | None,
    resumed: Trace,
    *,
    steps: int | None = None,
    tolerances: Tolerances | None = None,
    restart_loss: float | None = None,
) -> Proof:
    """Compare a resumed run with the one that went on.

    Args:
        control: The trace of the checkpoint; None or empty if it has none.
        resumed: What was observed since the resume.
        steps: How many must be compared; by default all of the control's.
        tolerances: By default the strictest that are honest under the conditions of both.
        restart_loss: What the first batch's loss would be with older weights, if that is known: the resumed one must be
            nearer to the control's than half of that.
    """
    if control is None or not control.observations:
        return Proof("no_trace")
    allowed = tolerances or Tolerances.between(control.conditions, resumed.conditions)
    needed = len(control.observations) if steps is None else max(1, min(steps, len(control.observations)))
    pairs = list(zip(control.observations[:needed], resumed.observations, strict=False))
    has_update = bool(control.update_of) and control.update_of == resumed.update_of
    rows = [row for at, pair in enumerate(pairs) for row in _rows(*pair, allowed, is_first=at == 0, update=has_update)]
    if pairs and control.update_of and resumed.update_of and not has_update:  # other weights move, or may move
        step = pairs[0][0].global_step
        rows.append(Row(step, "update_of", control.update_of, resumed.update_of, None, None, within=False))
    if pairs and restart_loss is not None:
        rows.append(_nearer(*pairs[0], restart_loss))
    differs = any(row.within is False for row in rows)
    says_something = any(math.isfinite(one.loss) for one, _ in pairs)
    verdict: Outcome = (
        "differs" if differs else "proved" if len(pairs) == needed and says_something else "too_few_steps"
    )
    return Proof(
        verdict=verdict,
        rows=tuple(rows),
        resume_loss_delta=distance(pairs[0][0].loss, pairs[0][1].loss) if pairs else None,
        first_batch=_first_batch(*pairs[0]) if pairs else "unknown",
        steps=len(pairs),
        steps_needed=needed,
        tolerances=allowed,
        notes=tuple(_notes(control, resumed, pairs, rows, allowed)),
    )


def _rows(one: Observation, other: Observation, allowed: Tolerances, *, is_first: bool, update: bool) -> Iterator[Row]:
    relative = {
        "loss": allowed.first_loss if is_first else allowed.loss,
        "grad_norm": allowed.grad_norm,
        "lr": allowed.lr,
        "update_norm": allowed.update_norm,
    }
    shown, others = one.as_json(), other.as_json()
    for name in ("global_step", "samples", "batch_digest", "loss", "grad_norm", "lr", "scale", "update_norm"):
        mine, theirs = shown[name], others[name]
        if mine is None and theirs is None:
            continue
        floor = allowed.loss_floor if name == "loss" else 0.0
        if (None in (mine, theirs) and name not in _ALWAYS) or (name == "update_norm" and not update):
            yield Row(one.global_step, name, mine, theirs, None, None, None)
        elif name in _EXACT or None in (mine, theirs):
            delta = None if isinstance(mine, str) or None in (mine, theirs) else distance(mine, theirs)
            yield Row(one.global_step, name, mine, theirs, delta, 0.0, mine == theirs or delta == 0)
        else:
            yield _near(one.global_step, name, (mine, theirs), relative=relative[name], floor=floor)


def _near(step: int, name: str, values: tuple[Any, Any], *, relative: float, floor: float) -> Row:
    """Return the row of numbers, or of lists of as many, that need not be equal."""
    mine, theirs = ([each] if isinstance(each, float) else list(each) for each in values)
    if len(mine) != len(theirs):
        return Row(step, name, *values, None, 0.0, within=False)
    pairs = list(zip(mine, theirs, strict=True))
    within = all(is_within(a, b, relative=relative, floor=floor) for a, b in pairs)
    deltas = [distance(a, b) for a, b in pairs]
    delta = next((each for each in deltas if math.isnan(each)), max(deltas, key=abs, default=0.0))
    finite = [abs(a) for a in mine if math.isfinite(a)]
    return Row(step, name, *values, delta, max([relative * each for each in finite] + [floor]), within)


def _nearer(one: Observation, other: Observation, restart_loss: float) -> Row:
    """Say whether the first loss tells a resume from a restart with older weights."""
    limit = abs(restart_loss - one.loss) / 2
    apart = distance(one.loss, other.loss)
    return Row(
        one.global_step,
        "loss_of_a_restart",
        restart_loss,
        other.loss,
        apart,
        limit,
        None if not limit or not math.isfinite(limit) else abs(apart) < limit,
    )


def _first_batch(one: Observation, other: Observation) -> FirstBatch:
    if one.batch_digest is None or other.batch_digest is None:
        return "unknown"
    return "same" if (one.batch_digest, one.samples) == (other.batch_digest, other.samples) else "other"


def _notes(
    control: Trace,
    resumed: Trace,
    pairs: Sequence[tuple[Observation, Observation]],
    rows: Sequence[Row],
    allowed: Tolerances,
) -> Iterator[str]:
    unlike = [
        f"{name} {getattr(control.conditions, name)} then, {getattr(resumed.conditions, name)} now"
        for name in ("world_size", "device", "dtype", "threads", "torch_version", "parallelism")
        if getattr(control.conditions, name) != getattr(resumed.conditions, name)
    ]
    if unlike:
        yield f"Conditions differ: {'; '.join(unlike)}."
    if missing := dict.fromkeys(
        row.quantity for row in rows if row.within is None and row.quantity != "loss_of_a_restart"
    ):
        yield f"Not compared, because one run did not measure it, or not the same: {', '.join(missing)}."
    if not any(row.quantity == "batch_digest" and row.within is not None for row in rows) and pairs:
        yield "Whether the batches were the same is not known: ids were not observed."
    for one, other in pairs:
        skipped = [_is_skipped(each) for each in (one, other)]
        if any(skipped):
            where = (
                "in both runs" if all(skipped) else "in the control only" if skipped[0] else "in the resumed run only"
            )
            yield f"The gradients of step {one.global_step} were not finite {where}: the scaler skips such a step."
    if unfinite := [one.global_step for one, _ in pairs if not math.isfinite(one.loss)]:
        yield f"The control's loss is not finite at {unfinite[:MAX_SHOWN]}: that it is so again says little."
    if any(row.quantity == "loss_of_a_restart" and row.within is None for row in rows):
        yield "Other weights have the same first loss, or none: it does not tell them apart."
    losses = [each.loss for each in control.observations if math.isfinite(each.loss)]
    moves = [abs(after - before) for before, after in pairwise(losses)]
    tolerated = max(allowed.first_loss * abs(losses[0]), allowed.loss_floor) if losses else 0.0
    if moves and tolerated > 0 and statistics.median(moves) <= 2 * tolerated:
        yield (
            f"A step moves the loss by {statistics.median(moves):.3g}, and {tolerated:.3g} is allowed: the loss alone "
            "does not tell these weights from older ones here."
        )


def _is_skipped(each: Observation) -> bool:
    return each.scale is not None and each.grad_norm is not None and not math.isfinite(each.grad_norm)


_HEAD = ("QUANTITY", "STEPS", "GREATEST DELTA", "ALLOWED", "")


def _line(name: str, rows: Sequence[Row]) -> tuple[object, ...]:
    compared = [row for row in rows if row.within is not None]
    if not compared:
        return name, 0, "", "", "not compared"
    numbers = [row for row in compared if row.delta is not None]
    worst = max(numbers, key=lambda row: math.inf if math.isnan(row.delta or 0) else abs(row.delta or 0), default=None)
    bad = [row for row in compared if row.within is False]
    said = f"differs from step {bad[0].global_step} on" if bad else "the same" if _all_equal(compared) else "within"
    return name, len(compared), *(("", "") if worst is None else (_shown(worst.delta), _shown(worst.allowed))), said


def _all_equal(rows: Iterable[Row]) -> bool:
    return all(row.control == row.resumed or row.delta == 0 for row in rows)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value[:4])) + (", ..." if len(value) > 4 else "")  # noqa: PLR2004
    return "not measured" if value is None else str(value)


def columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table for people, two spaces between the columns."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
