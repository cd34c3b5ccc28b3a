"""What a run does right after a save and right after a resume: recorded with the one, compared for the other."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import storage_writers as sw
from ckptstore.errors import CkptStoreError
from ckptstore.events import Observer, tell
from ckptstore.protocol.fold import Committed
from ckptstore.training.batches import batch_digest, combined
from ckptstore.training.compat import spelled
from ckptstore.training.events import ProofEnded, TraceFailed
from ckptstore.training.flow import Asked
from ckptstore.training.meeting import Meeting
from ckptstore.training.proof import Proof, compare
from ckptstore.training.report import ResumeReport
from ckptstore.training.state import TrainingState
from ckptstore.training.tolerances import Tolerances
from ckptstore.training.trace import Conditions, Observation, Trace
from ckptstore.training.update_norm import Pieces, UpdateNorm

MAX_WINDOWS = 4
"""Saves whose steps are recorded at once; of more, the oldest is dropped."""
MAX_GATHERED = 200_000
"""Parameters times ranks up to which ranks tell each other what they hold, to measure how far the weights move."""
LAST_WRITES_SECONDS = 30.0
_MIGRATED = "What was saved was migrated: this is not the run that went on, and need not do what that did."

_log = logging.getLogger("ckptstore.training")


@dataclass
class _Window:
    """The steps after one save, or after a resume."""

    start_step: int
    observations: list[Observation] = field(default_factory=list)
    committed: Committed | None = None
    is_over: bool = False


class Recording:
    """The windows that are open. On all ranks the same ones are, because saves and resumes are collective.

    Args:
        state: What trains.
        asked: How the run is opened.
        meeting: The ranks.
        writer: What saves.
        steps: How many steps a window has; 0: nothing is recorded.
        tolerances: By default the strictest that are honest.
        observer: Hears of proofs.
    """

    def __init__(  # noqa: PLR0913  (of one caller)
        self,
        state: TrainingState,
        asked: Asked,
        meeting: Meeting,
        writer: sw.CkptStoreWriter,
        *,
        steps: int,
        tolerances: Tolerances | None,
        observer: Observer,
    ) -> None:
        self._state, self._asked, self._meeting, self._writer = state, asked, meeting, writer
        self._steps, self._tolerances, self._observer = steps, tolerances, observer
        self._saves: deque[_Window] = deque(maxlen=MAX_WINDOWS)
        self._uncommitted: deque[_Window] = deque(maxlen=MAX_WINDOWS)
        """On rank 0: those that are over, whose commit is not known yet."""
        self._resumed: _Window | None = None
        self._control: Trace | None = None
        self._report: ResumeReport | None = None
        self._source: Asked | None = None
        self._norm: UpdateNorm | None = None
        self._has_norm = True
        self._writes: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []

    def begin(self, future: sw.SaveFuture | None) -> None:
        """Record the steps after the save that has just begun, or ended. Collective."""
        if not self._steps or (future is not None and future.skipped):
            return
        self._start_measuring()
        window = _Window(self._state.progress.global_step)
        self._saves.append(window)
        before = self._writer.committed
        if future is None:
            window.committed = before
        elif self._meeting.rank == 0:
            future.add_done_callback(lambda _: self._note_commit(window, before))

    def _note_commit(self, window: _Window, before: Committed | None) -> None:
        now = self._writer.committed
        if now is not None and (before is None or now.seq > before.seq):
            window.committed = now

    def follow(self, report: ResumeReport, source: Asked) -> None:
        """Compare the steps after this resume with those that were recorded with its checkpoint. Collective."""
        self._report, self._source = report, source
        if source.only is not None:  # what it goes on with is another training
            report.proof = Proof("no_trace")
            return
        said = self._meeting.led("trace", lambda: self._read_control(report, source))
        self._control = None if said is None else Trace.from_json(said)
        if not self._steps or self._control is None or not self._control.observations:
            report.proof = Proof("no_trace")
            return
        self._start_measuring()
        self._resumed = _Window(self._state.progress.global_step)

    def _read_control(self, report: ResumeReport, source: Asked) -> Any:
        try:
            said = source.open().get(seq=report.seq).trace()
            return None if said is None else Trace.from_json(said).as_json()
        except CkptStoreError as error:
            _log.warning("The trace of %s cannot be read: %s", report.checkpoint_id, error)
            return None

    def observe(self, loss: Any, grad_norm: Any, batch_ids: Iterable[Any] | None) -> None:
        """Take what a step was like into the open windows. Collective while one is open, and nothing else then."""
        if self._uncommitted:
            self._close(())  # a save may have been committed since its window was over
        open_ones = [each for each in (*self._saves, *([self._resumed] if self._resumed else [])) if not each.is_over]
        if not open_ones:
            return
        observation = self._observed(loss, grad_norm, batch_ids)
        for window in open_ones:
            window.observations.append(observation)
        if self._resumed is not None and not self._resumed.is_over:
            self._compare(self._resumed)
        self._close(window for window in self._saves if len(window.observations) >= self._steps)
        if self._norm is not None and all(each.is_over for each in open_ones):
            self._norm.stop()

    def end(self) -> None:
        """Write what was recorded so far, and say how far a comparison came. Never raises what a store raises."""
        self._close(self._saves)
        if self._resumed is not None and not self._resumed.is_over:
            self._compare(self._resumed, is_last=True)
        if self._writes is not None:
            for write in self._under_way:
                with contextlib.suppress(TimeoutError):
                    write.exception(LAST_WRITES_SECONDS)
            self._writes.shutdown(wait=False, cancel_futures=True)
            self._writes = None
        if self._norm is not None:
            self._norm.stop()

    def _observed(self, loss: Any, grad_norm: Any, batch_ids: Iterable[Any] | None) -> Observation:
        ids = None if batch_ids is None else list(batch_ids)
        mine = Observation(self._state.progress.global_step, loss, grad_norm)  # checks and reads the numbers
        samples = 0 if ids is None else len(ids)
        weight = 1.0 if ids is None else float(samples)
        moved = 0.0 if self._norm is None else self._norm.advance()
        share = mine.loss * weight if weight else 0.0  # an empty share may have a loss that is no number
        norm = 0.0 if mine.grad_norm is None else mine.grad_norm
        (total, weights, norms, squares), (digest, count) = self._meeting.sums(
            [share, weight, norm, moved], [0 if ids is None else batch_digest(ids), samples]
        )
        scales = self._state.scales()
        return Observation(
            global_step=mine.global_step,
            loss=total / weights if weights else math.nan,
            grad_norm=None if mine.grad_norm is None else norms / self._meeting.world_size,
            lr=tuple(self._state.learning_rates()),
            scale=scales[0] if scales else None,
            batch_digest=None if ids is None else combined([digest]),
            samples=None if ids is None else count,
            update_norm=None if self._norm is None else math.sqrt(squares),
        )

    def _trace(self, window: _Window) -> Trace:
        of = "" if self._norm is None else self._norm.of
        return Trace(window.start_step, tuple(window.observations), self._conditions(), of)

    def _conditions(self) -> Conditions:
        first = next(iter(self._state.parameters.values()), None)
        return Conditions.here(
            world_size=self._meeting.world_size,
            device="cpu" if first is None else first.device,
            dtype=self._state.dtype,
            parallelism=spelled(self._state.parallelism),
        )

    def _compare(self, window: _Window, *, is_last: bool = False) -> None:
        assert self._report is not None  # noqa: S101  (its window is open)
        proof = compare(self._control, self._trace(window), tolerances=self._tolerances)
        if self._report.migrated:
            proof = replace(proof, notes=(*proof.notes, _MIGRATED))
        if proof.verdict == "too_few_steps" and not is_last:
            return
        window.is_over = True
        self._report.proof = proof
        name, seq = self._report.checkpoint_id or "", self._report.seq or 0
        tell(self._observer, ProofEnded(name, seq, proof.verdict, proof.resume_loss_delta))
        if self._meeting.rank == 0:
            _log.log(logging.INFO if proof.is_proved else logging.WARNING, "Resume from %s: %s", name, proof.table())
            if proof.is_proved:
                self._write(partial(self._prove, proof), name)

    def _prove(self, proof: Proof) -> None:
        assert self._source is not None  # noqa: S101  (a resume is followed)
        assert self._report is not None  # noqa: S101  (the same)
        store = self._source.open()
        store.prove(store.get(seq=self._report.seq), verdict=proof.summary())

    def _close(self, windows: Iterable[_Window]) -> None:
        """Let these be over; on rank 0 write each that is, as soon as its save is committed."""
        for window in list(windows):
            window.is_over = True
            self._saves.remove(window)
            if window.observations and self._meeting.rank == 0:
                self._uncommitted.append(window)
        for window in [each for each in self._uncommitted if each.committed is not None]:
            self._uncommitted.remove(window)
            committed, trace = window.committed, self._trace(window).as_json()
            assert committed is not None  # noqa: S101  (asked above)
            self._write(partial(self._store_trace, committed.seq, trace), committed.commit.checkpoint_id)

    def _store_trace(self, seq: int, trace: dict[str, Any]) -> None:
        store = self._asked.open()
        store.write_trace(store.get(seq=seq), trace)

    def _write(self, work: Callable[[], None], name: str) -> None:
        """Write something that nothing but a proof depends on, while the training goes on."""

        def write() -> None:
            try:
                work()
            except CkptStoreError as error:
                tell(self._observer, TraceFailed(name, error.message))

        if self._writes is None:
            self._writes = ThreadPoolExecutor(1, thread_name_prefix="ckptstore-trace")
        self._under_way = [each for each in self._under_way if not each.done()]
        if len(self._under_way) >= MAX_WINDOWS:
            tell(self._observer, TraceFailed(name, "the store is too slow"))
            return
        self._under_way.append(self._writes.submit(write))

    def _start_measuring(self) -> None:
        """Remember the weights as they are. The first time, ranks tell each other what they hold."""
        if self._norm is None and self._has_norm:
            names = self._state.parameters
            most = self._meeting.decide("sizes", lambda: len(names), lambda sizes: max(sizes))  # noqa: PLW0108  (mypy: `max` is overloaded)
            self._has_norm = most * self._meeting.world_size <= MAX_GATHERED
            if self._has_norm:
                self._norm = UpdateNorm(names, rank=self._meeting.rank, gather=self._gathered)
        if self._norm is not None:
            self._norm.start()

    def _gathered(self, held: Pieces) -> Sequence[Pieces]:
        return self._meeting.decide("pieces", lambda: held, list)
