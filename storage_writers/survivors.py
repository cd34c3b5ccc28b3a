"""What came out of DCP; and after a collective of its own failed: who is left, and what is known of the save.

A failed collective is a bare RuntimeError that names no rank. It reaches every survivor: the neighbours of the dead
rank at once, the others at the group's time-out, or when their neighbours leave. Each leaves word in the c10d store and
looks for a bounded time who else does, so that all raise the same error, with the ranks that are gone.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.checkpoint.api import CheckpointException

from ckptstore.clock import SystemClock
from ckptstore.errors import CkptStoreError, CommitUnknownError, DisagreementError
from storage_writers.agreement import at_rank, gravest
from storage_writers.ranks import Peers

LOOK_SECONDS = 5.0
"""How long survivors look for each other. Who is kept in the collective until the group's time-out may come later."""

UNKNOWN = -1
"""What the coordinator says of a commit whose outcome it does not know; else the slot, or None if there is none."""

_CLOCK = SystemClock()


def is_loss(error: BaseException) -> bool:
    """Say whether one of torch's collectives raised `error`.

    It is a RuntimeError like any other, of a model's `load_state_dict` say: where it comes from tells them apart.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = frames[-1].f_globals.get("__name__") if frames else None
    return isinstance(error, RuntimeError) and raised_in == dist.distributed_c10d.__name__


def cause(error: BaseException) -> CkptStoreError | None:
    """Return our error in what DCP raised: the gravest, of the lowest rank; None if there is none of ours.

    Fenced goes before an unknown commit, before damage, before the rest; a rank that did not come is last, because it
    is often only the echo of what happened there. Its rank stands in the facts.
    """
    if isinstance(error, CkptStoreError):
        return error
    if not isinstance(error, CheckpointException):
        return None
    failures = sorted(error.failures.items())
    ours = [at_rank(each, rank) for rank, (each, _) in failures if isinstance(each, CkptStoreError)]
    return gravest(ours) if ours else None


def interrupt_of(error: BaseException, rank: int) -> BaseException | None:
    """Return the interrupt of this rank (a KeyboardInterrupt, say) in what DCP raised; None if there is none."""
    failure = error.failures.get(rank) if isinstance(error, CheckpointException) else None
    return None if failure is None or isinstance(failure[0], Exception | CheckpointException) else failure[0]


def lost_in_save(peers: Peers, name: str, committed: int | None) -> CkptStoreError:
    """Return the error of a save that lost ranks; the same on all survivors.

    Args:
        peers: Who saved; their channel is this save's alone.
        name: The checkpoint's.
        committed: What this rank knows of the commit. Only the coordinator's word counts (I5).
    """
    words = _roll_call(peers, committed)
    missing, who = _missing(peers, words)
    facts: dict[str, Any] = {"missing": missing, "world_size": peers.world_size}
    told = words.get(0, UNKNOWN)
    if told == UNKNOWN:
        return CommitUnknownError(
            f"{who} during the save of {name}, and whether that was committed is not known.", **facts
        )
    outcome = "Nothing was committed." if told is None else f"It was committed before, in slot {told}."
    return DisagreementError(
        f"{who} during the save of {name}. {outcome}",
        hint="Look for why that rank ended; a restarted job loads what `ckptstore latest URL` prints.",
        committed=told,
        **facts,
    )


def lost_in_load(peers: Peers) -> CkptStoreError:
    """Return the error of a load that lost ranks; the same on all survivors."""
    missing, who = _missing(peers, _roll_call(peers, None))
    return DisagreementError(
        f"{who} during a load. Targets may hold a mixture.",
        hint="Look for why that rank ended, and load again into fresh targets.",
        missing=missing,
        world_size=peers.world_size,
    )


def _roll_call(peers: Peers, word: int | None) -> Mapping[int, int | None]:
    """Leave `word`; return those of all who left one within the time, by rank."""
    keys = {str(rank): rank for rank in range(peers.world_size)}
    deadline = _CLOCK.monotonic() + LOOK_SECONDS
    try:
        store = PrefixStore(f"ckptstore/lost/{peers.channel}", peers.store)
        store.set(str(peers.rank), json.dumps(word))
        while not store.check(list(keys)) and _CLOCK.monotonic() < deadline:
            _CLOCK.sleep(0.05)
        return {rank: json.loads(store.get(key)) for key, rank in keys.items() if store.check([key])}
    except dist.DistError:  # the store went with the rank that held it, usually rank 0
        return {peers.rank: word}


def _missing(peers: Peers, words: Mapping[int, int | None]) -> tuple[list[int], str]:
    """Return the ranks that left no word, and a clause that says so."""
    missing = [rank for rank in range(peers.world_size) if rank not in words]
    if not missing:
        return [], f"The {peers.world_size} ranks lost the connection between them"
    shown = ", ".join(map(str, missing[:20])) + (", …" if len(missing) > 20 else "")  # noqa: PLR2004  (for people)
    return missing, f"Rank {shown} of {peers.world_size} was lost, or did not answer for {LOOK_SECONDS:g} s,"
