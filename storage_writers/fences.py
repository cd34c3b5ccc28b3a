"""What keeps an optimizer from changing a state that is being copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from storage_writers.session import SaveSession


class Optimizer(Protocol):
    """What has torch's hook before a step."""

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` before each step; return what takes it away."""
        ...


class Fence:
    """Lets every step of an optimizer wait until the state of a background save may be changed.

    Args:
        session: Of the writer that saves.
        optimizer: Changes what is saved.
    """

    def __init__(self, session: SaveSession, optimizer: Optimizer) -> None:
        self._session = session
        self._hook: Any = optimizer.register_step_pre_hook(lambda *_: session.fence())
        session.fences += 1

    def remove(self) -> None:
        """Take the fence away; without any, a background save returns only when the state may be changed."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
            self._session.fences -= 1
