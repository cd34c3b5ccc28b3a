"""Where the ranks of a training meet: to take one decision, and to add up small numbers."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ckptstore.errors import DisagreementError, InvalidInputError
from ckptstore.format.canonical import canonical_json
from ckptstore.format.checksum import hexdigest
from ckptstore.training import groups
from storage_writers import agreement, ranks
from storage_writers.ranks import Peers

T = TypeVar("T")
R = TypeVar("R")

LONGEST_WORK_SECONDS = 3600.0
"""What a rank may do while the others wait: verify every byte of a checkpoint, say."""
LITTLE_WORK_SECONDS = 5.0
"""The same, where a question asks for what a rank knows already."""
MAX_SUMMED = 32
"""Slots of the message of `sums`: one for each float, two for each integer. It has always this length: the transport
would end the process if ranks sent messages of different lengths."""

ANY_CALL = "due, save, wait, close or resume"
"""Of a run: what tells ranks of signals."""

_SMALL = 2**16
"""What names a call is below this, so that sums of its squares are exact for two million ranks."""


class Meeting:
    """The ranks that save and resume together.

    Args:
        process_group: Theirs; None: all ranks.
        one_rank: This process is alone, whatever is around it.
        seconds: How long a rank that does not come is waited for.

    Raises:
        InvalidInputError: Several processes run, but this one would be alone.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, one_rank: bool = False, seconds: float = 60.0
    ) -> None:
        self.peers: Peers = ranks.peers_of(process_group, one_rank=one_rank)
        self.seconds = seconds
        self.given = process_group
        """As it was passed."""

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.peers.rank

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only one."""
        return self.peers.world_size == 1

    @property
    def world_size(self) -> int:
        """How many meet."""
        return self.peers.world_size

    def decide(
        self,
        what: str,
        mine: Callable[[], T],
        judge: Callable[[Sequence[T]], R],
        *,
        longest: float = LITTLE_WORK_SECONDS,
        seconds: float | None = None,
    ) -> R:
        """Let every rank do its part and rank 0 judge; return the answer, or raise the same error, on all.

        Args:
            what: Names the question.
            mine: This rank's part.
            judge: Looks at all parts, by rank.
            longest: How long these may take. If that is long, the ranks meet before: who is missing is named soon.
            seconds: How long a rank that does not come is waited for; by default as long as by all questions.

        Raises:
            DisagreementError: A rank did not come.
            CkptStoreError: What `judge`, or `mine` on some rank, raised.
        """
        patience = self.seconds if seconds is None else seconds
        if longest > LITTLE_WORK_SECONDS and not self.is_alone:
            self.decide(f"{what}/here", lambda: None, lambda _: None, longest=0.0, seconds=patience)
        peers = dataclasses.replace(self.peers, channel=f"{self.peers.channel}/training/{what}")
        return agreement.agree(
            peers,
            mine,
            judge,
            seconds=patience + agreement.work_seconds(peers, longest=min(longest, LONGEST_WORK_SECONDS)),
        )

    def led(
        self,
        what: str,
        work: Callable[[], R],
        *,
        longest: float = LONGEST_WORK_SECONDS,
        seconds: float | None = None,
    ) -> R:
        """Let rank 0 do `work`, and return what it returned, or raise what it raised, on all ranks: see `decide`."""

        def mine() -> R | None:
            return work() if self.rank == 0 else None

        return cast("R", self.decide(what, mine, lambda parts: parts[0], longest=longest, seconds=seconds))

    def all_do(self, what: str, work: Callable[[], T], *, longest: float = LONGEST_WORK_SECONDS) -> T:
        """Do `work` on every rank; if it fails on one, raise that on all: see `decide`."""
        done: list[T] = []
        self.decide(what, lambda: done.append(work()), lambda _: None, longest=longest)
        return done[0]

    def gathered(self, what: str, mine: Mapping[str, Any], *, digest: str) -> dict[str, Any] | None:
        """Return on rank 0 the union of what the ranks say, and None on the others.

        They say the same, as a rule; then digests are all that travels.

        Args:
            what: Names the question.
            mine: What this rank says, as JSON.
            digest: Of it, from `digest_of`.

        Raises:
            DisagreementError: Two ranks say different things in one place.
        """
        alike = self.decide(f"{what}/digest", lambda: digest, lambda parts: len(set(parts)) == 1)
        if alike:
            return dict(mine) if self.rank == 0 else None
        whole: list[dict[str, Any]] = []
        self.decide(f"{what}/whole", lambda: dict(mine), lambda parts: whole.append(union(what, parts)))
        return whole[0] if whole else None

    def first_holders(self, what: str, mine: Collection[str]) -> dict[str, int]:
        """Return for each name that some rank holds the lowest rank that does.

        They hold the same, as a rule; then digests are all that travels.
        """
        names = sorted(mine)
        digest = digest_of({"names": names})
        alike = self.decide(f"{what}/digest", lambda: digest, lambda parts: len(set(parts)) == 1)
        if alike:
            return dict.fromkeys(names, 0)

        def judge(parts: Sequence[Sequence[str]]) -> dict[str, int]:
            return {name: rank for rank, part in reversed([*enumerate(parts)]) for name in part}

        return self.decide(f"{what}/whole", lambda: names, judge)

    def sums(
        self, floats: Sequence[float], integers: Sequence[int] = (), *, what: str = ANY_CALL, at: int = 0
    ) -> tuple[list[float], list[int]]:
        """Add numbers up over the ranks; the sum of integers is modulo 2^64. Collective, one exchange in all.

        Unlike `decide` it waits as long as the group's own time-out: ranks may be far apart in a step.

        Args:
            floats: As many on every rank.
            integers: The same.
            what: Names the call that needs them, for people.
            at: Which of these calls it is: a step, say.

        Raises:
            InvalidInputError: These are too many numbers.
            DisagreementError: A rank is in another call, on all ranks; it is gone, or did not come within the group's
                time-out.
        """
        if self.world_size == 1:
            return list(floats), list(integers)
        halves = [half for each in integers for half in (each & 0xFFFFFFFF, (each >> 32) & 0xFFFFFFFF)]
        call = f"{what} ({len(floats)} + {len(integers)} numbers, at {at})"
        names = [zlib.crc32(f"{what}/{len(floats)}/{len(integers)}".encode()) % _SMALL, at % _SMALL]
        used = len(floats) + len(halves)
        if used > MAX_SUMMED:
            raise InvalidInputError(f"{used} slots of numbers; {MAX_SUMMED} are sent.", hint="Add them up in parts.")
        slots = [*floats, *halves, *[0.0] * (MAX_SUMMED - used)]
        summed = self._added([*names, *(each * each for each in names), *slots])
        for total, squares in zip(summed[:2], summed[2:4], strict=True):
            if total * total != squares * self.world_size:  # which they are if and only if all are equal
                self.decide("apart", lambda: call, _refuse_apart)
        summed = summed[4:]
        pairs = [int(half) for half in summed[len(floats) : used]]
        whole = [(pairs[2 * at] + (pairs[2 * at + 1] << 32)) % 2**64 for at in range(len(integers))]
        return summed[: len(floats)], whole

    def _added(self, numbers: Sequence[float]) -> list[float]:
        added = torch.tensor(numbers, dtype=torch.float64)  # which holds sums of halves exactly
        try:
            groups.add_up(added, self.group)
        except RuntimeError as error:
            groups.forget("sums", self._members)
            raise DisagreementError(
                f"Rank {self.rank} waited for the others and lost them: {error!s:.500}",
                hint="Look for the first rank that failed; all ranks must make the same calls in the same order.",
                rank=self.rank,
            ) from error
        return cast("list[float]", added.tolist())

    @property
    def _members(self) -> tuple[int, ...] | None:
        return None if self.given is None else tuple(dist.get_process_group_ranks(self.given))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """A gloo group for `sums` alone, the same for all meetings of these ranks; None for one rank.

        The first use makes it, which is collective.
        """
        return None if self.world_size == 1 else self._made("sums", self._members)

    @property
    def alone_in(self) -> dist.ProcessGroup | None:
        """A group of this process alone, for a save in the background while others run; None: none is needed."""
        if self.world_size > 1 or self.given is not None or not (dist.is_available() and dist.is_initialized()):
            return None
        return self._made("alone", (dist.get_rank(),))

    @property
    def saving_group(self) -> dist.ProcessGroup | None:
        """What a writer's background saves may use: a gloo group of the ranks that were given, for nothing else.

        Its thread calls collectives while the training calls its own, and each must meet only its like. None where no
        group was given: a writer makes its own then. The first use is collective.
        """
        return self.given if self.given is None or self.world_size == 1 else self._made("saves", self._members)

    def _made(self, purpose: str, members: tuple[int, ...] | None) -> dist.ProcessGroup:
        launch = None if self.peers.store is None else self.peers.store.timeout  # not torch's own
        return groups.group_of(purpose, members, timeout=launch)


def digest_of(said: Mapping[str, Any]) -> str:
    """Return what tells JSON values apart."""
    return hexdigest(canonical_json(said, what="What a rank says"))


def _refuse_apart(calls: Sequence[str]) -> None:
    shown = "; ".join(f"rank {rank}: {call}" for rank, call in [*enumerate(calls)][:20])
    raise DisagreementError(
        f"Ranks are in different calls: {shown}.",
        hint="Make the same calls in the same order on every rank, at the same steps.",
        calls={str(rank): call for rank, call in enumerate(calls)},
    )


def union(what: str, parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return what ranks say together, by rank; None says nothing.

    Raises:
        DisagreementError: Two ranks say different things in one place.
    """
    whole: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        _merge(whole, part or {}, f"{what} on rank {rank}")
    return whole


def _merge(whole: dict[str, Any], more: Mapping[str, Any], where: str) -> None:
    for key, value in more.items():
        if key not in whole:
            whole[key] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping) and isinstance(whole[key], dict):
            _merge(whole[key], value, f"{where}: {key}")
        elif whole[key] != value:
            raise DisagreementError(
                f"Ranks differ in {where}: {key} is {value!r:.80} there, and {whole[key]!r:.80} on one before.",
                hint="Build the same training state on every rank.",
            )
