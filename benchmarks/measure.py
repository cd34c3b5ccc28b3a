"""What one piece of work costs this process, by the operating system's own account."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptstore.units import KIB

SAMPLE_SECONDS = 0.005
_PEAK, _NOW = "VmHWM", "VmRSS"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work cost.

    Args:
        wall_seconds: From its beginning to its end.
        cpu_seconds: User and system time of this process, its threads, and those of its children that have ended.
        peak_extra_bytes: The most memory that was resident at once, beyond what was when it began.
        blocked_seconds: How long a training loop would have stood still, where that is less than all of it.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_extra_bytes: int
    blocked_seconds: float | None = None

    def cpu_seconds_per_gib(self, nbytes: int) -> float:
        """Return the CPU seconds for a GiB, of work that moved `nbytes`."""
        return self.cpu_seconds / nbytes * KIB**3


def measured(work: Callable[[], object]) -> Cost:
    """Do `work` once and return what it cost.

    What may be shared by several measurements (imports, connections, the state) is made before. For the memory to
    mean something, each measurement has a process of its own: see `benchmarks.child`.

    Raises:
        Exception: What `work` raised.
    """
    settle()
    before = memory_bytes(_NOW)
    with _Peak() as peak:
        cpu, began = cpu_seconds(), time.perf_counter()
        work()
        wall, spent = time.perf_counter() - began, cpu_seconds() - cpu
    return Cost(wall, spent, max(0, peak.bytes - before))


def settle() -> None:
    """Give back what is free, so that it is not counted as there already."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library of another kind
        ctypes.CDLL(None).malloc_trim(0)


def cpu_seconds() -> float:
    """Return the user and system time of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def memory_bytes(field: str = _NOW) -> int:
    """Return one of the sizes in `/proc/self/status`, by default what is resident now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    return 0


class _Peak:
    """The most memory that was resident while a block ran.

    The kernel keeps the peak and forgets it when asked. Where it may not be asked, it is sampled.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak is what is resident now
        except OSError:
            self._thread = threading.Thread(target=self._sample, daemon=True, name="peak")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is None:
            self.bytes = memory_bytes(_PEAK)
        else:
            self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, memory_bytes(_NOW))
            if self._over.wait(SAMPLE_SECONDS):
                return
