"""What uploads have in common: their size was announced, they end once, and leaving the block gives them up."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from ckptstore.errors import CkptStoreError, InvalidInputError, UnsupportedError
from ckptstore.objectstore.answers import Request


class Announced(ABC):
    """An upload of so many bytes and no others. See `port.Upload`.

    Used by one thread at a time, in the process that began it; a forked child leaves it alone.

    Args:
        request: What is being asked for, for messages.
        size: How many bytes were announced.
    """

    def __init__(self, request: Request, *, size: int) -> None:
        self._request = request
        self._size, self._written = size, 0
        self._has_ended, self._process = False, os.getpid()

    @abstractmethod
    def abort(self) -> None:
        """Give the upload up, and free what it holds. Never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _admitted(self, data: bytes | bytearray | memoryview) -> memoryview:
        """Return `data` as bytes, if the upload can take them. Whoever takes them counts them in `_written`.

        Raises:
            InvalidInputError: They are more than was announced, or the upload has ended.
            UnsupportedError: This process was forked meanwhile.
        """
        view = memoryview(data).cast("B")
        written = self._written + len(view)
        self._check(written <= self._size, written)
        return view

    def _check_whole(self) -> None:
        """Check that all has been written. Else the upload is given up.

        Raises:
            InvalidInputError: It has not, or the upload has ended.
            UnsupportedError: This process was forked meanwhile.
        """
        try:
            self._check(self._written == self._size, self._written)
        except CkptStoreError:
            self.abort()
            raise

    def _end(self) -> bool:
        """Take nothing more, and return whether there may be something to give up: not twice, nor in a forked child."""
        had_ended, self._has_ended = self._has_ended, True
        return not had_ended and os.getpid() == self._process

    def _check(self, fits: bool, written: int) -> None:  # noqa: FBT001  (private, and it reads well)
        key = self._request.key
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"The upload of {key} was begun before this process was forked.",
                hint="Go on with it where it was begun.",
                key=key,
            )
        if self._has_ended:
            raise InvalidInputError(f"The upload of {key} has ended.", key=key)
        if not fits:
            raise InvalidInputError(
                f"The upload of {key} was announced with {self._size} bytes and has {written}.", key=key
            )
