"""One background save of this rank: from the moment it is asked for until somebody was told how it ended."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ckptstore.errors import CkptStoreError, CommitUnknownError, StalledError
from ckptstore.protocol.attempt import Description
from storage_writers import exits, worker
from storage_writers.dcp_frames import future_run_here, unknown_torch
from storage_writers.gates import Gate
from storage_writers.telling import Telling

if TYPE_CHECKING:
    from storage_writers.saving import Save
    from storage_writers.staging import Staged

Explain = Callable[[BaseException, "Save | None"], CkptStoreError | None]

GRACE_SECONDS = 1.0
"""How much later than a save's own time who waits for it gives it up: its own word says more."""
DECIDING_SECONDS = 150.0
"""How long a commit that was sent in time may take to be decided: longer than the log tries."""


class Outstanding:
    """A background save, as the thread that asked for it sees it.

    Args:
        description: What it records.
        gate: Whether it may commit still.
        is_root: This rank commits.
        by_process: Another process saves.
        generation: Of what its ranks meet in, and what is left behind when it is given up.
        telling: What is heard of it.
    """

    def __init__(
        self,
        description: Description,
        gate: Gate,
        *,
        is_root: bool,
        by_process: bool,
        generation: int = 0,
        telling: Telling | None = None,
    ) -> None:
        self.telling = telling or Telling()
        self.description, self.gate, self.by_process = description, gate, by_process
        self.is_root, self.generation = is_root, generation
        self.staged: Staged | None = None
        """The copy of its state, from the staging on."""
        self.state: dict[str, Any] | None = None
        """What DCP was given to save; emptied when it has ended."""
        self.save: Save | None = None
        """What the ranks agreed on, once they have."""
        self.future: Future[Metadata] | None = None
        self.error: CkptStoreError | BaseException | None = None
        """How it ended; ours where it is one of ours."""
        self.worker_lost = False
        """Whether the process that saved cannot save again."""
        self._others: set[threading.Thread] | None = {*threading.enumerate(), threading.current_thread()}
        self._run: Future[Metadata] | None = None
        """Of the thread that runs the save: `future`, unless who asked for it was interrupted before having that."""
        self._refused = False
        self._raw: BaseException | None = None
        self._planner: object = None
        self._told = False
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Return True, once, to the thread that runs the save: one that was not there when it was asked for.

        Raises:
            StalledError: It was refused before. Its state is not there any more.
        """
        with self._lock:
            if self._others is None or threading.current_thread() in self._others:
                return False
            if self._refused:
                self.gate.check()
            self._others, self._run = None, future_run_here()
            return True

    @property
    def may_come_late(self) -> bool:
        """Whether it was refused before it began: a thread that was being started may come to it still."""
        return self._refused and self._others is not None

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse the save with what is raised, which goes to whoever asked for it."""
        try:
            yield
        except BaseException as error:
            self.refuse(error)
            raise

    def refuse(self, error: BaseException) -> None:
        """Let nothing of it be committed, if it is not too late: who asked for it heard of an error, and goes on.

        So the state may change from now on. A save that has begun is outstanding until it ends; its rank fails before
        anything is committed, unless it has read everything by now.
        """
        if self.gate.close():
            self.telling.end(error)
        self.tell()
        with self._lock:
            if self.future is not None or self._refused or self.ended:
                return
            runs = self._run
            if self._others is None and runs is None:  # nobody knows when it ends
                return
            self.error, self._refused = error, True
        if runs is None:
            self._end_refused()
        else:
            runs.add_done_callback(self._end_run)

    def _end_run(self, ended: Future[Metadata]) -> None:
        """Tell how it ended, if nobody did: it was refused too late, perhaps, and is committed."""
        self.telling.end(None if ended.cancelled() else Future.exception(ended))  # which nobody asked for
        self._end_refused()

    def _end_refused(self) -> None:
        """Note that nothing of it runs, and never will."""
        self.drop_state()
        self._run = None  # its error holds the state
        self._ended.set()

    @property
    def name(self) -> str:
        """The checkpoint's, for people."""
        return f"the save of {self.save.name}" if self.save is not None else "an async save"

    def adopt(
        self, future: Future[Metadata], explain: Explain, *, planner: object, kind: type[WatchedFuture] | None = None
    ) -> None:
        """Follow DCP's future; from now on it notes who asks it.

        Args:
            future: In which the save ends.
            explain: Returns our error in what DCP raised.
            planner: Of this save, if the caller gave one: it keeps the state.
            kind: What it becomes.

        Raises:
            UnsupportedError: It is none: this torch is not known.
        """
        self._planner = planner
        if not isinstance(future, Future):
            raise unknown_torch()
        future.__class__ = kind or WatchedFuture
        assert isinstance(future, WatchedFuture)  # noqa: S101  (it is one now)
        future.outstanding = self
        try:
            self.future = future
            exits.watch(self)
            future.add_done_callback(lambda ended: self._end(ended, explain))
        except BaseException:  # an interrupt: it is refused, by what is known of its thread
            self.future = None
            raise

    def _end(self, ended: Future[Metadata], explain: Explain) -> None:
        """Note how it ended, and drop every reference to the state before anybody else is called back."""
        error = self.error = self._raw = Future.exception(ended)
        with contextlib.ExitStack() as last:  # what a callback raises is logged, and nobody hears of it
            last.callback(self._ended.set)
            last.callback(self.drop_state)
            last.callback(lambda: self.telling.end(self.error))
            if error is None:
                exits.forget(self)
                return
            ours = explain(error, self.save) or (worker.explained(error, self) if self.by_process else None)
            if ours is not None and ours is not error and ours.__cause__ is None:
                ours.__cause__ = error
            self.error = ours or error
            let_go(error)

    def drop_state(self) -> None:
        """Give the memory back."""
        staged, self.staged = self.staged, None
        if self.save is not None:
            self.save.staged = None
        if staged is not None:
            state = staged.state
            staged.end()
            state.clear()  # DCP holds it until all callbacks have run
        planner, self._planner = self._planner, None
        for name in ("state_dict", "original_state_dict"):
            if name in getattr(planner, "__dict__", ()):
                setattr(planner, name, {})

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    @property
    def told(self) -> bool:
        """Whether somebody here was told how it ended."""
        return self._told

    def tell(self) -> None:
        """Note that somebody was told."""
        self._told = True
        exits.forget(self)

    def wait(self, seconds: float | None) -> BaseException | None:
        """Return how it ended, or that it was given up after its time; tell nobody.

        Raises:
            TimeoutError: It has not ended within `seconds`.
        """
        left = max(0.0, self.gate.left() + GRACE_SECONDS)
        if seconds is not None and seconds < left:
            if not self._ended.wait(seconds):
                raise TimeoutError
            return self.error
        if self._ended.wait(left):
            return self.error
        error = self._give_up()
        self.telling.end(error)
        return error

    @property
    def is_overdue(self) -> bool:
        """Whether its time is over, and it has not ended."""
        return not self.ended and self.gate.left() + GRACE_SECONDS <= 0

    def raw(self, seconds: float | None) -> BaseException | None:
        """Return what `wait` does, as DCP raised it."""
        error = self.wait(seconds)
        return self._raw if self._raw is not None else error

    def _give_up(self) -> BaseException | None:
        what, seconds = self.name, self.gate.seconds
        if self.by_process:  # the gate that counts was there: a record may be on its way, or have arrived
            worker.kill()
            closed, patience = False, GRACE_SECONDS
        else:
            closed = self.gate.close()
            patience = DECIDING_SECONDS if self.is_root and not closed else 0.0
        if self._ended.wait(patience):
            return self.error
        if not self.is_root:
            return StalledError(
                f"{what} has not ended within {seconds:g} s and was given up. Rank 0 knows whether it was committed.",
                hint="Call writer.wait() on all ranks; `ckptstore ls URL` lists what is committed.",
            )
        if closed:
            return StalledError(
                f"{what} was not committed within {seconds:g} s and was given up; it never will be.",
                hint="Look at what the store is doing, with `ckptstore doctor URL`, and save again.",
            )
        if self.save is not None and self.save.is_committed:
            return None
        return CommitUnknownError(f"{what} had not ended when its {seconds:g} s were over. It may have been committed.")


