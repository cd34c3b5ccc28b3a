"""Host memory of a fixed size, handed out in ranges: where a state is staged."""

from __future__ import annotations

import bisect
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ckptstore.errors import UnavailableError

ALIGN_BYTES = 64
"""Every range begins at a multiple of it: a cache line, and more than any element needs."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (where Linux has it)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole cache lines."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Room:
    """The free ranges of a pool, lowest first; neighbours are one range.

    Args:
        nbytes: What there is of room, all of it free.
    """

    def __init__(self, nbytes: int) -> None:
        self._starts = [0] if nbytes else []
        self._ends = [nbytes] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Take the lowest range that holds `nbytes`; return where it begins, or None if there is none."""
        nbytes = aligned(nbytes)
        if nbytes == 0:
            return 0
        for at, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._starts[at], self._ends[at]
                else:
                    self._starts[at] += nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Give back a range that was taken, or an aligned part of one."""
        end = start + aligned(nbytes)
        if end == start:
            return
        at = bisect.bisect(self._starts, start)
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)


class Arena:
    """One block of host memory, pinned where there is an accelerator that reads it faster so.

    Args:
        nbytes: Its size.
        shared: It lies in shared memory, so that another process gets all tensors in it by one descriptor.

    Raises:
        UnavailableError: There is no such memory.
    """

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        self.nbytes = nbytes
        try:
            self._memory = _shared(nbytes) if shared else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._unpin = weakref.finalize(self, _pinned(self._memory))
        except (RuntimeError, MemoryError) as error:
            raise UnavailableError(
                f"There is no host memory for a staging pool of {nbytes} bytes: {str(error).partition(chr(10))[0]}",
                hint="Set staging_bytes to what this host can spare; what does not fit is streamed.",
                staging_bytes=nbytes,
            ) from error
        self._unpin.atexit = False  # the device's context is gone by then
        self._views: dict[torch.dtype, torch.Tensor] = {torch.uint8: self._memory}

    def view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return the memory from `start` on as a contiguous tensor of the shape and dtype of `like`."""
        dtype, shape = like.dtype, like.shape
        typed = self._views.get(dtype)
        if typed is None:
            whole = self.nbytes // ALIGN_BYTES * ALIGN_BYTES
            typed = self._views[dtype] = self._memory[:whole].view(dtype)
        strides = like.stride() if like.is_contiguous() else _row_major(shape)
        return typed.as_strided(shape, strides, start // dtype.itemsize)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where a tensor begins in this memory; None if it lies elsewhere."""
        begin = self._memory.data_ptr()  # read anew: torch moves a block that is sent to another process
        offset = tensor.data_ptr() - begin
        return offset if tensor.device.type == "cpu" and 0 <= offset < self.nbytes else None

    def free(self) -> None:
        """Let go of the memory; it goes when the last view of it does."""
        self._views.clear()
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0


def _row_major(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return strides[::-1]


def _shared(nbytes: int) -> torch.Tensor:
    free = os.statvfs(_SHARED_MEMORY)  # touching more than there is kills the process
    if nbytes > free.f_bavail * free.f_frsize:
        raise MemoryError(f"{_SHARED_MEMORY} has {free.f_bavail * free.f_frsize} bytes left")
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]  # noqa: SLF001  (as DCP's stager)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _pinned(memory: torch.Tensor) -> Callable[[], object]:
    """Pin memory for CUDA; return what unpins it.

    Registered by hand: torch's own pinned allocator rounds up to a power of two, beyond the budget.
    """
    if not memory.numel() or not torch.cuda.is_available():
        return lambda: None
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, memory.numel(), 1)))  # 1: for all devices
    return lambda: runtime.cudaHostUnregister(address)


def free_bytes(*, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much memory this process may still take, by the host and by the control groups it is in.

    Args:
        proc: Where the kernel tells of this host and process.
        groups: Where control groups are mounted, of version 1 or 2.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([free, *_groups_free(proc, groups)]))


def _groups_free(proc: Path, groups: Path) -> Iterator[int]:
    """Yield what each control group, and each above it, leaves to this process."""
    places = []
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                places.append((groups, path, "memory.max", "memory.current"))
            elif "memory" in kinds.split(","):
                places.append((groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    for root, path, limit, usage in places:
        inner = root / path.lstrip("/")
        for group in {root, inner, *(up for up in inner.parents if up.is_relative_to(root))}:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most = int((group / limit).read_text(encoding="ascii"))
                yield most - int((group / usage).read_text(encoding="ascii")) + _cache_bytes(group)


def _cache_bytes(group: Path) -> int:
    """Return what a group holds of file cache that goes when memory is needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name in {"total_inactive_file", "inactive_file"}:
                return int(value)
    return 0
