"""What one process holds of bytes on their way: one budget for all its uploads and reads, and the memory of parts.

Fresh memory costs more than what is done with it: the system clears each page on its first touch, which takes several
times as long as a copy into a page that is there. So parts are filled in pages of 2 MiB where the system has them, and
their memory is used again, which is safe once nothing refers to it any more. When nobody uploads it is given back.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ckptstore.errors import StalledError, UnavailableError
from ckptstore.objectstore.lent import Lent
from ckptstore.options import TransferOptions
from ckptstore.units import MIB, format_bytes

_HUGE_PAGE_BYTES = 2 * MIB


@dataclass(slots=True, eq=False)
class _Loan:
    """So many bytes, taken by somebody; of an upload, with their memory."""

    nbytes: int
    upload: Parts | None = None
    memory: mmap.mmap | None = None
    watch: weakref.ref[Any] | None = None
    key: int = field(default_factory=itertools.count().__next__)


class Budget:
    """Bytes that are taken and given back; who takes waits until they fit, in the order of asking. Thread-safe.

    One thing that is larger than the whole budget goes alone. So nobody waits for ever: nobody who holds bytes needs
    more of them to go on.
    """

    def __init__(self) -> None:
        # Re-entrant: memory may be given back by whatever thread drops it last, also while that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._loans: dict[int, _Loan] = {}
        self._queue: deque[_Loan] = deque()
        self._free: list[mmap.mmap] = []
        self._uploads = 0
        self._given_back = 0

    @property
    def held_bytes(self) -> int:
        """How many bytes are taken."""
        with self._changed:
            return sum(loan.nbytes for loan in [*self._loans.values()])

    @property
    def kept_bytes(self) -> int:
        """How many bytes of memory are kept for the next part."""
        with self._changed:
            return sum(map(len, self._free))

    @contextlib.contextmanager
    def taken(self, nbytes: int, *, options: TransferOptions) -> Iterator[None]:
        """Hold `nbytes` in the block.

        Raises:
            StalledError: They did not fit, and nothing was given back for too long.
        """
        loan = _Loan(nbytes)
        try:
            self._admit(loan, options)
            yield
        finally:
            self._end(loan.key)

    @contextlib.contextmanager
    def parts(self, options: TransferOptions) -> Iterator[Parts]:
        """Let one upload take the memory of its parts. What is not given back after the block is no longer counted."""
        parts = Parts(self, options)
        with self._changed:
            self._uploads += 1
        try:
            yield parts
        finally:
            with self._changed:
                self._uploads -= 1
                for key, loan in [*self._loans.items()]:
                    if loan.upload is parts:  # an error's traceback may hold it: never used again
                        loan.memory = None
                        self._end(key)
                if not self._uploads:
                    self._free.clear()

    def _admit(self, loan: _Loan, options: TransferOptions) -> None:
        """Wait until `loan` fits, and count it; one of an upload gets its memory."""
        with self._changed:
            self._queue.append(loan)
            try:
                while not self._fits(loan, options):
                    moved = partial(self._has_moved, self._given_back, loan, options)
                    if not self._changed.wait_for(moved, options.wait_seconds):
                        raise self._stalled(loan, options)
                if loan.upload is not None:
                    loan.memory = self._memory(loan.nbytes, options.transfer_bytes)
                else:
                    self._shrink(options.transfer_bytes - self.held_bytes - loan.nbytes)
                self._loans[loan.key] = loan
            finally:
                self._queue.remove(loan)
                self._changed.notify_all()

    def _fits(self, loan: _Loan, options: TransferOptions) -> bool:
        held = self.held_bytes
        return self._queue[0] is loan and (not held or held + loan.nbytes <= options.transfer_bytes)

    def _has_moved(self, given_back: int, loan: _Loan, options: TransferOptions) -> bool:
        return self._given_back != given_back or self._fits(loan, options)

    def _memory(self, nbytes: int, limit: int) -> mmap.mmap:
        for index, memory in enumerate(self._free):
            if len(memory) == nbytes:
                return self._free.pop(index)
        self._shrink(limit - self.held_bytes - nbytes)
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UnavailableError(
                f"There is no memory for a part of {format_bytes(nbytes)}: {error.strerror}.",
                hint="Set a smaller transfer_bytes or part_bytes, or give the process more memory.",
                wanted=nbytes,
                errno=error.errno,
            ) from error
        if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _shrink(self, limit: int) -> None:
        """Keep at most `limit` bytes for the next parts."""
        while self._free and self.kept_bytes > limit:
            self._free.pop(0)

    def _end(self, key: int, _dead: object = None) -> None:
        """Count a loan no longer. Its memory may be used again, if it is still there: nothing refers to it."""
        with self._changed:
            loan = self._loans.pop(key, None)
            if loan is not None:
                if loan.memory is not None and self._uploads:
                    self._free.append(loan.memory)
                self._given_back += 1
                self._changed.notify_all()

    def _stalled(self, loan: _Loan, options: TransferOptions) -> StalledError:
        return StalledError(
            f"{format_bytes(loan.nbytes)} were to be moved, {format_bytes(self.held_bytes)} are on their way, and none "
            f"of these came to an end in {options.wait_seconds:.0f} s.",
            hint="Look at what the store answers, and save or load again.",
            wanted=loan.nbytes,
            held=self.held_bytes,
            transfer_bytes=options.transfer_bytes,
        )


class Parts:
    """The parts of one upload."""

    def __init__(self, budget: Budget, options: TransferOptions) -> None:
        self._budget, self._options = budget, options

    def take(self, nbytes: int) -> memoryview:
        """Return memory for a part, with anything in it. It is given back by dropping every reference to it.

        Raises:
            StalledError: There was no room, and nothing was given back for too long.
            UnavailableError: The system has no memory.
        """
        loan = _Loan(nbytes, upload=self)
        self._budget._admit(loan, self._options)  # noqa: SLF001  (two halves of one thing)
        assert loan.memory is not None  # noqa: S101  (an upload's has memory)
        lent = np.frombuffer(loan.memory, np.uint8).view(Lent)
        loan.watch = weakref.ref(lent, partial(self._budget._end, loan.key))  # noqa: SLF001
        return memoryview(lent)  # type: ignore[arg-type]


_by_process: dict[int, Budget] = {}


def budget() -> Budget:
    """Return this process's. A forked child begins with its own: what its parent has on its way is none of its."""
    return _by_process.setdefault(os.getpid(), Budget())
