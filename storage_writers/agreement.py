"""How all ranks come to one answer.

A collective cannot see a rank that never calls it. So ranks agree through the c10d store, which only needs polling:
every rank leaves its proposal under its own key, rank 0 collects them for a bounded time, judges once and leaves every
rank the same verdict. Rank 0 moves O(ranks) small values. No call blocks inside the store's client, which other threads
may be using.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ckptstore.clock import SystemClock, SystemIds
from ckptstore.errors import (
    CkptStoreError,
    CommitUnknownError,
    DisagreementError,
    FencedError,
    IntegrityError,
)
from storage_writers.ranks import Peers

T = TypeVar("T")
R = TypeVar("R")

LONGEST_WORK_SECONDS = 300.0

_LONGEST_PAUSE_SECONDS = 0.05
_GRAVITY: tuple[type[CkptStoreError], ...] = (FencedError, CommitUnknownError, IntegrityError)
_CLOCK, _IDS = SystemClock(), SystemIds()


def work_seconds(peers: Peers, *, longest: float = LONGEST_WORK_SECONDS) -> float:
    """Return how much longer a rank is waited for that was here a moment ago, and works under limits of its own.

    It may have been killed since: the group would not wait longer than its time-out, so we do not. The launch gives it
    to the group and to its store alike.
    """
    return longest if peers.store is None else min(longest, peers.store.timeout.total_seconds())


def agree(
    peers: Peers,
    mine: Callable[[], T],
    judge: Callable[[Sequence[T]], R],
    *,
    seconds: float,
    root_first: bool = False,
) -> R:
    """Run `mine` on every rank and `judge` on rank 0 over what they returned; return its answer on every rank.

    Args:
        peers: Who takes part.
        mine: This rank's part. What it raises becomes everybody's verdict, with the rank.
        judge: Looks at the proposals, by rank, and answers or raises.
        seconds: How long a rank that does not come is waited for.
        root_first: The others begin `mine` only when rank 0 has ended its own.

    Raises:
        DisagreementError: Ranks are missing; they are named.
        CkptStoreError: What `judge`, or `mine` on some rank, raised: the same on all ranks.
    """
    if peers.store is None:
        return judge([mine()])
    table = _Table(peers, PrefixStore(f"ckptstore/{peers.channel}", peers.store), seconds)
    try:
        verdict, raised = table.collect(mine, judge) if peers.rank == 0 else table.propose(mine, root_first=root_first)
    except dist.DistError as error:
        raise DisagreementError(
            f"Rank {peers.rank} lost the store through which ranks agree: {error}",
            hint="Look for the first rank that died, usually rank 0.",
            rank=peers.rank,
        ) from error
    if verdict.error is not None:
        raise verdict.error from raised
    return cast("R", verdict.answer)


@dataclass(frozen=True)
class _Proposal:
    token: str
    value: object = None
    error: CkptStoreError | None = None


@dataclass(frozen=True)
class _Verdict:
    answer: object = None
    error: CkptStoreError | None = None


_Heard = tuple[_Verdict, Exception | None]
"""The verdict, and the foreign error of this rank that it tells of."""


@dataclass(frozen=True)
class _Table:
    """Where the ranks lay their proposals. A key is deleted only by who reads it, so that no read can block."""

    peers: Peers
    store: Any
    seconds: float

    def collect(self, mine: Callable[[], object], judge: Callable[[Sequence[Any]], object]) -> _Heard:
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
        return verdict, raised

    def propose(self, mine: Callable[[], object], *, root_first: bool) -> _Heard:
        """Any other rank: lay down a proposal and wait for the verdict."""
        if root_first:
            if not self._until(lambda: self._is("root"), self.seconds):
                raise self._missing([0])
            # Rank 0 may give up just now, and take both keys away.
            longest = work_seconds(self.peers)
            if not self._until(lambda: self._is("ready") or not self._is("root"), longest):
                raise self._unanswered(longest)
        proposal, raised = self._attempt(mine)
        key, verdict_key = f"proposal/{self.peers.rank}", f"verdict/{proposal.token}"
        self.store.set(key, pickle.dumps(proposal))
        longest = self.seconds + work_seconds(self.peers)
        came = self._until(lambda: self._is("root") or self._is(verdict_key), self.seconds)
        if not came or not self._until(lambda: self._is(verdict_key), longest):
            self.store.set(key, b"")  # withdrawn: who comes later must not count on it
            raise raised or (self._unanswered(longest) if came else self._missing([0]))
        verdict: _Verdict = pickle.loads(self.store.get(verdict_key))  # noqa: S301  (a peer's, as in DCP's own gather)
        self.store.delete_key(verdict_key)
        return verdict, raised

    def _attempt(self, mine: Callable[[], object]) -> tuple[_Proposal, Exception | None]:
        """Return this rank's proposal, and what it raised: a rank that fails still tells the others."""
        token = _IDS.nonce()
        try:
            return _Proposal(token, mine()), None
        except CkptStoreError as error:
            at_rank(error, self.peers.rank)
            return _Proposal(token, error=error), None
        except Exception as error:  # noqa: BLE001  (the cause of what this rank raises when the others have been told)
            told = CkptStoreError(f"{type(error).__name__}: {error}")
            return _Proposal(token, error=at_rank(told, self.peers.rank)), error

    def _gather(self, proposals: dict[int, _Proposal]) -> list[int]:
        """Add the proposals of the others to `proposals`; return the ranks that did not come."""
        deadline = _CLOCK.monotonic() + self.seconds
        pending = {f"proposal/{rank}": rank for rank in range(1, self.peers.world_size)}
        while pending:
            in_time = self._until(lambda: self.store.check(list(pending)), deadline - _CLOCK.monotonic())
            for key in [key for key in pending if in_time or self._is(key)]:
                message = self.store.get(key)
                self.store.delete_key(key)
                if message:  # else it was withdrawn
                    proposals[pending.pop(key)] = pickle.loads(message)  # noqa: S301  (a peer's, as in DCP's own gather)
            if not in_time:
                break
        return sorted(pending.values())

    def _judge(
        self, proposals: dict[int, _Proposal], missing: list[int], judge: Callable[[Sequence[Any]], object]
    ) -> _Verdict:
        errors = [p.error for _, p in sorted(proposals.items()) if p.error is not None]
        if errors:
            return _Verdict(error=gravest(errors))
        if missing:
            return _Verdict(error=self._missing(missing))
        try:
            return _Verdict(judge([proposals[rank].value for rank in range(self.peers.world_size)]))
        except CkptStoreError as error:
            return _Verdict(error=error)

    def _is(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait until `true()`, and return whether it became so in time."""
        deadline = _CLOCK.monotonic() + seconds
        pause = 0.001
        while not true():
            if _CLOCK.monotonic() >= deadline:
                return False
            _CLOCK.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return True

    def _missing(self, ranks: list[int]) -> DisagreementError:
        shown = ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")  # noqa: PLR2004  (for people)
        return DisagreementError(
            f"Rank {shown} of {self.peers.world_size} did not come within {self.seconds:g} s.",
            hint="Call save or load on every rank of the group, or raise agree_timeout_seconds.",
            missing=ranks,
            world_size=self.peers.world_size,
        )

    def _unanswered(self, seconds: float) -> DisagreementError:
        return DisagreementError(
            f"Rank 0 of {self.peers.world_size} came, and did not answer within {seconds:g} s: it died, or works on.",
            hint="Look at rank 0; if it works on, give the process group a longer time-out.",
            missing=[0],
            world_size=self.peers.world_size,
        )


def in_our_words(error: BaseException, what: str) -> CkptStoreError:
    """Return `error` if it is ours, or one of ours that tells of it: not every foreign one survives the way to others.

    Args:
        error: What was raised.
        what: Is true of it, whatever it is.
    """
    if isinstance(error, CkptStoreError):
        return error
    return CkptStoreError(f"{what}: {type(error).__name__}: {error!s:.500}.", hint="Mend what this says of that rank.")


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
