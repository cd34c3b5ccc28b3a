"""One background save of this rank: from the staging of its state until somebody was told how it ended."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ckptstore.clock import SystemClock
from ckptstore.errors import CkptStoreError, CommitUnknownError, StalledError
from ckptstore.protocol.attempt import Description
from storage_writers import exits, worker

if TYPE_CHECKING:
    from storage_writers.saving import Save
    from storage_writers.staging import Staged

Explain = Callable[[BaseException, "Save | None"], CkptStoreError | None]

GRACE_SECONDS = 1.0
"""How much later than a save's own time who waits for it gives it up: its own word says more."""
DECIDING_SECONDS = 150.0
"""How long a commit that was sent in time may take to be decided: longer than the log tries."""

_CLOCK = SystemClock()
_ASYNC_SAVE = inspect.unwrap(state_dict_saver.async_save).__code__


def call_of_dcp() -> Mapping[str, Any]:
    """Return the variables of DCP's `async_save` that is calling us on this thread; none if it is not.

    It tells a stager neither how it will save nor of the future in which the save ends, and nobody else hears of a
    failure.
    """
    frame = sys._getframe(1)  # noqa: SLF001  (the documented way to the stack)
    while frame.f_code is not _ASYNC_SAVE:
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    return frame.f_locals


class Gate:
    """Whether a save may commit: decided once, between the thread that commits and the one that gives the save up.

    Args:
        seconds: From now on, in which it may.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = _CLOCK.monotonic() + seconds
        self._lock = threading.Lock()
        self._passed = self._closed = False

    def left(self) -> float:
        """Return the seconds left."""
        return self.deadline - _CLOCK.monotonic()

    def pass_through(self) -> None:
        """Decide for the commit, or find that it is too late.

        Raises:
            StalledError: The time is over, or somebody gave the save up. Nothing was sent.
        """
        with self._lock:
            if self._passed:
                return
            if self._closed or self.left() <= 0:
                self._closed = True
                raise StalledError(
                    f"The save was not ready to commit within {self.seconds:g} s. Nothing was committed.",
                    hint="Raise commit_timeout_seconds, or save less at a time.",
                )
            self._passed = True

    def close(self) -> bool:
        """Decide against the commit; return False if it was sent before."""
        with self._lock:
            self._closed = not self._passed
            return self._closed


class Outstanding:
    """A background save, as the thread that asked for it sees it.

    Args:
        description: What it records.
        staged: The copy of its state.
        gate: Whether it may commit still.
        is_root: This rank commits.
        by_process: Another process saves.
    """

    def __init__(
        self, description: Description, staged: Staged, *, gate: Gate, is_root: bool, by_process: bool
    ) -> None:
        self.description, self.gate, self.by_process = description, gate, by_process
        self.staged: Staged | None = staged
        self.is_root = is_root
        self.save: Save | None = None
        """What the ranks agreed on, once they have."""
        self.future: Future[Metadata] | None = None
        self.error: CkptStoreError | BaseException | None = None
        """How it ended; ours where it is one of ours."""
        self.worker_lost = False
        """Whether the process that saved cannot save again."""
        self._asked_on: int | None = threading.get_ident()
        self._raw: BaseException | None = None
        self._planner: object = None
        self._told = False
        self._ended = threading.Event()

    def begin(self) -> bool:
        """Return True, once, to the thread that runs the save: another one than asked for it."""
        if self._asked_on in (None, threading.get_ident()):
            return False
        self._asked_on = None
        return True

    @property
    def name(self) -> str:
        """The checkpoint's, for people."""
        return f"the save of {self.save.name}" if self.save is not None else "an async save"

    def adopt(self, future: Future[Metadata], explain: Explain, *, planner: object) -> None:
        """Follow DCP's future; from now on it notes who asks it.

        Args:
            future: In which the save ends.
            explain: Returns our error in what DCP raised.
            planner: Of this save, if the caller gave one: it keeps the state.
        """
        self._planner = planner
        future.__class__ = WatchedFuture
        assert isinstance(future, WatchedFuture)  # noqa: S101  (it is one now)
        self.future, future.outstanding = future, self
        exits.watch(self)
        future.add_done_callback(lambda _: self._end(explain))

    def _end(self, explain: Explain) -> None:
        """Note how it ended, and drop every reference to the state before anybody else is called back."""
        assert self.future is not None  # noqa: S101  (this is its callback)
        error = self._raw = Future.exception(self.future)
        if error is not None:
            ours = explain(error, self.save) or (worker.explained(error, self) if self.by_process else None)
            if ours is not None and ours is not error and ours.__cause__ is None:
                ours.__cause__ = error
            self.error = ours or error
            let_go(error)
        else:
            exits.forget(self)
        self.drop_state()
        self._ended.set()

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
        return self.error if self._ended.wait(left) else self._give_up()

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
        if self.by_process:
            worker.kill()  # it cannot commit any longer; its end comes through the future
            if self._ended.wait(GRACE_SECONDS):
                return self.error
        if not self.is_root:
            return StalledError(
                f"{what} has not ended within {seconds:g} s and was given up. Rank 0 knows whether it was committed.",
                hint="Call writer.wait() on all ranks; `ckptstore ls URL` lists what is committed.",
            )
        if self.gate.close():
            return StalledError(
                f"{what} was not committed within {seconds:g} s and was given up; it never will be.",
                hint="Look at what the store is doing, with `ckptstore doctor URL`, and save again.",
            )
        if self._ended.wait(DECIDING_SECONDS):
            return self.error
        if self.save is not None and self.save.is_committed:
            return None
        return CommitUnknownError(f"{what} was being committed when its {seconds:g} s were over, and has not ended.")


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

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong, or None."""
        error = self.outstanding.wait(timeout)
        self.outstanding.tell()
        return error


class SkippedSave(SaveFuture):
    """A save that was not begun."""

    skipped = True

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
