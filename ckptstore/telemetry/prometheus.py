"""`Metrics`: an observer that keeps what Prometheus collects."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.events import (
    OTHER,
    AttemptBegan,
    Claimed,
    Committed,
    DamageFound,
    Event,
    KeepFailed,
    Loaded,
    Phase,
    PhaseEnded,
    Point,
    ProofEnded,
    RecoveryPoints,
    RestoreFailed,
    Resumed,
    SaveAbandoned,
    SaveBegan,
    SaveEnded,
    SaveSkipped,
    ShardStored,
    Stepped,
)
from ckptstore.options import check_kinds
from ckptstore.telemetry.client import RUN, Collected, Values, ages, check_label, exposition, family, prometheus
from ckptstore.telemetry.names import AGAINST, METRICS
from ckptstore.telemetry.textfile import TextFile

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Bounds of the histograms' buckets."""
VERDICTS = ("proved", "differs", "no_trace", "too_few_steps")
_COUNTED: dict[type[Event], str] = {
    SaveSkipped: "checkpoint_saves_skipped_total",
    SaveAbandoned: "checkpoint_saves_abandoned_total",
    Committed: "checkpoint_commits_total",
    KeepFailed: "checkpoint_keep_failures_total",
    DamageFound: "checkpoint_checksum_failures_total",
}
"""What is one more of something."""
MAX_PORT = 65535
LOGS = 64
"""Of so many runs it is remembered how they stand, until it is known which of them this process writes."""


