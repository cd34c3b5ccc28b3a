"""`Spans`: an observer that tells OpenTelemetry of saves and their phases, and of restores."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import UnsupportedError
from ckptstore.events import (
    Committed,
    Event,
    Loaded,
    PhaseEnded,
    ProofEnded,
    RestoreFailed,
    Resumed,
    SaveBegan,
    SaveEnded,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

NAME = "ckptstore"
SAVE, RESTORE = "checkpoint.save", "checkpoint.restore"
MAX_OPEN = 100
"""Saves whose end may be awaited: of more, the oldest is ended."""


class Spans:
    """Makes a span of each save of this rank, below it one of each phase, and one of each restore.

    A save's span is a child of what was current where it was asked for.

    Args:
        provider: Of tracers; by default the one that is set for the process.
        clock: Where moments come from.

    Raises:
        UnsupportedError: `opentelemetry-api` is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None, *, clock: Clock | None = None) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415  (an extra)
        except ImportError as error:
            raise UnsupportedError(
                "Spans need opentelemetry-api, which is not installed.", hint="pip install 'ckptstore[otel]'"
            ) from error
        self._trace = trace
        self._tracer = (provider or trace.get_tracer_provider()).get_tracer(NAME)
        self._clock = clock or SystemClock()
        self._open: dict[int, Span] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take an event in."""
        said: dict[str, Any]
        match event:
            case SaveBegan():
                self._begin(event)
            case PhaseEnded():
                parent = self._open.get(event.save)
                context = None if parent is None else self._trace.set_span_in_context(parent)
                name = f"checkpoint.{event.phase}"
                self._past(name, event.seconds, {"checkpoint.id": event.checkpoint_id}, context=context)
            case SaveEnded():
                self._end(event)
            case Committed():
                self._note(event)
            case Resumed():
                what = {"resume.steps_lost": event.steps_lost, "resume.world_size_changed": event.world_size_changed}
                said = {"checkpoint.seq": event.seq, "checkpoint.step": event.global_step, **what}
                self._past(RESTORE, event.seconds, {"checkpoint.id": event.checkpoint_id, **said})
            case Loaded():
                said = {"checkpoint.seq": event.seq, "checkpoint.bytes": event.bytes_fetched}
                self._past(RESTORE, event.seconds, {"checkpoint.id": event.checkpoint_id, **said})
            case RestoreFailed():
                self._past(RESTORE, 0.0, {"checkpoint.id": event.checkpoint_id}, error=event.error)
            case ProofEnded():
                said = {"resume.verdict": event.verdict, "resume.loss_delta": event.resume_loss_delta}
                self._past("checkpoint.proof", 0.0, {"checkpoint.id": event.checkpoint_id, **said})

    def _now(self) -> int:
        return int(self._clock.now().timestamp() * 1e9)

    def _begin(self, event: SaveBegan) -> None:
        span = self._tracer.start_span(
            SAVE, start_time=self._now(), attributes={"checkpoint.background": event.background}
        )
        with self._lock:
            self._open[event.save] = span
            oldest = self._open.pop(min(self._open)) if len(self._open) > MAX_OPEN else None
        if oldest is not None:
            oldest.end()

    def _end(self, event: SaveEnded) -> None:
        with self._lock:
            span = self._open.pop(event.save, None)
        if span is not None:
            self._say(span, {"checkpoint.id": event.checkpoint_id}, error=event.error)
            span.end(end_time=self._now())

    def _note(self, event: Committed) -> None:
        """Say of the save in progress what it became. One is committed at a time, on the thread that saves."""
        with self._lock:
            span = self._open[max(self._open)] if self._open else None
        if span is not None:
            said = {"checkpoint.seq": event.seq, "checkpoint.step": event.global_step, "checkpoint.bytes": event.bytes}
            self._say(span, said)

    def _past(
        self, name: str, seconds: float, said: dict[str, Any], *, context: Any = None, error: str | None = None
    ) -> None:
        """Make a span of what has just ended."""
        now = self._now()
        span = self._tracer.start_span(name, context=context, start_time=now - int(seconds * 1e9))
        self._say(span, said, error=error)
        span.end(end_time=now)

    def _say(self, span: Span, said: dict[str, Any], *, error: str | None = None) -> None:
        span.set_attributes({name: value for name, value in said.items() if value is not None})
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
