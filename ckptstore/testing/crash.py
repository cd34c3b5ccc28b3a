"""A process that dies in a store call, the same in every run."""

from __future__ import annotations

from typing import Any

from ckptstore.objectstore.port import ObjectStore
from ckptstore.testing.tapped import Act, Call, TappedStore


class Killed(BaseException):
    """The process is gone. No handler under test can swallow it."""


class DyingStore(TappedStore):
    """A store whose process dies in the call after the first `after_calls`; from then on nothing acts.

    Args:
        inner: What survives.
        after_calls: How many calls go well.
        last_call_lands: The call in which the process dies is carried out all the same.
    """

    def __init__(self, inner: ObjectStore, *, after_calls: int, last_call_lands: bool) -> None:
        super().__init__(inner, self._live_or_die)
        self._after_calls, self._last_call_lands = after_calls, last_call_lands

    @property
    def survivor(self) -> ObjectStore:
        """What others see after the death."""
        return self.inner

    def _live_or_die(self, call: Call, act: Act) -> Any:
        if call.index < self._after_calls:
            return act()
        if call.index == self._after_calls and self._last_call_lands:
            act()
        raise Killed(f"in call {self._after_calls}")
