"""`prometheus_client`, or the one sentence that says how to get it; and what metrics are made with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ckptstore.clock import Clock
from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.telemetry.names import METRICS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

RUN = "run"
"""The label that every metric has: what the operator calls the run; empty if there is one only."""

LABEL_CHARACTERS = 256

Values = Mapping[tuple[str, ...], float]
"""Values of one metric, by the values of its labels."""


def prometheus() -> Any:
    """Return the module `prometheus_client`.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import prometheus_client.core  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise UnsupportedError(
            "Metrics need prometheus_client, which is not installed.", hint="pip install 'ckptstore[metrics]'"
        ) from error
    return prometheus_client


def check_label(run: object) -> None:
    """Check that a text can be the label `run`.

    Raises:
        InvalidInputError: It is no text, too long, or holds what cannot be printed on one line.
    """
    if not isinstance(run, str) or len(run) > LABEL_CHARACTERS or not run.isprintable():
        raise InvalidInputError(
            f"A run's label must be a text of one line and at most {LABEL_CHARACTERS} characters, not {run!a:.80}.",
            hint="Give run a short name: Metrics(run='llama-7b'), or --run llama-7b.",
            option="run",
        )


def family(name: str, values: Values, *, run: str) -> Family:
    """Return the values of a gauge or a counter as what a registry collects.

    Args:
        name: In `METRICS`.
        values: By its labels.
        run: What the operator calls the run.
    """
    core, metric = prometheus().core, METRICS[name]
    make = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    made: Family = make(name, metric.help, labels=(RUN, *metric.labels))
    for labels, value in values.items():
        made.add_metric((run, *labels), value)  # type: ignore[attr-defined]
    return made


def exposition(families: Iterable[Family]) -> bytes:
    """Return families in Prometheus' text format."""
    client, held = prometheus(), list(families)
    registry: CollectorRegistry = client.CollectorRegistry()
    registry.register(Collected(lambda: held))
    text: bytes = client.generate_latest(registry)
    return text


class Collected:
    """What a registry asks when it is collected.

    Args:
        families: Returns them as they are now.
    """

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self.collect = families


def ages(moments: Mapping[tuple[str, ...], str], clock: Clock) -> Values:
    """Return how many seconds ago records were made; what its clock has before ours counts as now.

    Args:
        moments: What the records say, by the values of a metric's labels. It is text for people, and another tool may
            have written it otherwise: what names no moment is left out.
        clock: Ours.
    """
    read = {labels: _moment(text) for labels, text in moments.items()}
    return {labels: max(0.0, (clock.now() - at).total_seconds()) for labels, at in read.items() if at is not None}


def _moment(text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if at.tzinfo is None else at
