"""Ranks: who takes part in a save or load, and how all of them come to one answer.

A collective cannot see a rank that never calls it. So ranks agree through the c10d store, which only needs polling:
every rank leaves its proposal under its own key, rank 0 collects them for a bounded time, judges once and leaves every
rank the same verdict. Rank 0 moves O(ranks) small values. No call blocks inside the store's client, and the client is
our own clone, so that a background save never holds up the trainer's threads.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.errors import (
    CkptStoreError,
    CommitUnknownError,
    DisagreementError,
    FencedError,
    IntegrityError,
    InvalidInputError,
)

T = TypeVar("T")
R = TypeVar("R")

WORK_SECONDS = 300.0
"""How much longer a rank is waited for that was here a moment ago and works under limits of its own."""
_LONGEST_PAUSE_SECONDS = 0.05
_GRAVITY: tuple[type[CkptStoreError], ...] = (FencedError, CommitUnknownError, IntegrityError)


@dataclass(frozen=True)
class Peers:
    """The ranks that save or load together.

    Args:
        rank: Of this process, in the group.
        world_size: Of the group.
        channel: Under which keys they meet; the same text on every rank.
        store: Where they meet; None for one rank.
    """

    rank: int
    world_size: int
    channel: str = ""
    store: dist.Store | None = None


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
    started = int(os.environ.get("WORLD_SIZE") or 1)
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
    # A background save and one of the main thread may run at once: they must not read each other's proposals.
    thread = "main" if threading.current_thread() is threading.main_thread() else "background"
    return meet(rank, world_size, f"{group}/{thread}")


def meet(rank: int, world_size: int, channel: str) -> Peers:
    """Return peers that meet under `channel` in the default group's store."""
    return Peers(rank, world_size, channel, _own_client() if world_size > 1 else None)


def _refuse_lone_rank(world_size: int, started: int) -> None:
    if world_size == 1 < started:
        raise InvalidInputError(
            f"{started} processes run, but this one would save alone: each would commit a checkpoint of one rank.",
            hint="Call torch.distributed.init_process_group() first, or pass allow_one_rank=True if it is meant.",
            started=started,
        )


_clients: dict[str, tuple[dist.Store, dist.Store]] = {}


def _own_client() -> dist.Store:
    """Return this thread's own connection to the default store: a blocking wait of others never stands in our way."""
    default, thread = _get_default_store(), threading.current_thread().name
    known = _clients.get("main" if thread == "MainThread" else "background")
    if known is not None and known[0] is default:
        return known[1]
    client = default.clone()
    _clients["main" if thread == "MainThread" else "background"] = (default, client)
    return client


def agree(
    peers: Peers,
    mine: Callable[[], T],
    judge: Callable[[Sequence[T]], R],
    *,
    seconds: float,
    root_first: bool = False,
    clock: Clock | None = None,
) -> R:
    """Run `mine` on every rank and `judge` on rank 0 over what they returned; return its answer on every rank.

    Args:
        peers: Who takes part.
        mine: This rank's part. What it raises becomes everybody's verdict, with the rank.
        judge: Looks at the proposals, by rank, and answers or raises.
        seconds: How long a rank that does not come is waited for.
        root_first: The others begin `mine` only when rank 0 has ended its own.
        clock: Where time comes from.

    Raises:
        DisagreementError: Ranks are missing; they are named.
        CkptStoreError: What `judge`, or `mine` on some rank, raised: the same on all ranks.
    """
    if peers.store is None:
        return judge([mine()])
    table = _Table(peers, dist.PrefixStore(f"ckptstore/{peers.channel}", peers.store), clock or SystemClock(), seconds)
    try:
        if peers.rank == 0:
            return table.collect(mine, judge)
        return table.propose(mine, root_first=root_first)
    except dist.DistError as error:
        raise DisagreementError(
            f"Rank {peers.rank} lost the store through which ranks agree: {error}",
            hint="Look for the first rank that died, usually rank 0.",
            rank=peers.rank,
        ) from error


@dataclass(frozen=True)
class _Proposal:
    token: str
    value: object = None
    error: CkptStoreError | None = None


@dataclass(frozen=True)
class _Verdict:
    answer: object = None
    error: CkptStoreError | None = None


