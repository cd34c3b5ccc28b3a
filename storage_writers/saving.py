"""One save, from the moment at which all ranks agree on what it is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptstore.clock import SystemIds
from ckptstore.errors import CkptStoreError, CommitUnknownError
from ckptstore.format.shard import StoredShard
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import Attempt, Description
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from storage_writers import agreement, ranks, survivors
from storage_writers.gates import Gate
from storage_writers.planning import name_and_step
from storage_writers.staging import Staged
from storage_writers.telling import Telling

_AGREED = (
    "the checkpoint's name",
    "the global step",
    "the world size",
    "the run's root",
    "the run",
)
_IDS = SystemIds()


@dataclass
class Save:
    """One save on one rank, from the agreement of the ranks on. DCP runs it from begin to end on one thread."""

    save_id: str
    name: str
    description: Description
    log: RunLog
    peers: ranks.Peers
    gate: Gate
    staged: Staged | None = None
    set_up: bool = False
    begun: tuple[Incarnation, Attempt] | None = None
    committed: int | None = None
    interrupt: BaseException | None = None
    """What interrupted it after it was committed."""
    record: Committed | None = None
    """What was committed."""
    telling: Telling = field(default_factory=Telling)

    @property
    def is_committed(self) -> bool:
        """Whether this rank committed it."""
        return self.committed not in (None, survivors.UNKNOWN)

    def commit(self, shards: Sequence[StoredShard], *, planner: Any, options: TransferOptions) -> None:
        """Commit it; see `CkptStoreWriter.finish` for what is raised, and for what is left behind if killed."""
        assert self.begun is not None  # noqa: S101  (prepare_global_plan ran here)
        self.telling.ended("gather")
        self.committed = survivors.UNKNOWN

        def allowed() -> None:
            self.gate.pass_through()
            self.telling.ended("verify")

        try:
            self.record = commit(
                self.log, *self.begun, shards, planner=planner, software=software(), options=options, allowed=allowed
            )
            self.committed = self.record.seq
            self.telling.ended("commit")
            self.telling.end()
        except CommitUnknownError as error:
            self.telling.end(error)
            raise
        except Exception as error:
            self.committed = None
            self.telling.end(error)
            raise
        except BaseException as interrupt:  # I5: DCP would report a failure, and the commit may stand
            unknown = self.interrupted_by(interrupt)
            self.telling.end(None if self.is_committed else unknown)
            raise unknown from interrupt

    def interrupted_by(self, interrupt: BaseException) -> CommitUnknownError:
        """Return the error of a commit that was interrupted, which says whether it stands."""
        assert self.begun is not None  # noqa: S101  (it was committing)
        seq = self.log.fold.committed_at(str(self.begun[1].stem))  # the append was waited for
        if seq is None:
            return CommitUnknownError(
                f"The save of {self.name} was interrupted during its commit: {interrupt!r}.",
                hint="Delete nothing. Run `ckptstore log URL` to see whether it was committed.",
            )
        self.record, self.committed, self.interrupt = self.log.fold.commits.get(seq), seq, interrupt
        return CommitUnknownError(
            f"The save of {self.name} was committed in slot {seq}, and interrupted after that: {interrupt!r}.",
            hint="Delete nothing: the checkpoint is there. Run `ckptstore ls URL`.",
            seq=seq,
        )

    def lost(self) -> CkptStoreError | None:
        """Return what to raise when one of its collectives has failed; None for one rank."""
        if self.peers.store is None:
            return None
        peers = dataclasses.replace(self.peers, channel=self.save_id)
        return survivors.lost_in_save(peers, self.name, self.committed)


def agreed(
    peers: ranks.Peers,
    checkpoint_id: str | os.PathLike[str] | None,
    description: Description,
    place: Callable[[], tuple[str, RunLog]],
    *,
    gate: Gate,
    seconds: float,
) -> Save:
    """Let all ranks agree on what is saved and where, or raise the same on all.

    Args:
        peers: Who saves.
        checkpoint_id: As DCP gives it.
        description: What this rank says of the save.
        place: Returns the root and the run's log, as this rank reads it; rank 0 goes first.
        gate: Of this save.
        seconds: How long a rank that does not come is waited for.

    Raises:
        CkptStoreError: They do not agree.
    """
    said: tuple[str, Description, RunLog] | None = None

    def mine() -> list[object]:
        nonlocal said
        gate.check()
        name, step = name_and_step(checkpoint_id, description.global_step)
        root, log = place()
        said = name, dataclasses.replace(description, global_step=step), log
        return [name, step, peers.world_size, root, log.run]

    def judge(proposals: Sequence[list[object]]) -> str:
        agreement.same(_AGREED, proposals)
        return _IDS.nonce()

    save_id = agreement.agree(peers, mine, judge, seconds=seconds, root_first=True)
    assert said is not None  # noqa: S101  (all ranks agree, so this one has spoken)
    return Save(save_id, *said, peers, gate)


def software() -> dict[str, str]:
    """Return what a commit says it was written with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a checkout
        found["ckptstore"] = importlib.metadata.version("ckptstore")
    return found
