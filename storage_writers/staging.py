"""Staging: the state of a background save, copied into host memory that has a budget.

A `StagingPool` is allocated once and used by every save, one at a time. `stage` returns at once; a thread copies. What
does not fit stays the caller's and is streamed: as the upload consumes the pool in file order, pieces of what is left
are read ahead into the room that comes back, and `fence` returns when nothing of the caller's will be read any more.
The upload never waits for room: a piece that nobody has read ahead it reads itself.

The tensors in `Staged.state` are views of the pool: drop the state when the save has ended, the next one writes there.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ckptstore.errors import BusyError
from ckptstore.options import check_counts, check_flags
from storage_writers.capturing import Captured
from storage_writers.pool import ALIGN_BYTES, Arena, aligned, free_bytes
from storage_writers.staged import Staged

__all__ = ["Staged", "StagingPool"]


class StagingPool:
    """Host memory with a budget in bytes, used by every save; one state at a time.

    Args:
        staging_bytes: What it may hold at most; 0 streams everything. None: what the state needs, at most half of the
            free memory, divided by the ranks of this host.
        local_ranks: How many ranks share this host's memory.
        shared: It lies in shared memory from the start. Otherwise torch moves it there when a state is first sent to
            another process, and needs the memory twice for that moment.

    Raises:
        InvalidInputError: An argument is outside of what is allowed.
    """

    def __init__(self, *, staging_bytes: int | None = None, local_ranks: int = 1, shared: bool = False) -> None:
        if staging_bytes != 0 and staging_bytes is not None:
            check_counts(staging_bytes=staging_bytes)
        check_counts(local_ranks=local_ranks)
        check_flags(shared=shared)
        self._staging_bytes, self._local_ranks, self._shared = staging_bytes, local_ranks, shared
        self._arena = Arena(0)
        self._needed = 0
        self._outstanding: Staged | None = None
        self._using = threading.Lock()
        self._process = os.getpid()
        self._is_last = False
        _pools.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        # With a writer that is sent to another process; memory stays behind.
        return _remade, (self._staging_bytes, self._local_ranks, self._shared)

    @property
    def held_bytes(self) -> int:
        """How much memory it holds now."""
        return self._arena.nbytes

    def stage(self, state_dict: dict[str, Any]) -> Staged:
        """Begin to copy a state, and return what is to be saved. No tensor of it may be changed before the fence.

        Raises:
            BusyError: Another state is staged.
            InvalidInputError: A tensor has no memory, because its storage was freed.
            UnavailableError: There is no memory for the pool.
            UnsupportedError: A value that is no tensor cannot be copied; it is named.
        """
        staged: Staged | None = None
        try:
            # Inference mode is left: its tensors cannot be written to.
            with self._using, _collector_paused(), torch.inference_mode(mode=False):
                self._check_idle()
                captured = Captured(state_dict)
                in_file_order = sorted(captured.sources, key=lambda source: -source.width)
                self._grow(sum(aligned(source.nbytes) for source in in_file_order))
                self._outstanding = staged = Staged(captured, in_file_order, self._arena, self._returned)
                staged.begin()
                return staged
        except BaseException:
            if staged is not None:  # nobody else knows of it, and its thread may be in a copy
                staged.end()
            raise

    def _grow(self, need: int) -> None:
        if need <= self._needed:  # what is free differs from save to save: only a larger state asks anew
            return
        budget = self._staging_bytes
        if budget is None:
            budget = (free_bytes() + self._arena.nbytes) // 2 // self._local_ranks
        wanted = min(need, budget // ALIGN_BYTES * ALIGN_BYTES)
        if wanted > self._arena.nbytes:
            self._arena.free()
            self._needed = 0
            self._arena = Arena(wanted, shared=self._shared)
        self._needed = need

    def close(self) -> None:
        """Free the memory. The pool may be used again, and then takes it anew.

        Raises:
            BusyError: A state is staged.
        """
        with self._using:
            self._check_idle()
            self._arena.free()
            self._needed = 0

    def close_soon(self) -> None:
        """Free the memory as soon as no state is staged. The pool is not to be used again."""
        with self._using:
            self._is_last = True
            if self._outstanding is None:
                self._arena.free()

    def _check_idle(self) -> None:
        if (staged := self._outstanding) is not None:
            staged.return_idle()
        if self._outstanding is not None:
            if self._outstanding.has_ended:
                raise BusyError(
                    "A copy for a save that has ended has not come back from its device.",
                    hint="Look at the device that the state is on; once it answers, save again.",
                )
            raise BusyError(
                "The state of another save is staged.", hint="Wait for that save: storage_writers.wait(writer)."
            )

    def _returned(self) -> None:
        self._outstanding = None
        if self._is_last:
            self._arena.free()

    def _at_exit(self) -> None:
        if self._outstanding is not None and self._process == os.getpid():  # a fork has no threads to wait for
            self._outstanding.end()


def _remade(staging_bytes: int | None, local_ranks: int, shared: bool) -> StagingPool:  # noqa: FBT001  (pickle's)
    return StagingPool(staging_bytes=staging_bytes, local_ranks=local_ranks, shared=shared)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from looking, again and again, at what is made: two thirds of the time it takes."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


_pools: weakref.WeakSet[StagingPool] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Let the threads end: one that still copied while the interpreter goes down could crash it."""
    for pool in list(_pools):
        pool._at_exit()  # noqa: SLF001  (its own)
