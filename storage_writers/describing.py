"""What was said of the next save, bound to the thread that said it."""

from __future__ import annotations

import threading

from ckptstore.errors import InvalidInputError
from ckptstore.protocol.attempt import Description


class Descriptions:
    """What the next save records.

    A background save begins on a thread of DCP's, at a moment at which more may have been said: what is meant for it is
    taken when its state is staged, on the thread that asks for it.

    Args:
        carried: Said in the process that this one saves for.
    """

    def __init__(self, carried: Description | None = None) -> None:
        self._said: tuple[Description, int | None] | None = (carried, None) if carried else None
        self._lock = threading.Lock()

    def say(self, description: Description) -> None:
        """Keep what the next save of this thread records."""
        with self._lock:
            self._said = description, threading.get_ident()

    @property
    def said_here(self) -> bool:
        """Whether this thread has described a save that has not begun."""
        said = self._said
        return said is not None and said[1] == threading.get_ident()

    def take(self) -> Description:
        """Return what was said last, which uses it up.

        Raises:
            InvalidInputError: It was said on another thread, and that may mean another save.
        """
        with self._lock:
            description, thread = self._said or (Description(), None)
            if thread not in {None, threading.get_ident()}:
                raise InvalidInputError(
                    "This save was described on another thread, which may mean another save by now.",
                    hint="Call describe() on the thread that saves; for dcp.async_save pass no async_stager, so that "
                    "it stages through the writer.",
                )
            self._said = None
            return description
