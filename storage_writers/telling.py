"""What an observer hears of one save of this rank, and of a restore that fails."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

from ckptstore.clock import SystemClock
from ckptstore.errors import CkptStoreError, IntegrityError
from ckptstore.events import (
    OTHER,
    DamageFound,
    Observer,
    Phase,
    PhaseEnded,
    RestoreFailed,
    SaveBegan,
    SaveEnded,
    silent,
    tell,
)

_CLOCK = SystemClock()
_numbers = itertools.count(1)


class Telling:
    """One save, as an observer hears of it: that it began, each phase, and once how it ended.

    Args:
        observer: Hears of it.
        background: The training goes on meanwhile.
    """

    def __init__(self, observer: Observer = silent, *, background: bool = False) -> None:
        self._observer, self._number = observer, next(_numbers)
        self.name: str | None = None
        """The checkpoint's, once the ranks agree on it."""
        self._began = self._phase_began = _CLOCK.monotonic()
        self._waited = 0.0
        self._told: set[Phase] = set()
        self._lock, self._is_over = threading.Lock(), False
        tell(observer, SaveBegan(self._number, background))

    def begin(self) -> None:
        """Let the first phase begin now: a save in the background was asked for before."""
        self._phase_began = _CLOCK.monotonic()

    def ended(self, phase: Phase) -> None:
        """Tell that a phase ended, and let the next one begin."""
        before, self._phase_began = self._phase_began, _CLOCK.monotonic()
        self._tell_phase(phase, self._phase_began - before)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note how long the training waits for the staging within."""
        began = _CLOCK.monotonic()
        try:
            yield
        finally:
            self._waited += _CLOCK.monotonic() - began

    def staged(self) -> None:
        """Tell that the state may be changed again."""
        self._tell_phase("stage", self._waited)

    def _tell_phase(self, phase: Phase, seconds: float) -> None:
        if phase not in self._told:
            self._told.add(phase)
            tell(self._observer, PhaseEnded(self._number, self.name, phase, seconds))

    def end(self, error: BaseException | None = None) -> None:
        """Tell how the save ended, unless that was told."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if was_over:
            return
        if self._waited:
            self.staged()
        if error is not None:
            _tell_damage(self._observer, error)
        seconds = _CLOCK.monotonic() - self._began
        tell(self._observer, SaveEnded(self._number, self.name, seconds, None if error is None else code_of(error)))


@contextlib.contextmanager
def telling_failed_restore(observer: Observer, checkpoint_id: str | None = None) -> Iterator[None]:
    """Tell that the load or resume within failed, and where damage was found."""
    try:
        yield
    except BaseException as error:
        tell_restore_failed(observer, error, checkpoint_id=checkpoint_id)
        raise


def tell_restore_failed(observer: Observer, error: BaseException, *, checkpoint_id: str | None = None) -> None:
    """Tell that a load or a resume failed, and where damage was found."""
    _tell_damage(observer, error)
    tell(observer, RestoreFailed(checkpoint_id, code_of(error)))


def code_of(error: BaseException) -> str:
    """Return the error's code."""
    return error.code if isinstance(error, CkptStoreError) else OTHER


def _tell_damage(observer: Observer, error: BaseException) -> None:
    if code_of(error) == IntegrityError.code:
        key = error.facts.get("key") if isinstance(error, CkptStoreError) else None
        tell(observer, DamageFound(key if isinstance(key, str) else None))
