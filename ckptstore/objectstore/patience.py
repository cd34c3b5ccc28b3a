"""How often and how long one request is tried: the one policy, of every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.errors import CkptStoreError, IntegrityError, OutcomeUnknownError, StalledError, UnavailableError
from ckptstore.options import RetryOptions

Result = TypeVar("Result")


class Patience:
    """The tries of one request. Made when the first one begins.

    Args:
        options: The policy.
        clock: Where the deadline comes from.
        ids: Where jitter comes from.
    """

    def __init__(self, options: RetryOptions, *, clock: Clock | None = None, ids: IdSource | None = None) -> None:
        self._options, self._clock, self._ids = options, clock or SystemClock(), ids or SystemIds()
        self._deadline = self._clock.monotonic() + options.deadline_seconds
        self._left, self._longest = options.attempts - 1, options.first_pause_seconds

    def pause_after(self, error: CkptStoreError) -> float | None:
        """Return how many seconds to wait before the next try, or None if there is to be none.

        A pause is drawn between 0 and a bound that doubles; where the server asked for a longer one, that is kept.
        """
        drawn = max(self._longest * self._ids.fraction(), asked_pause(error, self._options.longest_pause_seconds))
        self._longest = min(2 * self._longest, self._options.longest_pause_seconds)
        self._left -= 1
        return drawn if self._left >= 0 and self._clock.monotonic() + drawn <= self._deadline else None

    def wait(self, seconds: float) -> None:
        """Wait for a pause to end."""
        self._clock.sleep(seconds)


def tried(
    act: Callable[[], Result],
    patience: Patience,
    *,
    writes: bool = False,
    hopeless: Callable[[CkptStoreError], bool] = lambda _: False,
) -> Result:
    """Return what `act` returns, tried again while that may help.

    Args:
        act: One request.
        patience: How often and how long.
        writes: It may have happened without an answer, and has the same effect twice.
        hopeless: Whether an error stays what it is, however often it is tried.

    Raises:
        OutcomeUnknownError: One try may have happened, and none succeeded: what a later one answers proves nothing.
        StalledError: There was no answer in time, the last time either.
        CkptStoreError: Whatever the last try raised.
    """
    ambiguous = False
    while True:
        try:
            return act()
        except CkptStoreError as error:
            unknown = writes and isinstance(error, OutcomeUnknownError)
            again = (unknown or isinstance(error, UnavailableError)) and not hopeless(error)
            pause = patience.pause_after(error) if again else None
            if pause is None:
                if ambiguous and not unknown and not isinstance(error, IntegrityError):  # that was looked at
                    raise OutcomeUnknownError(error.message, hint=error.hint, **error.facts) from error
                if (ended := given_up(error)) is error:
                    raise
                raise ended from error
            ambiguous = ambiguous or unknown
        patience.wait(pause)


def given_up(error: CkptStoreError) -> CkptStoreError:
    """Return what is raised where `error`, of the last try, leaves no other one: `StalledError` if nothing came."""
    if isinstance(error, UnavailableError) and error.facts.get("stalled"):
        return StalledError(error.message, hint="", **error.facts)
    return error


def asked_pause(error: CkptStoreError | None, longest: float) -> float:
    """Return how many seconds the server asked to be left alone, at most `longest`; 0 if it did not."""
    asked = error.facts.get("retry_after_seconds") if error is not None else None
    return min(float(asked), longest) if isinstance(asked, int | float) and asked > 0 else 0.0
