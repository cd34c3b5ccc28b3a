"""Metrics of a run from its bucket alone: whoever trains, or nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptstore.clock import Clock
from ckptstore.format.records import ABANDONED, QUARANTINED
from ckptstore.protocol.catalog import Catalog, Uncommitted
from ckptstore.protocol.fold import Fold
from ckptstore.protocol.lost import what_tells_of_lost_commits
from ckptstore.protocol.told import recovery_points
from ckptstore.telemetry.client import Values, ages, check_label, family
from ckptstore.telemetry.names import AGAINST

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


def bucket_families(catalog: Catalog, *, run: str, clock: Clock) -> list[Family]:
    """Return what the log and the data of a run say. Lists all data of the run, and writes nothing.

    Args:
        catalog: Of the run.
        run: What the operator calls it.
        clock: Where ages come from.

    Raises:
        InvalidInputError: `run` cannot be a label.
        IntegrityError: The log is damaged.
        UnsupportedError: `prometheus_client` is not installed, or a newer version wrote to the log.
        UnavailableError: The store could not be read. AccessDeniedError: it refused.
    """
    check_label(run)
    is_lost = what_tells_of_lost_commits(catalog.log) is not None
    attempts = {} if is_lost else _attempts(catalog.in_progress())  # of a lost log it is not known what was committed
    fold = catalog.log.fold
    values = {**_points(fold, clock), **_counts(fold), **attempts, **_claim(fold, clock)}
    values["checkpoint_run_exists"] = {(): is_lost or catalog.log.run is not None}
    values["checkpoint_log_tail_lost"] = {(): is_lost or catalog.log.lost_from is not None}
    return [family(name, each, run=run) for name, each in values.items()]


def _points(fold: Fold, clock: Clock) -> dict[str, Values]:
    told = recovery_points(fold)
    points = {name: point for name in AGAINST if (point := getattr(told, name)) is not None}
    steps = {name: point.global_step for name, point in points.items() if point.global_step is not None}
    newest = steps.get("committed")
    found: dict[str, Values] = {
        "checkpoint_recovery_point_seconds": ages({(name,): at.committed_at for name, at in points.items()}, clock),
    }
    if newest is not None:
        found["checkpoint_last_committed_step"] = {(): newest}
        found["checkpoint_recovery_point_steps"] = {(name,): max(0, newest - at) for name, at in steps.items()}
    return found


def _counts(fold: Fold) -> dict[str, Values]:
    reasons = Counter(each.set_aside for each in fold.kept)
    return {
        "checkpoint_commits_total": {(): fold.ever_committed},
        "checkpoint_kept_count": {(): len(fold.commits)},
        "checkpoint_kept_bytes": {(): sum(each.commit.shards.bytes for each in fold.kept)},
        "checkpoint_set_aside_count": {(reason,): reasons[reason] for reason in (ABANDONED, QUARANTINED)},
        "checkpoint_retired_count": {(): len(fold.retired)},
    }


def _attempts(attempts: list[Uncommitted]) -> dict[str, Values]:
    dead = [each for each in attempts if each.state == "dead"]
    return {
        "checkpoint_orphan_count": {(): len(dead)},
        "checkpoint_orphan_bytes": {(): sum(each.bytes for each in dead)},
        "checkpoint_uncommitted_count": {(): len(attempts) - len(dead)},
    }


def _claim(fold: Fold, clock: Clock) -> dict[str, Values]:
    waiting = fold.claim is not None and fold.tip is None
    found: dict[str, Values] = {"checkpoint_claimed_without_commit": {(): waiting}}
    if fold.claim is not None:
        found["checkpoint_claim_age_seconds"] = ages({(): fold.claim.written_at}, clock)
    return found


def values_of(families: list[Family]) -> Iterator[dict[str, object]]:
    """Yield each sample as plain values."""
    for each in families:
        for sample in each.samples:
            yield {"name": sample.name, "kind": each.type, "labels": dict(sample.labels), "value": float(sample.value)}
