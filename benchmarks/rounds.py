"""Rounds in which the peers take turns, and where they save: a server of our own, or a folder in memory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from benchmarks.child import Job, JobFailedError, Outcome, run, warm_up_root
from benchmarks.peers import PEERS, Peer, missing
from benchmarks.results import spread
from benchmarks.workloads import shape_of
from ckptstore.units import GIB, MIB
from localstack.seaweedfs import SeaweedFS

MEMORY = "/dev/shm"  # noqa: S108  (a memory file system is the point)
MOST_STORED_BYTES = 4 * GIB
"""So much is written to one server; a new one is started then, because deleting frees its memory too late."""


class Bucket:
    """SeaweedFS with its data in memory, a new one when much was stored. Used as a context manager."""

    scheme = "s3"

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._server: SeaweedFS | None = None
        self._stored, self._roots = 0, 0

    @property
    def server(self) -> SeaweedFS:
        """The one that runs."""
        if self._server is None:
            self._server = self._stack.enter_context(SeaweedFS(in_memory=True))
        return self._server

    @property
    def environment(self) -> Mapping[str, str]:
        """How clients find it."""
        return self.server.environment

    def root(self, nbytes: int) -> str:
        """Return a new root, in which so many bytes will be stored."""
        if self._stored and self._stored + nbytes > MOST_STORED_BYTES:
            self._stack.close()
            self._server, self._stored = None, 0
        self._stored += nbytes
        self._roots += 1
        return self.server.url(f"root-{self._roots}")

    def remove(self, root: str) -> None:
        """What is in a bucket goes with the server."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Folder:
    """A folder, by default in memory. Used as a context manager."""

    scheme = "file"
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, parent: str | None = None) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="ckptstore-bench-", dir=parent or MEMORY))
        self._roots = 0

    def root(self, nbytes: int) -> str:
        """Return a new root."""
        del nbytes
        self._roots += 1
        return str(self._path / f"root-{self._roots}")

    def remove(self, root: str) -> None:
        """Delete what was saved at `root`."""
        shutil.rmtree(root, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


Place = Bucket | Folder


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often.

    Args:
        act, kind, size, world_size, options: See `Job`.
        peers: Names.
        rounds: Each is measured so often.
        saved_by: So many ranks save what is loaded; None: as many as load it.
        timeout_seconds: Of one measurement.
    """

    act: str
    kind: str
    size: float
    peers: Sequence[str]
    rounds: int
    world_size: int = 1
    saved_by: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 600.0

    def job(self, peer: str, root: str) -> Job:
        """Return the job of one peer."""
        return Job(self.act, peer, root, self.kind, self.size, self.world_size, self.options)

    def saving_job(self, peer: str, root: str) -> Job:
        """Return the job that saves what the job of this peer loads."""
        return Job("save", peer, root, self.kind, self.size, self.saved_by or self.world_size)


def chosen(asked: Sequence[str] | None, default: Sequence[str], scheme: str) -> list[str]:
    """Return the peers to measure; what is not installed is named and left out.

    Raises:
        SystemExit: One is not known.
    """
    names = list(asked or default)
    if unknown := [name for name in names if name not in PEERS]:
        raise SystemExit(f"Not known: {', '.join(unknown)}. The peers are: {', '.join(PEERS)}.")
    found = []
    for name in names:
        peer: type[Peer] = PEERS[name]
        if scheme not in peer.schemes:
            continue
        if lacks := missing(peer):
            print(f"{name} is left out: {', '.join(lacks)} is not installed (pip install 'ckptstore[bench]').")
        else:
            found.append(name)
    return found


def interleaved(plan: Plan, place: Place, *, loads: bool = False) -> list[dict[str, Any]]:
    """Measure peer after peer, round after round, and return a row for each peer.

    Args:
        plan: What.
        place: Where.
        loads: Each peer saves once, unmeasured, and what it saved is loaded in every round.

    A peer that fails is left out from then on; its row says why.
    """
    outcomes: dict[str, list[Outcome]] = {peer: [] for peer in plan.peers}
    failures: dict[str, str] = {}
    roots: dict[str, str] = {}
    for turn in range(plan.rounds):
        for peer in plan.peers:
            if peer in failures:
                continue
            try:
                outcome = _loaded(plan, place, peer, roots) if loads else _saved(plan, place, peer)
            except JobFailedError as error:
                failures[peer] = str(error)
                print(f"{peer}: {error}", flush=True)
                continue
            outcomes[peer].append(outcome)
            _tell(plan, turn, peer, outcome)
    return [_row(plan, place, peer, outcomes[peer], failures.get(peer)) for peer in plan.peers]


def _saved(plan: Plan, place: Place, peer: str) -> Outcome:
    root = place.root(shape_of(plan.kind, plan.size).nbytes * plan.options.get("checkpoints", 1))
    try:
        return run(plan.job(peer, root), **_how(plan, place))
    finally:
        place.remove(root)


def _loaded(plan: Plan, place: Place, peer: str, roots: dict[str, str]) -> Outcome:
    if peer not in roots:
        roots[peer] = place.root(0)  # they all stay until the end
        run(plan.saving_job(peer, roots[peer]), **_how(plan, place))
    try:
        return run(plan.job(peer, roots[peer]), **_how(plan, place))
    finally:
        place.remove(warm_up_root(roots[peer]))  # not every peer saves where something is


def _row(plan: Plan, place: Place, peer: str, outcomes: Sequence[Outcome], failure: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "act": plan.act,
        "kind": plan.kind,
        "size": plan.size,
        "ranks": plan.world_size,
        "store": place.scheme,
        "peer": peer,
    }
    if outcomes:
        row |= summary(outcomes)
    return row if failure is None else row | {"failed": failure}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the medians of what was measured, and how far apart the rounds are."""
    gib = outcomes[0].nbytes / GIB
    row: dict[str, Any] = {
        "bytes": outcomes[0].nbytes,
        "wall_seconds": spread([each.cost.wall_seconds for each in outcomes]),
        "cpu_seconds_per_gib": spread([each.cost.cpu_seconds / gib for each in outcomes]),
        "peak_extra_mib": spread([each.cost.peak_extra_bytes / MIB for each in outcomes]),
    }
    blocked = [each.cost.blocked_seconds for each in outcomes if each.cost.blocked_seconds is not None]
    if blocked:
        row["blocked_seconds"] = spread(blocked)
    return row | _numbers([each.facts for each in outcomes])


def _numbers(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    flat = {name: [each[name] for each in facts] for name in facts[0]}
    return {name: spread(list(chain(*each)) if isinstance(each[0], list) else each) for name, each in flat.items()}


def _how(plan: Plan, place: Place) -> dict[str, Any]:
    return {"environment": place.environment, "timeout_seconds": plan.timeout_seconds}


def _tell(plan: Plan, turn: int, peer: str, outcome: Outcome) -> None:
    cost = outcome.cost
    blocked = "" if cost.blocked_seconds is None else f"  blocked {cost.blocked_seconds:.3f} s"
    print(
        f"{plan.act} {turn + 1}/{plan.rounds}  {peer:20} {cost.wall_seconds:7.2f} s"
        f"  {cost.cpu_seconds_per_gib(outcome.nbytes):6.2f} CPU s/GiB"
        f"  +{cost.peak_extra_bytes / MIB:6.0f} MiB{blocked}",
        flush=True,
    )
