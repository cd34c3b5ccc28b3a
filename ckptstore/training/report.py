"""What a resume did: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.training.proof import Proof
from ckptstore.units import some


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer checkpoint that was not resumed from.

    Args:
        checkpoint_id, seq, global_step: Which one.
        reason: What is wrong with it.
    """

    checkpoint_id: str
    seq: int
    global_step: int | None
    reason: str


@dataclass(slots=True)
class ResumeReport:
    """What a resume did.

    Args:
        url: Root of the run that was resumed from; None on a fresh start.
        run: Its identity.
        checkpoint_id, seq, global_step: The checkpoint.
        committed_at: When its record was made, by its writer's clock: ISO 8601 in UTC.
        is_fresh: There was nothing to resume from, and nothing was changed.
        passed_over: Newer ones that are damaged.
        steps_lost: By which the newest of these is ahead, if it is; None: it does not say its step.
        samples_lost: So many samples at least were trained after it and are trained again: as far as newer checkpoints
            count them in `consumed_samples`, or what was recorded right after it. None: the run does not count them.
        set_aside: Newer ones that are selectable no more, because the run went back behind them, as `name@seq`.
        saved_world_size, world_size: Ranks then and now.
        saved_parallelism, parallelism: Degrees then and now.
        decision: What allows this change of topology.
        accepted: Differences that were allowed, each with old and new.
        migrated: What turned what was saved into what is here, by name.
        fresh: Components that begin anew, which was allowed.
        left: Components that were saved and not taken, which was allowed.
        unchecked: Fingerprints that were not saved: nothing says whether they are the same.
        restored: Components, in order.
        without_state: Parameters that have no moments, because they had none when saved.
        frozen_otherwise: Parameters that were trained then and are frozen now, or the other way round. The program says
            which are; nothing of it is restored.
        of_one_rank: Components of which ranks held different tensors under the same names when saved: of each tensor
            there is one rank's.
        lost_from: The slot from which on the log has lost records, as far as is known; what they committed is gone.
        random: What was done for random numbers.
        checks: What was compared after everything was restored.
        bytes_fetched: By this rank.
        seconds: Time by phase.
        proof: How the first steps compare with the run that went on; None while they are not known.
    """

    url: str | None = None
    run: str | None = None
    checkpoint_id: str | None = None
    seq: int | None = None
    global_step: int | None = None
    committed_at: str | None = None
    is_fresh: bool = True
    passed_over: tuple[PassedOver, ...] = ()
    steps_lost: int | None = 0
    samples_lost: int | None = 0
    set_aside: tuple[str, ...] = ()
    saved_world_size: int | None = None
    world_size: int = 1
    saved_parallelism: Mapping[str, int] = field(default_factory=dict)
    parallelism: Mapping[str, int] = field(default_factory=dict)
    decision: str = ""
    accepted: tuple[str, ...] = ()
    migrated: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()
    frozen_otherwise: tuple[str, ...] = ()
    of_one_rank: tuple[str, ...] = ()
    lost_from: int | None = None
    random: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    bytes_fetched: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    proof: Proof | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as what JSON has; numbers that are not finite are text, such as `NaN`."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain["passed_over"] = [dataclasses.asdict(each) for each in self.passed_over]
        plain["proof"] = None if self.proof is None else self.proof.as_json()
        return {name: _plain(value) for name, value in plain.items()}

    def table(self) -> str:
        """Return it for people, a line for each thing that can be said."""
        if self.is_fresh:
            return "A fresh start: nothing is committed yet."
        lines = [
            ("resumed from", f"{self.checkpoint_id} (step {self.global_step}, seq {self.seq}) of {self.url}"),
            *(("passed over", f"{each.checkpoint_id} (seq {each.seq}): {each.reason}") for each in self.passed_over),
            *([("steps lost", str(self.steps_lost))] if self.passed_over else []),
            *([("set aside", some(self.set_aside))] if self.set_aside else []),
            ("ranks", f"{self.saved_world_size} then, {self.world_size} now"),
            ("parallelism", f"{_shown(self.saved_parallelism)} then, {_shown(self.parallelism)} now"),
            ("allowed by", self.decision),
            *(("accepted", each) for each in self.accepted),
            *(("migrated", each) for each in self.migrated),
            *([("begin anew", some(self.fresh))] if self.fresh else []),
            *([("left", some(self.left))] if self.left else []),
            *([("not compared", f"{some(self.unchecked)}: not saved")] if self.unchecked else []),
            ("restored", ", ".join(self.restored)),
            *([("no moments", some(self.without_state))] if self.without_state else []),
            *([("frozen", some(self.frozen_otherwise))] if self.frozen_otherwise else []),
            *([("of one rank", f"{some(self.of_one_rank)}: ranks held others")] if self.of_one_rank else []),
            *([("lost", f"records from slot {self.lost_from} on")] if self.lost_from is not None else []),
            *(("random numbers", each) for each in self.random),
            *(("checked", each) for each in self.checks),
            ("fetched", f"{self.bytes_fetched} bytes in {sum(self.seconds.values()):.2f} s"),
            ("proof", "not known yet" if self.proof is None else self.proof.verdict),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _shown(parallelism: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {degree}" for name, degree in sorted(parallelism.items())) or "not said"