class Metrics:
    """What one rank tells Prometheus. Give it as `observer=`; see the README for who knows what.

    Args:
        run: What the operator calls the run: the label `run` of every metric. One line of at most 256 characters.
        registry: Where it is collected; by default one of its own.
        clock: Where ages come from.

    Raises:
        InvalidInputError: `run` cannot be a label; the registry is none, or holds metrics of these names already.
        UnsupportedError: `prometheus_client` is not installed.
    """

    def __init__(self, *, run: str = "", registry: CollectorRegistry | None = None, clock: Clock | None = None) -> None:
        client = prometheus()
        check_label(run)
        check_kinds(registry=(registry, client.CollectorRegistry))
        self.registry: CollectorRegistry = client.CollectorRegistry() if registry is None else registry
        self._run, self._clock = run, clock or SystemClock()
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        self._lag = 0.0
        self._leads = False
        """This rank commits, so it knows how the run stands."""
        self._written: str | None = None
        """The run that this process writes: what logs of other runs tell, a base model's, say, is none of its."""
        self._points: dict[str, Point | None] = {}
        self._told: dict[str, dict[str, Point | None]] = {}
        """Of other runs. A log is opened before it is claimed, so the next one written is perhaps among them."""
        self._step: int | None = None
        self._delta: float | None = None
        own = [name for name, metric in METRICS.items() if metric.who != "bucket" and metric.kind != "gauge"]
        try:
            self._made = {name: self._make(name) for name in own}
        except ValueError as error:  # what the client raises, and nothing else is wrong with these names
            raise InvalidInputError(
                "The registry holds metrics of these names already.", hint="Give each Metrics a registry of its own."
            ) from error
        self._from_zero()
        self.registry.register(Collected(self.collect))
        self._file: TextFile | None = None
        self._server: Any = None

    def _make(self, name: str) -> Any:
        """Return what the client counts or measures with."""
        client, metric = prometheus(), METRICS[name]
        labels = (RUN, *metric.labels)
        if metric.kind == "counter":
            return client.Counter(name, metric.help, labels, registry=self.registry)
        return client.Histogram(name, metric.help, labels, registry=self.registry, buckets=SECONDS)

    def _from_zero(self) -> None:
        """Let every series be there from the start: what appears with 1 has not increased, to Prometheus."""
        codes = sorted({CkptStoreError.code, OTHER, *_codes(CkptStoreError)})
        values = {"reason": codes, "verdict": VERDICTS, "phase": get_args(Phase)}
        for name, made in self._made.items():
            for each in itertools.product(*(values[label] for label in METRICS[name].labels)):
                made.labels(self._run, *each)

    def _of(self, name: str, *labels: str) -> Any:
        return self._made[name].labels(self._run, *labels)

    def __call__(self, event: Event) -> None:
        """Take an event in."""
        if (counted := _COUNTED.get(type(event))) is not None:
            self._of(counted).inc()
        match event:
            case Stepped():
                self._step = event.global_step
            case SaveBegan() | PhaseEnded() | SaveEnded():
                self._take_save(event)
            case ShardStored():
                self._of("checkpoint_bytes_total").inc(event.size)
            case Claimed() | AttemptBegan():
                self._lead(event.run)
            case RecoveryPoints():
                self._take_points(event)
            case Resumed() | Loaded() | RestoreFailed() | ProofEnded():
                self._take_restore(event)

    def _lead(self, run: str) -> None:
        """Note which run this process writes."""
        with self._lock:
            self._leads = True
            if run != self._written:
                resumed = self._points if self._written is None else {}
                self._written, self._points = run, {**self._told.pop(run, {}), **resumed}

    def _take_points(self, event: RecoveryPoints) -> None:
        points = {name: getattr(event, name) for name in AGAINST}
        with self._lock:
            if event.run == self._written:
                self._points = points
                return
            self._told.pop(event.run, None)
            self._told[event.run] = points
            if len(self._told) > LOGS:
                del self._told[next(iter(self._told))]

    def _take_save(self, event: SaveBegan | PhaseEnded | SaveEnded) -> None:
        now = self._clock.monotonic()
        if isinstance(event, SaveBegan):
            with self._lock:
                self._begun[event.save] = now
        elif isinstance(event, PhaseEnded):
            self._of("checkpoint_phase_seconds", event.phase).observe(event.seconds)
            if event.phase == "stage":
                self._of("checkpoint_async_staging_seconds").observe(event.seconds)
            elif event.phase == "commit":
                with self._lock:
                    self._lag = now - self._begun.get(event.save, now)
        else:
            with self._lock:
                self._begun.pop(event.save, None)
            if event.error is None:
                self._of("checkpoint_save_duration_seconds").observe(event.seconds)
            else:
                self._of("checkpoint_save_failures_total", event.error).inc()

    def _take_restore(self, event: Resumed | Loaded | RestoreFailed | ProofEnded) -> None:
        match event:
            case Loaded():
                self._of("checkpoint_restore_duration_seconds").observe(event.seconds)
            case RestoreFailed():
                self._of("checkpoint_restore_failures_total", event.error).inc()
            case ProofEnded():
                self._delta = event.resume_loss_delta
                self._of("resume_proofs_total", event.verdict).inc()
            case Resumed():
                self._of("checkpoint_restore_duration_seconds").observe(event.seconds)
                self._of("resume_world_size_change_total").inc(event.world_size_changed)
                self._of("checkpoint_reprocessed_samples_total").inc(event.samples_lost or 0)
                if event.committed_at is not None:
                    point = Point(event.seq, event.global_step, event.committed_at)
                    with self._lock:
                        self._leads = True
                        self._points = {**self._points, "committed": point}

    def gauges(self) -> Iterable[tuple[str, Values]]:
        """Return what is as it is now, by metric; what is not known is left out."""
        now = self._clock.monotonic()
        with self._lock:
            begun, lag = list(self._begun.values()), self._lag
        yield "checkpoint_inprogress_count", {(): len(begun)}
        yield "checkpoint_commit_lag_seconds", {(): max([lag, *(now - each for each in begun)])}
        if self._delta is not None:
            yield "resume_loss_delta", {(): self._delta}
        points = {name: point for name, point in self._points.items() if point is not None and self._leads}
        steps = {name: point.global_step for name, point in points.items() if point.global_step is not None}
        if "committed" in steps:
            yield "checkpoint_last_committed_step", {(): steps["committed"]}
        yield (
            "checkpoint_recovery_point_seconds",
            ages({(name,): point.committed_at for name, point in points.items()}, self._clock),
        )
        here = self._step
        if here is not None:
            yield "checkpoint_recovery_point_steps", {(name,): max(0, here - at) for name, at in steps.items()}

    def collect(self) -> Iterable[Family]:
        """Return the gauges as what a registry collects."""
        return [family(name, values, run=self._run) for name, values in self.gauges()]

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return exposition(self.registry.collect())

    def serve(self, *, port: int, address: str = "127.0.0.1") -> int:
        """Let Prometheus scrape this rank over HTTP, at `/metrics`; return the port.

        Args:
            port: Of this rank alone; 0: any that is free.
            address: Who may come; `0.0.0.0`: everybody who reaches this machine.

        Raises:
            InvalidInputError: It is served already, port or address is none, or the port is not free.
        """
        if self._server is not None:
            raise InvalidInputError("These metrics are served already.", hint="Call `close` first.")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= MAX_PORT:
            raise InvalidInputError(
                f"port must be a whole number from 0 to {MAX_PORT}, not {port!r:.80}.",
                hint="Pass port=9464, say, or port=0 for any that is free.",
                option="port",
            )
        if not isinstance(address, str) or not address:
            raise InvalidInputError(
                f"address must be one of this machine, not {address!r:.80}.",
                hint="Pass address='127.0.0.1', or '0.0.0.0' for all.",
                option="address",
            )
        try:
            self._server, _ = prometheus().start_http_server(port, addr=address, registry=self.registry)
        except (OSError, ValueError) as error:  # ValueError: the address is no host's name
            raise InvalidInputError(
                f"{address!r:.80} cannot be listened to at port {port}: {error}.",
                hint="Give each rank a port of its own, and an address of this machine.",
            ) from error
        taken: int = self._server.server_port
        return taken

    def write_to(self, path: str | os.PathLike[str], *, every_seconds: float = 15.0) -> None:
        """Keep a file for node_exporter's textfile collector, written anew at once, every so often and at the end.

        Raises:
            InvalidInputError: It is kept already, cannot be written there, or what stands there is no regular file.

        If killed: the file as it was before or after, whole.
        """
        if self._file is not None:
            raise InvalidInputError("These metrics are written to a file already.", hint="Call `close` first.")
        self._file = TextFile(path, self.exposition, every_seconds=every_seconds)

    def close(self) -> None:
        """Stop serving, and write the file once more."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _codes(kind: type[CkptStoreError]) -> set[str]:
    return {code for each in kind.__subclasses__() for code in (each.code, *_codes(each))}
