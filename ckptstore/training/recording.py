"""What a run does right after a save and right after a resume: recorded with the one, compared for the other."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

import storage_writers as sw
from ckptstore.clock import Clock
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.events import Observer, ProofEnded, tell
from ckptstore.training.asked import Asked
from ckptstore.training.batches import batch_digest, combined
from ckptstore.training.compat import spelled
from ckptstore.training.meeting import Meeting
from ckptstore.training.proof import Proof, compare
from ckptstore.training.report import ResumeReport
from ckptstore.training.state import TrainingState
from ckptstore.training.tolerances import Tolerances
from ckptstore.training.trace import Conditions, Observation, Trace
from ckptstore.training.update_norm import UpdateNorm
from ckptstore.training.writing import Writing

MAX_STEPS = 1000
MAX_WINDOWS = 4
"""Saves whose steps are recorded at once: of more, the first is recorded for fewer steps. And writes at once."""
LAST_WRITES_SECONDS = 30.0
"""How long the end of a run waits for traces that are being written."""
_PARTIAL = "A part of it was taken: this is another run, and nothing says what it would have done."
_MIGRATED = "What was saved was migrated: this is not the run that went on, and need not do what that did."
_ELSEWHERE = "The checkpoint is another run's, and nothing is written there."
_UNKNOWN = "it is not known whether its save was committed"

_log = logging.getLogger("ckptstore.training")


@dataclass
class _Window:
    """The steps after one save, or after a resume.

    Args:
        start_step: Of the checkpoint.
        name: Of the checkpoint.
        future: Of its save, as long as it is not known how that ended. On rank 0.
        seq: Its slot; None: it is not committed.
    """

    start_step: int
    name: str
    future: sw.SaveFuture | None = None
    seq: int | None = None
    observations: list[Observation] = field(default_factory=list)

    def is_settled(self) -> bool:
        """Whether it is known how its save ended."""
        if self.future is not None and self.future.done():
            self.seq, self.future = self.future.seq, None
        return self.future is None

    def add(self, observation: Observation) -> None:
        """Take a step. One that was taken before is replaced: a scaler may skip a step, which is not counted then."""
        while self.observations and self.observations[-1].global_step >= observation.global_step:
            self.observations.pop()
        self.observations.append(observation)


class Recording:
    """The windows that are open. On all ranks the same ones are, because saves and resumes are collective.

    Args:
        state: What trains.
        asked: How the run is opened.
        meeting: The ranks.
        steps: How many steps a window has; 0: nothing is recorded or compared.
        tolerances: By default the strictest that are honest.
        observer: Hears of proofs.
        clock: Of what the end of a run waits for.

    Raises:
        InvalidInputError: The steps are no number, or too many.
    """

    def __init__(  # noqa: PLR0913  (of one caller)
        self,
        state: TrainingState,
        asked: Asked,
        meeting: Meeting,
        *,
        steps: int,
        tolerances: Tolerances | None,
        observer: Observer,
        clock: Clock,
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= MAX_STEPS:
            raise InvalidInputError(f"proof_steps must be from 0 to {MAX_STEPS}, not {steps!r:.80}.")
        self._state, self._asked, self._meeting = state, asked, meeting
        self._steps, self._tolerances, self._observer, self._clock = steps, tolerances, observer, clock
        self._saves: deque[_Window] = deque()
        self._uncommitted: deque[_Window] = deque()
        """On rank 0: those that are over, whose commit is not known yet."""
        self._resumed: _Window | None = None
        self._control: Trace | None = None
        self._report: ResumeReport | None = None
        self._source: Asked | None = None
        self._norm: UpdateNorm | None = None
        self._is_observed = True
        """On this rank, since it was found that nobody observes."""
        self._differs = False
        """On rank 0: the comparison can be ended."""
        self._writing = Writing(observer, clock, at_once=MAX_WINDOWS)

    def begin(self, name: str, future: sw.SaveFuture | None, *, seq: int | None) -> None:
        """Record the steps after a save. Collective.

        Args:
            name: Of the checkpoint.
            future: Of a save that has begun; None: it has ended.
            seq: Its slot, if it has ended, on rank 0.
        """
        self._write_committed()
        observing = self._observing("save")
        if not self._steps or (future is not None and future.skipped):
            return
        window = _Window(self._state.progress.global_step, name, future if self._meeting.rank == 0 else None, seq)
        before = self._saves[-1] if self._saves else None
        if before is not None and not before.observations and before.start_step < window.start_step:
            self._is_observed = observing = False
        if not observing:  # somebody does not tell how steps go: nothing is measured for that
            self._close(self._saves)
            if self._resumed is None:
                self._stop_measuring()
            return
        self._start_measuring()
        if len(self._saves) == MAX_WINDOWS:
            self._close([self._saves[0]])
        self._saves.append(window)

    def follow(self, report: ResumeReport, source: Asked) -> None:
        """Compare the steps after this resume with those that were recorded with its checkpoint. Collective."""
        self._observing("resume")
        self._close(self._saves)
        self._resumed = self._control = None
        self._differs = False
        if not self._steps:
            return
        self._report, self._source = report, source
        if source.only is not None:
            report.proof = Proof("no_trace", notes=(_PARTIAL,))
            return
        said = self._meeting.led("trace", lambda: self._read_control(report, source))
        self._control = None if said is None else Trace.from_json(said)
        if self._control is None or not self._control.observations:
            report.proof = Proof("no_trace")
            return
        if report.samples_lost is not None and not self._state.progress.micro_step:
            report.samples_lost = max(
                report.samples_lost, sum(each.samples or 0 for each in self._control.observations)
            )
        self._start_measuring()
        self._resumed = _Window(self._state.progress.global_step, report.checkpoint_id or "")

    def _observing(self, what: str) -> bool:
        """Return whether all ranks observe, and see that all record as many steps. Collective."""
        said = [float(self._is_observed)]
        (observing,), _ = self._meeting.sums(said, what=f"{what} with proof_steps={self._steps}", at=self._at)
        return observing == self._meeting.world_size

    @property
    def _at(self) -> int:
        return self._state.progress.global_step

    def _read_control(self, report: ResumeReport, source: Asked) -> Any:
        try:
            said = source.open().get(seq=report.seq).trace()
            return None if said is None else Trace.from_json(said).as_json()
        except CkptStoreError as error:
            _log.warning("The trace of %s cannot be read: %s", report.checkpoint_id, error)
            return None

    def observe(self, loss: Any, grad_norm: Any, batch_ids: Iterable[Any] | None) -> None:
        """Take what a step was like into the open windows. Collective while one is open.

        Raises:
            InvalidInputError: A number is none, on some rank; or some ranks say what others do not. On all ranks while
                a window is open; else ranks ask each other nothing, and it is raised where it is wrong.
            DisagreementError: A rank did not come, is at another step, or in another call. On all ranks.
        """
        self._is_observed = True
        if self._uncommitted:
            self._write_committed()
        open_ones = [*self._saves, *([self._resumed] if self._resumed is not None else [])]
        if not open_ones:
            _check(self._state.progress.micro_step, loss, grad_norm)
            return
        observation, differs = self._observed(loss, grad_norm, batch_ids)
        for window in open_ones:
            window.add(observation)
        if self._resumed is not None:
            self._go_on(self._resumed, differs=differs)
        self._close(window for window in self._saves if len(window.observations) >= self._steps)
        if not self._saves and self._resumed is None:
            self._stop_measuring()

    def end(self, *, seconds: float | None = None) -> None:
        """Write what was recorded so far, and say how far a comparison came. Never raises what a store raises.

        Args:
            seconds: How long it waits for what is being written; None: as long as it does at the end of a run.
        """
        seconds = LAST_WRITES_SECONDS if seconds is None else seconds
        until = self._clock.monotonic() + seconds
        self._close(self._saves)
        if self._resumed is not None:
            window = self._resumed
            try:
                proof = self._meeting.led(
                    "last proof",
                    lambda: self._proof(window),
                    longest=0.0,
                    seconds=min(self._meeting.seconds, max(0.0, seconds / 4)),
                )
            except CkptStoreError as error:
                _log.warning("The proof of %s is this rank's alone: %s", window.name, error)
                proof = self._proof(window)
            self._end_with(proof, window)
        self._stop_measuring()
        self._writing.wait(until)
        self._write_committed()
        while self._uncommitted:
            self._writing.tell_failed(self._uncommitted.popleft().name, _UNKNOWN)

    def _observed(self, loss: Any, grad_norm: Any, batch_ids: Iterable[Any] | None) -> tuple[Observation, bool]:
        """Return what all ranks together say of a step, and whether a comparison can be ended, as rank 0 knows.

        What is wrong on one rank is raised on all.
        """
        failed: list[Exception] = []
        try:
            mine, digest, samples = self._mine(loss, grad_norm, batch_ids)
        except Exception as error:  # noqa: BLE001  (raised below, where the others hear of it)
            failed.append(error)
            mine, digest, samples = Observation(self._at, 0.0), 0, 0
        says = [bool(failed), grad_norm is not None, batch_ids is not None]
        weight = 1.0 if batch_ids is None else float(samples)
        share = mine.loss * weight if weight else 0.0  # an empty share may have a loss that is no number
        said, (digests, count) = self._meeting.sums(
            [*map(float, says), share, weight, mine.grad_norm or 0.0, mine.update_norm or 0.0, float(self._differs)],
            [digest, samples],
            what="observe",
            at=self._at,
        )
        failures, have_norms, have_ids, total, weights, norms, squares, differs = said
        if failures:
            self._meeting.all_do("observe", lambda: _raise(failed))
        for what, have in (("grad_norm", have_norms), ("batch_ids", have_ids)):
            if have not in (0, self._meeting.world_size):
                raise InvalidInputError(
                    f"{what} was observed on {have:.0f} of {self._meeting.world_size} ranks.",
                    hint=f"Pass {what}= on all ranks, or on none; an empty share has batch_ids=[].",
                    field=what,
                )
        whole = replace(
            mine,
            loss=total / weights if weights else math.nan,
            grad_norm=norms / self._meeting.world_size if have_norms else None,
            batch_digest=combined([digests]) if have_ids else None,
            samples=count if have_ids else None,
            update_norm=math.sqrt(squares) if self._norm is not None and self._norm.of else None,
        )
        return whole, differs > 0

    def _mine(self, loss: Any, grad_norm: Any, batch_ids: Iterable[Any] | None) -> tuple[Observation, int, int]:
        """Return what this rank says, its `update_norm` still a square; the digest of its samples, and how many."""
        _check(self._state.progress.micro_step, loss, grad_norm)
        moved = None if self._norm is None else self._norm.advance()
        rates, scales = tuple(self._state.learning_rates()), self._state.scales()
        mine = Observation(self._at, loss, grad_norm, lr=rates, scale=scales[0] if scales else None, update_norm=moved)
        if batch_ids is None:
            return mine, 0, 0
        ids = batch_ids if isinstance(batch_ids, Sized) else list(batch_ids)
        return mine, batch_digest(ids), 1 if getattr(ids, "ndim", 1) == 0 else len(ids)

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

    def _go_on(self, window: _Window, *, differs: bool) -> None:
        """End a comparison on all ranks as soon as all know that it can be ended. Collective when it does.

        Ranks may see different things, in what they were built of and in their learning rates: rank 0's proof counts.
        A step that differs is known to the others one step later, if the window is not over before.
        """
        assert self._control is not None  # noqa: S101  (its window is open)
        is_over = len(window.observations) >= min(self._steps, len(self._control.observations))
        if differs or is_over:
            self._differs = False
            proof = self._meeting.led("proof", lambda: self._proof(window), longest=0.0)
            if is_over or proof.verdict != "too_few_steps":
                self._end_with(proof, window)
        elif self._meeting.rank == 0:
            self._differs = self._proof(window).verdict == "differs"

    def _proof(self, window: _Window) -> Proof:
        assert self._report is not None  # noqa: S101  (its window is open)
        proof = compare(self._control, self._trace(window), steps=self._steps, tolerances=self._tolerances)
        notes = [_MIGRATED] if self._report.migrated else []
        if not self._is_own:
            notes.append(_ELSEWHERE)
        return replace(proof, notes=(*proof.notes, *notes))

    @property
    def _is_own(self) -> bool:
        """Whether it was this run that was resumed: into the log of another one nothing is written."""
        return self._source is not None and self._source.url == self._asked.url

    def _end_with(self, proof: Proof, window: _Window) -> None:
        assert self._report is not None  # noqa: S101  (its window is open)
        self._resumed, self._differs = None, False
        self._report.proof = proof
        name, seq = window.name, self._report.seq or 0
        tell(self._observer, ProofEnded(name, seq, proof.verdict, proof.resume_loss_delta))
        if self._meeting.rank == 0:
            _log.log(logging.INFO if proof.is_proved else logging.WARNING, "Resume from %s: %s", name, proof.table())
            if proof.is_proved and self._is_own:
                self._writing.begin(partial(_prove, self._asked, seq, proof.summary()), name)

    def _close(self, windows: Iterable[_Window]) -> None:
        """Let these be over; on rank 0 write each that is, as soon as its save is committed."""
        for window in list(windows):
            self._saves.remove(window)
            if window.observations and self._meeting.rank == 0:
                self._uncommitted.append(window)
        self._write_committed()
        while len(self._uncommitted) > MAX_WINDOWS:
            self._writing.tell_failed(self._uncommitted.popleft().name, _UNKNOWN)

    def _write_committed(self) -> None:
        for window in [each for each in self._uncommitted if each.is_settled()]:
            self._uncommitted.remove(window)
            if window.seq is not None:
                self._writing.begin(partial(self._store, window.seq, window), window.name)

    def _store(self, seq: int, window: _Window) -> None:
        store = self._asked.open()
        store.write_trace(store.get(seq=seq), self._trace(window).as_json())

    def _start_measuring(self) -> None:
        """Remember the weights as they are. The first time, ranks agree on what is measured."""
        if self._norm is None:
            self._norm = UpdateNorm(self._state.parameters, meeting=self._meeting)
        self._norm.start()

    def let_go(self) -> None:
        """Let all windows be over and free the copy of the weights, on this rank alone; `end` writes what there is."""
        self._uncommitted += [each for each in self._saves if each.observations and self._meeting.rank == 0]
        self._saves.clear()
        self._resumed = None
        self._stop_measuring()

    def _stop_measuring(self) -> None:
        if self._norm is not None:
            self._norm.stop()


def _check(micro_step: int, loss: Any, grad_norm: Any) -> None:
    """Check on each step what costs nothing: that these are numbers, and of a whole step.

    Raises:
        InvalidInputError: They are not.
    """
    if micro_step:
        raise InvalidInputError(
            f"A step was observed between micro-steps: progress.micro_step is {micro_step}.",
            hint="Call observe() once for each optimizer step, when progress.micro_step is 0 again.",
        )
    if not _is_plain(loss):
        Observation(0, loss)  # which knows the others, and says what is wrong
    if grad_norm is not None and not _is_plain(grad_norm):
        Observation(0, 0.0, grad_norm)


def _is_plain(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1 and type(value) is not DTensor)


def _raise(errors: Sequence[Exception]) -> None:
    for error in errors:
        raise error


def _prove(source: Asked, seq: int, verdict: str) -> None:
    store = source.open()
    store.prove(store.get(seq=seq), verdict=verdict)