@dataclass(frozen=True)
class _Table:
    """Where the ranks lay their proposals. A key is deleted only by who reads it, so that no read can block."""

    peers: Peers
    store: dist.Store
    clock: Clock
    seconds: float
    ids: IdSource = SystemIds()

    def collect(self, mine: Callable[[], T], judge: Callable[[Sequence[T]], R]) -> R:
        """Rank 0: gather, judge, tell."""
        self.store.set("root", "here")
        proposals: dict[int, _Proposal] = {}
        try:
            proposals[0], raised = self._attempt(mine)
            self.store.set("ready", "yes")
            missing = self._gather(proposals)
        finally:
            self.store.delete_key("root")
            self.store.delete_key("ready")
        verdict = self._judge(proposals, missing, judge)
        message = pickle.dumps(verdict)
        for rank, proposal in proposals.items():
            if rank:
                self.store.set(f"verdict/{proposal.token}", message)
        if raised is not None:
            raise raised
        return _deliver(verdict)

    def propose(self, mine: Callable[[], T], *, root_first: bool) -> R:
        """Any other rank: lay down a proposal and wait for the verdict."""
        key = f"proposal/{self.peers.rank}"
        raised: Exception | None = None
        proposal = None
        if not root_first:
            proposal, raised = self._attempt(mine)
            self.store.set(key, pickle.dumps(proposal))
        if self._wait(["root"], self.seconds):
            self.store.set(key, b"")  # withdrawn: who comes later must not count on it
            raise raised or self._missing([0])
        if proposal is None:
            if self._wait(["ready"], WORK_SECONDS):
                raise self._missing([0])
            proposal, raised = self._attempt(mine)
            self.store.set(key, pickle.dumps(proposal))
        verdict_key = f"verdict/{proposal.token}"
        late = self._wait([verdict_key], self.seconds + WORK_SECONDS)
        if raised is not None:
            raise raised
        if late:
            self.store.set(key, b"")
            raise self._missing([0])
        verdict: _Verdict = pickle.loads(self.store.get(verdict_key))  # noqa: S301  (a peer's, as in DCP's own gather)
        self.store.delete_key(verdict_key)
        return _deliver(verdict)

    def _attempt(self, mine: Callable[[], object]) -> tuple[_Proposal, Exception | None]:
        """Return this rank's proposal, and what it raised: a rank that fails still tells the others."""
        token = self.ids.nonce()
        try:
            return _Proposal(token, mine()), None
        except CkptStoreError as error:
            at_rank(error, self.peers.rank)
            return _Proposal(token, error=error), None
        except Exception as error:  # noqa: BLE001  (raised again, by this rank, when the others have been told)
            told = CkptStoreError(f"{type(error).__name__}: {error}", hint="See the log of that rank.")
            return _Proposal(token, error=at_rank(told, self.peers.rank)), error

    def _gather(self, proposals: dict[int, _Proposal]) -> list[int]:
        """Add the proposals of the others to `proposals`; return the ranks that did not come."""
        deadline = self.clock.monotonic() + self.seconds
        pending = set(range(1, self.peers.world_size))
        while pending:
            keys = {f"proposal/{rank}": rank for rank in sorted(pending)}
            late = set(self._wait(list(keys), deadline - self.clock.monotonic()))
            for key, rank in keys.items():
                if key in late:
                    continue
                message = self.store.get(key)
                self.store.delete_key(key)
                if message:
                    proposals[rank] = pickle.loads(message)  # noqa: S301  (a peer's, as in DCP's own gather)
                    pending.discard(rank)
            if late:
                break
        return sorted(pending)

    def _judge(
        self, proposals: dict[int, _Proposal], missing: list[int], judge: Callable[[Sequence[T]], R]
    ) -> _Verdict:
        errors = [p.error for _, p in sorted(proposals.items()) if p.error is not None]
        if errors:
            return _Verdict(error=gravest(errors))
        if missing:
            return _Verdict(error=self._missing(missing))
        try:
            return _Verdict(judge([proposals[rank].value for rank in range(self.peers.world_size)]))  # type: ignore[misc]
        except CkptStoreError as error:
            return _Verdict(error=error)

    def _wait(self, keys: list[str], seconds: float) -> list[str]:
        """Wait until every key is there; return those that are not."""
        deadline = self.clock.monotonic() + seconds
        pause = 0.001
        while not self.store.check(keys):
            if self.clock.monotonic() >= deadline:
                return [key for key in keys if not self.store.check([key])]
            self.clock.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return []

    def _missing(self, ranks: list[int]) -> DisagreementError:
        shown = ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")  # noqa: PLR2004  (for people)
        return DisagreementError(
            f"Rank {shown} of {self.peers.world_size} did not come within {self.seconds:g} s.",
            hint="Call save or load on every rank of the group, or raise agree_timeout_seconds.",
            missing=ranks,
            world_size=self.peers.world_size,
        )


def _deliver(verdict: _Verdict) -> R:  # type: ignore[type-var]
    if verdict.error is not None:
        raise verdict.error
    return verdict.answer  # type: ignore[return-value]


def same(what: Sequence[str], proposals: Sequence[Sequence[object]]) -> None:
    """Check that all ranks say the same.

    Raises:
        DisagreementError: They do not; each rank's value of what differs stands in the facts.
    """
    for index, name in enumerate(what):
        values = [proposal[index] for proposal in proposals]
        if any(value != values[0] for value in values):
            ranks_by_value: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                ranks_by_value.setdefault(repr(value), []).append(rank)
            shown = "; ".join(f"{value} on rank {ranks}" for value, ranks in list(ranks_by_value.items())[:8])
            raise DisagreementError(
                f"Ranks differ in {name}: {shown}.",
                hint="Pass the same on every rank.",
                differs=name,
                values={str(rank): value for rank, value in enumerate(values)},
            )


def gravest(errors: Sequence[CkptStoreError]) -> CkptStoreError:
    """Return the error that decides what to do next; among equals the first.

    Fenced before an unknown commit before damage before the rest. A missing rank comes last: it is often only the echo
    of what happened on it.
    """

    def gravity(error: CkptStoreError) -> int:
        for place, kind in enumerate(_GRAVITY):
            if isinstance(error, kind):
                return place
        return len(_GRAVITY) + isinstance(error, DisagreementError)

    return min(errors, key=gravity)


def at_rank(error: CkptStoreError, rank: int) -> CkptStoreError:
    """Write into `error`, once, on which rank it happened, and return it."""
    if "rank" not in error.facts:
        error.facts["rank"] = rank
        error.message = f"Rank {rank}: {error.message}"
    return error


_background_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def background_group() -> dist.ProcessGroup | None:
    """Return this process's gloo group of all ranks for background saves; None for one rank.

    Made at the first call, which is collective: every rank must make it at the same point of the program.
    """
    global _background_group  # noqa: PLW0603  (one group a process: each costs sockets to every other rank)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    default = dist.group.WORLD
    if _background_group is None or _background_group[0] is not default:
        _background_group = (default, dist.new_group(backend="gloo"))
    return _background_group[1]
