"""Groups of our own: each made once for its ranks, let go of with torch's, and at rest when the process ends."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from typing import Any, cast

import torch
import torch.distributed as dist

from ckptstore.clock import SystemClock

SETTLE_SECONDS = 1.0
"""How long the process's end waits for gloo's threads at most; without a word from them it goes on."""

_CLOCK = SystemClock()
_Members = tuple[int, ...] | None
_made: dict[tuple[str, _Members], tuple[Any, Any]] = {}
"""By purpose and members (None: all): the default group of that time, and the group. Weakly: `destroy_process_group`
ends them, with their threads, if nobody else holds them. Each costs sockets to every other rank."""
_last: deque[torch.Tensor] = deque(maxlen=4)
"""What was added up last."""
_OWN = 2
"""Who holds a storage that gloo has let go of: the tensor in `_last`, and whoever asks."""


def group_of(purpose: str, members: _Members, *, timeout: Any) -> dist.ProcessGroup:
    """Return a gloo group for one purpose alone. The first use of it is collective.

    Args:
        purpose: Names it.
        members: Global ranks; None: all.
        timeout: Of its collectives; None: torch's own.
    """
    default: dist.ProcessGroup = dist.distributed_c10d._get_default_group()  # noqa: SLF001  (it has no public name)
    known, group = (each() for each in _made.get((purpose, members), (_nobody, _nobody)))
    if group is None or known is not default:
        group = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=members is not None)
        _made[purpose, members] = weakref.ref(default), weakref.ref(group)  # torch holds both
    return cast("dist.ProcessGroup", group)


def forget(purpose: str, members: _Members) -> None:
    """Let the next use make another group: a collective of this one failed."""
    _made.pop((purpose, members), None)


def add_up(numbers: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Add numbers up over the ranks, in place. Collective.

    Raises:
        RuntimeError: A rank is gone, or did not come in time.
    """
    _last.append(numbers)
    dist.all_reduce(numbers.view(-1), group=group)  # of the same storage: whether gloo still holds it shows there


def _nobody() -> None:
    """Stand for a reference to what is gone."""


def _settle() -> None:
    """Wait until gloo's threads have let go of what was added up last.

    They may be late with that, and need the interpreter for it: one that finds it closed ends the process with SIGABRT.
    """
    deadline = _CLOCK.monotonic() + SETTLE_SECONDS
    while any(_is_held(each) for each in _last) and _CLOCK.monotonic() < deadline:
        _CLOCK.sleep(0.001)


def _is_held(numbers: torch.Tensor) -> bool:
    holders: int = torch._C._storage_Use_Count(numbers.untyped_storage()._cdata)  # noqa: SLF001  (torch tells it nowhere else)
    return holders > _OWN


atexit.register(_settle)
