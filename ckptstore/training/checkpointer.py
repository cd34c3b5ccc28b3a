"""`Checkpointer`: a training loop's own: resume, save when it is due, and stop when it is asked to."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn, Self

import torch.distributed as dist

import storage_writers as sw
from ckptstore.clock import SystemClock
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.events import Observer, silent, tell
from ckptstore.options import LogOptions, TransferOptions, check_flags, check_seconds
from ckptstore.protocol.claim import Takeover
from ckptstore.protocol.verify import Level
from ckptstore.training.compat import Matrix
from ckptstore.training.events import Resumed, Stopping
from ckptstore.training.flow import Asked
from ckptstore.training.gate import names_given
from ckptstore.training.meeting import Meeting
from ckptstore.training.recording import Recording
from ckptstore.training.report import ResumeReport
from ckptstore.training.resuming import resume
from ckptstore.training.saving import Said, save
from ckptstore.training.schedule import Keep, Saved, Schedule
from ckptstore.training.signals import STOPPING, Signals
from ckptstore.training.state import TrainingState
from ckptstore.training.tolerances import Tolerances
from storage_writers.settling import WhenBusy

SLOWER = 1.5
"""A last save is begun if the time that is left is so many times what the save before took."""

_log = logging.getLogger("ckptstore.training")


class StoppedBySignal(SystemExit):
    """The run was asked to stop, and has: its code is 128 and the signal's number, as schedulers know it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the run stops, and when it must have.

    Args:
        number: The signal.
        rank: Which got it.
        seconds: How long there was when all ranks heard of it.
    """

    number: int
    rank: int
    seconds: float

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} on rank {self.rank}"


class Checkpointer:
    """Keeps a training state in a run. Use it with `with`; every call is collective.

    Args:
        url: Root of the run.
        state: What is saved and resumed.
        every_steps: A save is due at multiples of so many global steps.
        every_seconds: A save is due so long after the one before, by rank 0's clock.
        every_epochs: A save is due when so many epochs have ended.
        keep: What is to be kept; it is recorded, and deletes nothing itself.
        background: Save while the training goes on.
        matrix: Which changes of topology may be resumed.
        proof_steps: So many steps after a save are recorded with it, and compared after a resume. 0: none.
        tolerances: How far they may differ.
        stop_signals: What asks the run to stop; others' handlers of them run too. Off the main thread none are handled.
        stop_seconds: How long there is from the signal to the end.
        process_group: The ranks; None: all.
        allow_one_rank: This process is alone, though others run.
        engine, storage_options, transfer, log: How the store is used.
        job, takeover: See `CkptStoreWriter`.
        staging_bytes, when_busy, busy_timeout_seconds, commit_timeout_seconds, agree_timeout_seconds: See there.
        observer: Hears of every phase.

    Raises:
        InvalidInputError: An argument is outside of what is allowed.
    """

    def __init__(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        url: str | os.PathLike[str],
        state: TrainingState,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        keep: Keep | None = None,
        background: bool = True,
        matrix: Matrix | None = None,
        proof_steps: int = 5,
        tolerances: Tolerances | None = None,
        stop_signals: Sequence[int] = STOPPING,
        stop_seconds: float = 30.0,
        process_group: dist.ProcessGroup | None = None,
        allow_one_rank: bool = False,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        transfer: TransferOptions | None = None,
        log: LogOptions | None = None,
        job: str | None = None,
        takeover: Takeover = "always",
        staging_bytes: int | None = None,
        when_busy: WhenBusy = "wait",
        busy_timeout_seconds: float = 1800.0,
        commit_timeout_seconds: float = 3600.0,
        agree_timeout_seconds: float = 60.0,
        observer: Observer = silent,
    ) -> None:
        check_flags(background=background, allow_one_rank=allow_one_rank)
        check_seconds(stop_seconds=stop_seconds)
        if isinstance(proof_steps, bool) or not isinstance(proof_steps, int) or not 0 <= proof_steps <= 1000:  # noqa: PLR2004
            raise InvalidInputError(f"proof_steps must be from 0 to 1000, not {proof_steps!r:.80}.")
        self._url = os.fspath(url)
        self.state = state
        self._schedule = Schedule(every_steps, every_seconds, every_epochs)
        self._keep, self._background = keep, background
        self._stop_seconds = stop_seconds
        self._observer = observer
        self._clock = SystemClock()
        self._meeting = Meeting(process_group, one_rank=allow_one_rank, seconds=agree_timeout_seconds)
        self._signals = Signals(stop_signals, clock=self._clock)
        self.writer = sw.CkptStoreWriter(
            url,
            engine=engine,
            storage_options=storage_options,
            process_group=process_group,
            takeover=takeover,
            job=job,
            allow_one_rank=allow_one_rank,
            agree_timeout_seconds=agree_timeout_seconds,
            staging_bytes=staging_bytes,
            when_busy=when_busy,
            busy_timeout_seconds=busy_timeout_seconds,
            commit_timeout_seconds=commit_timeout_seconds,
            transfer=transfer,
            log=log,
            observer=observer,
        )
        """What saves; its `process_group`, `wait` and the like may be used."""
        self._own = Asked(
            self._url,
            matrix=matrix,
            engine=engine,
            storage_options=storage_options,
            transfer=transfer,
            observer=observer,
        )
        self._recording = Recording(
            state, self._own, self._meeting, self.writer, steps=proof_steps, tolerances=tolerances, observer=observer
        )
        self._last = self._now()
        self._save_seconds = 0.0
        self._has_saved = False
        self._stop: Stop | None = None
        self._stop_at = 0.0

    def resume(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        *,
        source: str | os.PathLike[str] | None = None,
        checkpoint_id: str | None = None,
        step: int | None = None,
        seq: int | None = None,
        only: Collection[str] | None = None,
        level: Level = "exists",
        allow: Collection[str] = (),
    ) -> ResumeReport:
        """Go on from the newest checkpoint of this run that is whole; a fresh start if there is none.

        Args:
            source: Another run to begin from, as fine-tuning does, as long as this one has no checkpoint of its own.
            checkpoint_id: One checkpoint by its name, of `source` if that is given.
            step: The same by its global step.
            seq: The same by its position in the log.
            only: Components to take from `source`, such as `("model",)`.
            level: How deep a checkpoint is verified before it is chosen: `exists`, `etag` or `full`.
            allow: Names of fingerprints, components and facts that may differ.

        Raises:
            NotFoundError: There is no such checkpoint. UncommittedError: it was never committed.
            IncompatibleStateError: It may not be loaded here; every difference is named, and what would open the way.
            ResumeError: There are checkpoints, and none is whole.
            CkptStoreError: See `training.resume`.
        """
        if only is not None and source is None:
            raise InvalidInputError("only= says what to take from another run.", hint="Pass source= too.")
        began = self._clock.monotonic()
        taken = None if only is None else tuple(sorted(names_given("only", only)))
        own = replace(self._own, level=level, allow=names_given("allow", allow))
        asked = replace(own, checkpoint_id=checkpoint_id, step=step, seq=seq)
        if source is not None:
            report = resume(self.state, own, self._meeting)
            if report.is_fresh:
                asked = replace(asked, url=os.fspath(source), only=taken)
                report = resume(self.state, asked, self._meeting)
            else:
                asked = own
        else:
            report = resume(self.state, asked, self._meeting)
        self._last = self._now()
        self._has_saved = not report.is_fresh and asked.url == self._url
        if not report.is_fresh:
            self._recording.follow(report, asked)
            self._tell_resumed(report, self._clock.monotonic() - began)
        return report

    def due(self) -> bool:
        """Return whether to save now; call it on every rank after each step. All ranks get the same answer.

        When the run is asked to stop, a last save is due if there is time for it, and `save` then ends the process. If
        there is none, this call does.

        Raises:
            StoppedBySignal: The run was asked to stop, and there is no time for a save.
        """
        now = self._clock.monotonic()
        mine = self._meeting.rank == 0 and self._schedule.is_due(self.state.progress, self._last, now=now)
        (due, asked), _ = self._meeting.sums([float(mine), float(self._signals.asked is not None)])
        if not asked and self._stop is None:
            return bool(due)
        if self._stop is None:
            self._stop = self._meeting.decide("stop", self._asked_to_stop, _earliest)
            self._stop_at = self._clock.monotonic() + self._stop.seconds
        if self._is_saved or self._left() < SLOWER * self._save_seconds:
            self._end(saved=self._is_saved)
        return True

    def save(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        checkpoint_id: str | None = None,
    ) -> sw.SaveFuture | None:
        """Save the state as it is now; in the background, return as soon as it may be changed.

        Args:
            metrics: What was measured, by name.
            tags: Labels.
            checkpoint_id: The name; by default after the step.

        Returns:
            What the save ends in; None if it has ended.

        Raises:
            StoppedBySignal: The state is saved, and the run was asked to stop.
            CkptStoreError: This save, or the background save before, failed: see `storage_writers`.

        If killed: the whole checkpoint or none of it.
        """
        if self._stop is not None:
            self._make_room()
        began = self._clock.monotonic()
        said = Said(metrics, tags, self._keep, checkpoint_id)
        background = self._background and self._stop is None
        future = save(self.state, self.writer, self._meeting, said, background=background)
        self._last, self._has_saved = self._now(), True
        if self._stop is not None:
            self._end(saved=True)
        if future is None:
            self._save_seconds = self._clock.monotonic() - began
        else:
            future.add_done_callback(lambda _: setattr(self, "_save_seconds", self._clock.monotonic() - began))
        self._recording.begin(future)
        return future

    def observe(
        self, *, loss: float, grad_norm: float | None = None, batch_ids: Iterable[object] | None = None
    ) -> None:
        """Say how a step went, after `progress` was moved on and before `due`. Call it on every rank, each step.

        Numbers are used for a few steps after a save and after a resume only, and ranks exchange them only then.

        Args:
            loss: Of this rank's share of the batch; a tensor is read, which waits for its device.
            grad_norm: Of all ranks together, as `clip_grad_norm_` returns it.
            batch_ids: What tells the samples of this rank's share apart: their indices, say.
        """
        self._recording.observe(loss, grad_norm, batch_ids)

    def wait(self) -> None:
        """Wait until the background save, if one is outstanding, has ended.

        Raises:
            CkptStoreError: It failed, or has not ended in time: see `CkptStoreWriter.wait`.
        """
        self.writer.wait()

    def close(self) -> None:
        """Wait as `wait` does, write what was recorded after the last save, and let go of memory and signals.

        Raises:
            CkptStoreError: See `wait`.
            StoppedBySignal: This process was asked to stop after the last time that `due` was called.
        """
        self._signals.remove()
        self.writer.close()
        self._recording.end()
        if self._stop is None and (stop := self._asked_to_stop()) is not None:
            self._stop = stop
            self._leave(saved=self._is_saved)

    def __enter__(self) -> Self:
        self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.remove()
        if kind is None:  # else the other ranks may not come; the process's end tells of a save that does not end well
            self.close()

    def _make_room(self) -> None:
        """Wait for the save in flight as long as there is time for one more; else end here."""
        try:
            sw.wait(self.writer, seconds=max(0.0, self._left() - SLOWER * self._save_seconds))
        except CkptStoreError as error:
            _log.warning("There is no time for a last save: %s", error)
            self._end(saved=False)

    def _asked_to_stop(self) -> Stop | None:
        asked = self._signals.asked
        if asked is None:
            return None
        return Stop(asked.number, self._meeting.rank, self._stop_seconds - (self._clock.monotonic() - asked.at))

    def _left(self) -> float:
        """Return how many seconds there are until the end."""
        return max(0.0, self._stop_at - self._clock.monotonic())

    @property
    def _is_saved(self) -> bool:
        """Whether this very step is saved, or is being saved."""
        progress = self.state.progress
        return self._has_saved and self._last.global_step == progress.global_step and not progress.micro_step

    def _end(self, *, saved: bool) -> NoReturn:
        """End the run: the save in flight ends or is given up, and the process says why it stops."""
        assert self._stop is not None  # noqa: S101  (asked of a run that stops)
        try:
            sw.wait(self.writer, seconds=self._left())
        except CkptStoreError as error:
            saved = False
            _log.warning("The save in flight did not end well: %s", error)
        self._recording.end()
        self._leave(saved=saved)

    def _leave(self, *, saved: bool) -> NoReturn:
        """Say why the run stops, and end the process."""
        assert self._stop is not None  # noqa: S101  (asked of a run that stops)
        newest = self.writer.committed.seq if self.writer.committed is not None else None
        step = self.state.progress.global_step
        tell(self._observer, Stopping(str(self._stop), step, newest, saved))
        if self._meeting.rank == 0:
            _log.warning(
                "Stopping at step %d because of %s. The newest commit of this job: %s.", step, self._stop, newest
            )
        raise StoppedBySignal(128 + self._stop.number)

    def _tell_resumed(self, report: ResumeReport, seconds: float) -> None:
        assert report.checkpoint_id is not None  # noqa: S101  (it is not fresh)
        assert report.seq is not None  # noqa: S101  (the same)
        changed = report.saved_world_size != report.world_size
        event = Resumed(report.checkpoint_id, report.seq, report.global_step, report.steps_lost, seconds, changed)
        tell(self._observer, event)
        if self._meeting.rank == 0:
            _log.info("%s", report.table())

    def _now(self) -> Saved:
        progress = self.state.progress
        return Saved(progress.global_step, progress.epoch, self._clock.monotonic())


def _earliest(parts: Sequence[Stop | None]) -> Stop:
    """Return what asked for the earliest end."""
    return min((part for part in parts if part is not None), key=lambda stop: stop.seconds)
