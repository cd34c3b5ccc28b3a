"""Who takes part: the ranks of a group as this process sees them, and where they can meet."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ckptstore.errors import InvalidInputError
from storage_writers import environment


@dataclass(frozen=True)
class Peers:
    """The ranks that save or load together.

    Args:
        rank: Of this process, in the group.
        world_size: Of the group.
        channel: Under which keys they meet; the same text on every rank.
        store: The c10d store where they meet; None for one rank.
    """

    rank: int
    world_size: int
    channel: str = ""
    store: Any = None


def peers_of(process_group: dist.ProcessGroup | None, *, one_rank: bool) -> Peers:
    """Return the ranks of `process_group` (None: all), as this process sees them.

    Args:
        process_group: The group that is passed to DCP too.
        one_rank: This process saves alone, whatever is around it.

    Raises:
        InvalidInputError: Several processes run, but this one would save alone; or it is not in the group.
    """
    if one_rank:
        return Peers(0, 1)
    started = environment.started()
    if not (dist.is_available() and dist.is_initialized()):
        _refuse_lone_rank(1, started)
        return Peers(0, 1)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise InvalidInputError(
            f"Global rank {dist.get_rank()} is not in the process group of this writer.",
            hint="Call save only on the ranks of the group.",
        )
    _refuse_lone_rank(world_size, max(started, dist.get_world_size()))
    if world_size == 1:
        return Peers(0, 1)
    members = dist.get_process_group_ranks(process_group) if process_group else range(world_size)
    group = blake2b(repr(list(members)).encode(), digest_size=8).hexdigest()
    return meet(rank, world_size, f"{group}/{_lane()}")


def meet(rank: int, world_size: int, channel: str) -> Peers:
    """Return peers that meet under `channel` in the default group's store."""
    return Peers(rank, world_size, channel, _client() if world_size > 1 else None)


def _refuse_lone_rank(world_size: int, started: int) -> None:
    if world_size == 1 < started:
        raise InvalidInputError(
            f"{started} processes run, but this one would save alone: each would commit a checkpoint of one rank.",
            hint="Call torch.distributed.init_process_group() first, or pass allow_one_rank=True if it is meant.",
            started=started,
        )


def _lane() -> str:
    """Return `main` or `background`: a save of each may be under way at once, and they must not meet each other."""
    return "main" if threading.current_thread() is threading.main_thread() else "background"


_background_client: tuple[Any, Any] = (None, None)


def _client() -> Any:
    """Return this thread's connection to the default group's store.

    A background save has its own. The main thread may block in the shared one (making a group, say) until another rank
    comes, which may be waiting for this very save.
    """
    global _background_client  # noqa: PLW0603  (one a process, as there is one default store)
    default: Any = _get_default_store()
    if _lane() == "main":
        return default
    if _background_client[0] is not default:
        _background_client = (default, default.clone())
    return _background_client[1]


_background_group: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None
"""With the default group of that time. Torch holds both: what it lets go of ends, with its threads."""


def background_group() -> dist.ProcessGroup | None:
    """Return this process's gloo group of all ranks for background saves; None for one rank.

    Made at the first call, which is collective: every rank must make it at the same point of the program.
    """
    global _background_group  # noqa: PLW0603  (one group a process: each costs sockets to every other rank)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    default = dist.distributed_c10d._get_default_group()  # noqa: SLF001  (it has no public name that is typed)
    known, group = (None, None) if _background_group is None else (each() for each in _background_group)
    if group is None or known is not default:
        group = dist.new_group(backend="gloo")
        _background_group = weakref.ref(default), weakref.ref(group)
    return cast("dist.ProcessGroup", group)


def leave_background_group() -> None:
    """Let the next call of `background_group` make another one: somebody may still be in this one."""
    global _background_group  # noqa: PLW0603  (see above)
    _background_group = None
