"""`Checkpointer`: a training loop's own: resume, save when it is due, and stop when it is asked to."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

import storage_writers as sw
from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import InvalidInputError
from ckptstore.events import Observer, silent
from ckptstore.maintenance.collect_plan import GRACE_SECONDS
from ckptstore.maintenance.retention import Keep
from ckptstore.options import LogOptions, TransferOptions, check_flags, check_kinds, check_seconds
from ckptstore.protocol.claim import Takeover
from ckptstore.protocol.verify import Level
from ckptstore.training.asked import Asked
from ckptstore.training.cautions import Idle
from ckptstore.training.claims import check_goes_on, claim
from ckptstore.training.compat import Matrix
from ckptstore.training.ending import Ending
from ckptstore.training.gate import names_given
from ckptstore.training.keeping import Keeping
from ckptstore.training.meeting import Meeting
from ckptstore.training.recording import Recording
from ckptstore.training.report import ResumeReport
from ckptstore.training.resuming import check_target, go_back, resume_or_begin
from ckptstore.training.sampler import begin_all
from ckptstore.training.saving import Said, save
from ckptstore.training.schedule import Saved, Schedule
from ckptstore.training.signals import STOPPING, Signals
from ckptstore.training.state import TrainingState
from ckptstore.training.stopping import StoppedBySignal
from ckptstore.training.told import tell_resumed, tell_step
from ckptstore.training.tolerances import Tolerances
from storage_writers import exits
from storage_writers.settling import WhenBusy

Number = float | torch.Tensor


class Checkpointer:
    """Keeps a training state in a run. Use it with `with`; every call is collective.

    Args:
        url: Root of the run.
        state: What is saved and resumed.
        every_steps: A save is due at multiples of so many global steps.
        every_seconds: A save is due so long after the one before, by rank 0's clock.
        every_epochs: A save is due when so many epochs have ended.
        keep: What is to be kept: after each commit rank 0 retires the rest, in the background. Recorded with each save.
        keep_grace_seconds: How long what is retired stays before it is deleted, for those who read it. 0: not at all.
        background: Save while the training goes on.
        matrix: Which changes of topology may be resumed.
        proof_steps: So many steps after a save are recorded with it, and compared after a resume. 0: none.
        tolerances: How far they may differ.
        stop_signals: What asks the run to stop; others' handlers of them run too. Off the main thread none are handled.
        stop_seconds: How long there is from the signal to the end. A little less than the scheduler gives.
        process_group: The ranks; None: all. Saves use a gloo group of their own of the same ranks, never this one.
        allow_one_rank: This process is alone, though others run.
        engine, storage_options, transfer, log: How the store is used.
        job, takeover: See `CkptStoreWriter`.
        staging_bytes, when_busy, busy_timeout_seconds, commit_timeout_seconds, agree_timeout_seconds: See there.
        observer: Hears of every phase.
        clock: Where the seconds here come from.

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
        keep_grace_seconds: float = GRACE_SECONDS,
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
        clock: Clock | None = None,
    ) -> None:
        check_flags(background=background, allow_one_rank=allow_one_rank)
        check_seconds(stop_seconds=stop_seconds)
        check_kinds(keep=(keep, Keep), matrix=(matrix, Matrix), tolerances=(tolerances, Tolerances))
        if not isinstance(state, TrainingState):
            raise InvalidInputError(f"state must be a TrainingState, not {state!r:.80}.", hint="Make one of the model.")
        self._url = os.fspath(url)
        self.state = state
        self._schedule = Schedule(every_steps, every_seconds, every_epochs)
        self._keep, self._background, self._observer = keep, background, observer
        self._clock = clock or SystemClock()
        self._meeting = Meeting(process_group, one_rank=allow_one_rank, seconds=agree_timeout_seconds)
        self._signals = Signals(stop_signals, seconds=stop_seconds, clock=self._clock)
        self._when_busy = when_busy
        self.writer = sw.CkptStoreWriter(
            url,
            engine=engine,
            storage_options=storage_options,
            process_group=self._meeting.saving_group,
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
            log=log,
            observer=observer,
        )
        self._claim = partial(claim, self._own, job=job, takeover=takeover)
        self._keeping = Keeping(self._own, self._meeting, keep, grace_seconds=keep_grace_seconds, clock=self._clock)
        self._recording = Recording(
            state,
            self._own,
            self._meeting,
            steps=proof_steps,
            tolerances=tolerances,
            observer=observer,
            clock=self._clock,
        )
        self._ending = Ending(
            self._meeting,
            self.writer,
            self._signals,
            self._recording,
            state.progress,
            seconds=stop_seconds,
            busy_seconds=busy_timeout_seconds,
            clock=self._clock,
            observer=observer,
        )
        self._last, self._idle, self._goes_on = self._now(), Idle(), False
        self._saved_step: int | None = None
        self._saving: sw.SaveFuture | None = None
        """Of the save of that step, if it is one in the background."""

    @property
    def is_stopping(self) -> bool:
        """Whether the run was asked to stop, and all ranks know: there is little time, so save without validating."""
        return self._ending.grace is not None

    @property
    def meeting(self) -> Meeting:
        """The ranks that save and resume together."""
        return self._meeting

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

        Where one of this run is asked for, the run goes back to it: newer checkpoints are set aside, nothing is
        deleted; `ckptstore restore URL NAME@SEQ` undoes it. What is saved then is of a new incarnation.

        Where newer ones are damaged and nobody asked for an older one, they stay as they are: it may have been the
        network. The next save is newer: they are tried again only if all that was saved after them is damaged too.

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
            InvalidInputError: The run would go back to a checkpoint that is set aside itself. Nothing was changed.
            FencedError: A newer job has claimed the run. ConflictError: `takeover` forbids to claim it.
            CkptStoreError: See `training.resume`; or newer ones are not known to be set aside: resume again.

        If killed: perhaps a claim; all newer ones are set aside, where the run goes back, or none.
        """
        if only is not None and source is None:
            raise InvalidInputError("only= says what to take from another run.", hint="Pass source= too.")
        began = self._clock.monotonic()
        taken = None if only is None else tuple(sorted(names_given("only", only)))
        own = replace(self._own, level=level, allow=names_given("allow", allow), hold=self._keeping.hold)
        asked = replace(own, checkpoint_id=checkpoint_id, step=step, seq=seq)
        goes_back = source is None and asked.is_one
        if goes_back:
            self._ending.settle()  # what is under way would commit above what is set aside
            if self.is_stopping:
                self._ending.end(saved=self._is_saved)
        with self._ending.watched():
            if goes_back:
                self._meeting.led("target", lambda: check_target(asked))
            lost = self._meeting.led("claim", self._claim)
            other = None if source is None else replace(asked, url=os.fspath(source), only=taken)
            report, asked = resume_or_begin(self.state, asked if other is None else own, other, self._meeting, lost)
            if goes_back:
                go_back(asked, report, self._meeting)
        self._last, self._goes_on = self._now(), True
        is_own = not report.is_fresh and asked.url == self._url
        self._saved_step, self._ending.resumed_seq = (report.global_step, report.seq) if is_own else (None, None)
        if not report.is_fresh:
            seconds = self._clock.monotonic() - began
            self._recording.follow(report, asked)
            tell_resumed(self._observer, report, seconds, rank=self._meeting.rank, is_own=is_own)
            tell_step(self._observer, self.state.progress)
        self._ending.hear()
        if self.is_stopping:
            self._ending.end(saved=self._is_saved)
        return report

    def due(self) -> bool:
        """Return whether to save now; call it on every rank after each step. All ranks get the same answer.

        It is an exchange of one small message. With very many ranks, call it every few steps only, at the same ones on
        all; multiples of `every_steps` that were passed meanwhile count.

        When the run is asked to stop, a last save is due if there is time for it, and `save` then ends the process. If
        there is none, this call does.

        Raises:
            StoppedBySignal: The run was asked to stop, and there is no time for a save, or nothing new to be saved.
            DisagreementError: A rank is gone, or did not come within the group's time-out.
        """
        tell_step(self._observer, self.state.progress)
        self._idle.asked(self.state.progress, rank=self._meeting.rank)
        now = self._clock.monotonic()
        mine = self._meeting.rank == 0 and self._schedule.is_due(self.state.progress, self._last, now=now)
        (due,) = self._ending.hear(float(mine))
        if not self.is_stopping:
            return bool(due)
        word = self._ending.word(is_saved=self._is_saved)
        if word == "end":
            self._ending.end(saved=self._is_saved)
        return word == "save"

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
            StoppedBySignal: The run was asked to stop. The state is saved if there was time for it.
            BusyError: The save before has not ended, and `when_busy` is `raise`.
            StalledError: The save before has not ended in time.
            ResumeError: The run has checkpoints, and none was resumed. IntegrityError: Its log was lost.
            CkptStoreError: This save, or the background save before, failed: see `storage_writers`.

        If killed: the whole checkpoint or none of it.
        """
        if not self._goes_on:
            self._meeting.led("begin", partial(check_goes_on, self._own))
            self._goes_on = True
        begin_all(self.state.samplers.values())
        said, ending = Said(metrics, tags, self._keep, checkpoint_id), self._ending
        if self._when_busy == "wait":
            ending.settle()
        else:
            ending.hear()
        if self.is_stopping:  # in the background, so that it can be waited for as long as there is time
            ending.save_last(lambda: save(self.state, self.writer, self._meeting, said, background=True))
        began = self._clock.monotonic()
        with ending.watched():
            future = save(self.state, self.writer, self._meeting, said, background=self._background)
        self._last = self._now()
        if future is not None and future.skipped:
            return future
        self._saved_step, self._saving, ending.future = self.state.progress.global_step, future, future
        if future is None:
            ending.save_seconds = self._clock.monotonic() - began
        else:
            future.add_done_callback(lambda _: setattr(ending, "save_seconds", self._clock.monotonic() - began))
        ending.hear()
        if self.is_stopping:
            ending.end(saved=True)
        seq = ending.newest_seq if future is None else None
        self._recording.begin(said.name_at(self.state.progress), future, seq=seq)
        self._keeping.saved(future, seq=seq)
        return future

    def observe(
        self, *, loss: Number, grad_norm: Number | None = None, batch_ids: Iterable[object] | None = None
    ) -> None:
        """Say how a step went, after `progress` was moved on and before `due`. Call it on every rank, each step.

        Numbers are used for a few steps after a save and after a resume only, and ranks exchange them only then.

        Args:
            loss: Of this rank's share of the batch; a tensor is read, which waits for its device.
            grad_norm: Of all ranks together, as `clip_grad_norm_` returns it.
            batch_ids: What tells the samples of this rank's share apart: their indices, say.
        """
        begin_all(self.state.samplers.values())
        self._recording.observe(loss, grad_norm, batch_ids)

    def wait(self) -> None:
        """Wait until the background save, if one is outstanding, has ended.

        Raises:
            StoppedBySignal: The run was asked to stop, and the save has not ended in the time that there is.
            CkptStoreError: It failed, or has not ended in time: see `CkptStoreWriter.wait`.
        """
        self._ending.wait()

    def close(self) -> None:
        """Wait as `wait` does, write what was recorded after the last save, and let go of memory and signals.

        Raises:
            StoppedBySignal: The run was asked to stop since `due` or `save` was called last. Nothing more is saved.
            CkptStoreError: See `wait`.
        """
        try:
            if self._ending.is_over:
                exits.take_time()
            else:
                self._finish()
        except StoppedBySignal:
            raise  # further signals are noted only, until the process ends
        except BaseException:
            self._signals.remove()
            raise
        self._signals.remove()
        if not self.is_stopping:
            self._signals.pass_on()

    def _finish(self) -> None:
        self._ending.settle()
        if not self.is_stopping:
            try:
                self.writer.close()
            finally:
                self._recording.end()
                self._keeping.end()
            self._ending.hear()
        if self.is_stopping:
            self._ending.end(saved=self._is_saved)

    def __enter__(self) -> Self:
        self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not issubclass(kind, StoppedBySignal):
            self._signals.remove()
            is_known = self._ending.future is None or self._ending.future.done()
            self._ending.end_by_exception(kind, saved=is_known and self._is_saved)
            self.writer.let_go()
            self._recording.let_go()

    @property
    def _is_saved(self) -> bool:
        """Whether this very step is saved, or is being saved and nothing is known to be wrong with that."""
        progress = self.state.progress
        has_failed = self._saving is not None and self._saving.failed
        return self._saved_step == progress.global_step and not progress.micro_step and not has_failed

    def _now(self) -> Saved:
        progress = self.state.progress
        return Saved(progress.global_step, progress.epoch, self._clock.monotonic())
