"""A store that answers as a network does: too early, twice, late, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import Enum
from typing import Any

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    OutcomeUnknownError,
    UnavailableError,
)
from ckptstore.objectstore.port import ObjectStore
from ckptstore.testing.tapped import Act, Call, TappedStore


class Fault(Enum):
    """What becomes of one call. A call that changes nothing is refused, whichever of the first five it meets."""

    REFUSED = "did not happen, and says so"
    DENIED = "the credentials were refused"
    UNSENT = "never arrives, and nobody knows"
    LOST_REPLY = "arrives, and nobody knows"
    LATE = "arrives when `deliver` is called; nobody knows"
    RETRIED = "arrives; the client asks again below us and meets its own object"
    DUPLICATED = "arrives, and once more when `deliver` is called"


class FaultyStore(TappedStore):
    """Does to each call what `plan` says, or nothing.

    Args:
        inner: The store.
        plan: Returns the fault of a call, or None.
    """

    def __init__(self, inner: ObjectStore, plan: Callable[[Call], Fault | None]) -> None:
        super().__init__(inner, self._meet)
        self._plan = plan
        self.under_way: list[Act] = []
        self._late_uploads: set[str] = set()

    def deliver(self) -> int:
        """Let everything arrive that is still under way, and return how many requests that were."""
        arriving, self.under_way = self.under_way, []
        for act in arriving:
            with contextlib.suppress(CkptStoreError):  # nobody waits for the answer
                act()
        return len(arriving)

    def _meet(self, call: Call, act: Act) -> Any:
        if call.operation == "abort":
            return None if call.key in self._late_uploads else act()
        fault = self._plan(call)
        if fault is Fault.DENIED:
            raise AccessDeniedError(f"{call.operation} of {call.key} was denied.")
        if fault is Fault.REFUSED or (fault in (Fault.UNSENT, Fault.LOST_REPLY, Fault.LATE) and not call.writes):
            raise UnavailableError(f"{call.operation} of {call.key} did not happen.")
        if fault is Fault.LATE:
            self.under_way.append(act)
            self._late_uploads.add(call.key)
            raise _unknown(call)
        if fault is Fault.UNSENT:
            raise _unknown(call)
        result = act()
        if fault is Fault.DUPLICATED and call.writes:
            self.under_way.append(self._again(call, act))
        if fault is Fault.LOST_REPLY:
            raise _unknown(call)
        if fault is Fault.RETRIED and call.creates:
            raise AlreadyExistsError(f"{call.key} exists.", key=call.key)
        return result

    def _again(self, call: Call, act: Act) -> Act:
        """Return what repeats the call; of an upload, the storing of what it stored."""
        if call.operation != "complete":
            return act
        body = self.inner.get(call.key, max_bytes=self.inner.head(call.key).size)
        return lambda: self.inner.put(call.key, body)


def _unknown(call: Call) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"Nobody knows what became of {call.operation} of {call.key}.", key=call.key)