class WatchedFuture(Future[Metadata]):
    """DCP's future, which notes when somebody asks how the save ended, and does not outlast its time."""

    outstanding: Outstanding

    def cancel(self) -> bool:
        """Return False: the other ranks are saving too."""
        return False

    def done(self) -> bool:
        """Return whether it has ended, well or not, or its time is over."""
        return self.outstanding.ended or self.outstanding.is_overdue

    def result(self, timeout: float | None = None) -> Metadata:
        """Return DCP's metadata, or raise what went wrong."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        save = self.outstanding.save
        if not super().done() and save is not None:
            raise StalledError(
                f"The save of {save.name} was committed in slot {save.committed}, and has not ended.",
                hint="Delete nothing: the checkpoint is there. Run `ckptstore ls URL`.",
                seq=save.committed,
            )
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong, or None."""
        error = self.outstanding.raw(timeout)
        self.outstanding.tell()
        return error


class SaveFuture(WatchedFuture):
    """A save under way, whose errors are ours. It cannot be cancelled: the other ranks are saving too."""

    skipped = False
    """Whether it was never begun, because the one before had not ended; its result is None then."""

    @property
    def failed(self) -> bool:
        """Whether it is known that it went wrong; whoever only looks here is not told how."""
        return self.outstanding.ended and self.outstanding.error is not None

    @property
    def seq(self) -> int | None:
        """The slot in which it was committed; None on other ranks than 0, and as long as it is not known."""
        save = self.outstanding.save
        return save.committed if save is not None and save.is_committed else None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong, or None."""
        error = self.outstanding.wait(timeout)
        self.outstanding.tell()
        return error


class SkippedSave(SaveFuture):
    """A save that was not begun."""

    skipped = True
    failed = False
    seq = None

    def __init__(self) -> None:
        super().__init__()
        self.set_result(cast("Metadata", None))

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self, timeout: float | None = None) -> Metadata:
        """Return None."""
        return Future.result(self, timeout)

    def exception(self, timeout: float | None = None) -> None:
        """Return None."""
        del timeout


def let_go(error: BaseException) -> None:
    """Drop the frames of a failed save: they hold its whole state for as long as somebody keeps the error.

    DCP's own exception tells as text where it was raised, and any other is given a note.
    """
    if not isinstance(error, CheckpointException):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    seen: set[int] = set()
    errors = [error]
    while errors:
        each = errors.pop()
        if id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            errors += [other for other in (each.__cause__, each.__context__) if other is not None]
            errors += [failure for failure, _ in getattr(each, "failures", {}).values()]
