"""How often and how long one request is tried, and what is raised then: the one policy, of every engine.

What it cannot reach is inside obstore: the parts of an upload, which are tried again by obstore's own rule, made from
the same options; and Retry-After, which obstore does not pass on.
"""

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
        writes: Whether it could change the store. It must have the same effect twice.
        clock: Where the deadline comes from.
        ids: Where jitter comes from.
    """

    def __init__(
        self, options: RetryOptions, *, writes: bool = False, clock: Clock | None = None, ids: IdSource | None = None
    ) -> None:
        self._options, self._clock, self._ids = options, clock or SystemClock(), ids or SystemIds()
        self._deadline = self._clock.monotonic() + options.deadline_seconds
        self._left, self._longest = options.attempts - 1, options.first_pause_seconds
        self._writes, self._in_doubt = writes, False

    def pause_or_raise(self, error: CkptStoreError, *, is_final: bool = False) -> float:
        """Return how many seconds to wait before the next try; or raise what the tries have come to.

        Args:
            error: Of the last try. What did not happen is tried again, and a write also where nobody knows.
            is_final: Another try cannot help, whatever the error is called.

        Raises:
            OutcomeUnknownError: One try may have been carried out, and no later one was.
            StalledError: Nothing came in time, the last time either.
            CkptStoreError: `error` itself.
        """
        unknown = self._writes and isinstance(error, OutcomeUnknownError)
        may_help = (unknown or isinstance(error, UnavailableError)) and not is_final
        pause = self.pause_after(error) if may_help else None
        if pause is None and self._in_doubt and not unknown and not isinstance(error, IntegrityError):
            # What a later try answers proves nothing about the one that may have been carried out; but damage was seen.
            raise OutcomeUnknownError(error.message, hint=error.hint, **error.facts) from error
        if pause is None:
            if (ended := given_up(error)) is error:
                raise error
            raise ended from error
        self._in_doubt = self._in_doubt or unknown
        return pause

    def pause_after(self, error: CkptStoreError) -> float | None:
        """Return how many seconds to wait before the next try, or None if there is to be none.

        A pause is drawn between 0 and a bound that doubles; where the server asked for a longer one, that is kept.
        """
        drawn = max(self._longest * self._ids.fraction(), asked_pause(error, self._options.longest_pause_seconds))
        self._longest = min(2 * self._longest, self._options.longest_pause_seconds)
        self._left -= 1
        return drawn if self._left >= 0 and self._clock.monotonic() + drawn <= self._deadline else None

    def settle(self) -> None:
        """A try was answered: what was in doubt is so no longer."""
        self._in_doubt = False

    def wait(self, seconds: float) -> None:
        """Wait for a pause to end."""
        self._clock.sleep(seconds)


def tried(
    act: Callable[[], Result], patience: Patience, *, hopeless: Callable[[CkptStoreError], bool] = lambda _: False
) -> Result:
    """Return what `act` returns, tried again while that may help.

    Args:
        act: One request.
        patience: How often and how long.
        hopeless: Whether an error stays what it is, however often it is tried.

    Raises:
        CkptStoreError: What the tries have come to. See `Patience.pause_or_raise`.
    """
    while True:
        try:
            result = act()
        except CkptStoreError as error:
            pause = patience.pause_or_raise(error, is_final=hopeless(error))
        else:
            patience.settle()
            return result
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
