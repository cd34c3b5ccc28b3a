"""What a writer keeps between DCP's calls: the save of each thread, the one in the background, what the next records.

Beside the writer only this package's own calls (`calls.py`) use it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ckptstore.clock import SystemIds
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.protocol.attempt import Attempt, Description
from ckptstore.protocol.claim import Incarnation
from storage_writers import agreement, ranks, survivors
from storage_writers.planning import name_and_step

TAKEN_SECONDS = 5.0
"""How long a background save may take to begin. After it, it is taken to have failed before that."""

_AGREED = ("the checkpoint's name", "the global step", "the world size", "the run's root", "the run")
_IDS = SystemIds()


@dataclass
class Save:
    """One save on one rank, from the agreement of the ranks on. DCP runs it from begin to end on one thread."""

    save_id: str
    name: str
    description: Description
    peers: ranks.Peers
    set_up: bool = False
    begun: tuple[Incarnation, Attempt] | None = None
    committed: int | None = None
    interrupt: BaseException | None = None
    """What interrupted it after it was committed."""


def agreed(
    peers: ranks.Peers,
    checkpoint_id: str | os.PathLike[str] | None,
    description: Description,
    place: Callable[[], tuple[str, str | None]],
    *,
    seconds: float,
) -> Save:
    """Let all ranks agree on what is saved and where, or raise the same on all.

    Args:
        peers: Who saves.
        checkpoint_id: As DCP gives it.
        description: What this rank says of the save.
        place: Returns the root and the run there, as this rank reads it; rank 0 goes first.
        seconds: How long a rank that does not come is waited for.

    Raises:
        CkptStoreError: They do not agree.
    """
    said: tuple[str, Description] | None = None

    def mine() -> list[object]:
        nonlocal said
        name, step = name_and_step(checkpoint_id, description.global_step)
        said = name, dataclasses.replace(description, global_step=step)
        return [name, step, peers.world_size, *place()]

    def judge(proposals: Sequence[list[object]]) -> str:
        agreement.same(_AGREED, proposals)
        return _IDS.nonce()

    save_id = agreement.agree(peers, mine, judge, seconds=seconds, root_first=True)
    assert said is not None  # noqa: S101  (all ranks agree, so this one has spoken)
    return Save(save_id, *said, peers)


class Descriptions:
    """What was said of the next save, bound to that save on the thread that said it.

    A background save begins on a thread of DCP's, at a moment at which more may have been said: what is meant for it is
    handed over before, by the thread that asks for it.
    """

    def __init__(self, carried: Description | None = None) -> None:
        self._said: tuple[Description, int | None] | None = (carried, None) if carried else None
        self._handed: tuple[Description, int] | None = None
        self._changed = threading.Condition()

    def say(self, description: Description) -> None:
        """Keep what the next save of this thread records."""
        with self._changed:
            self._said = description, threading.get_ident()

    @property
    def said_here(self) -> bool:
        """Whether this thread has described a save that has not begun."""
        return self._said is not None and self._said[1] == threading.get_ident()

    def take(self) -> Description:
        """Return what the save that begins on this thread records, which uses it up.

        Raises:
            InvalidInputError: It was said on another thread, and that may mean another save.
        """
        handed = self.take_handed()
        return handed if handed is not None else self.take_said()

    def take_said(self) -> Description:
        """Return what was said last, which uses it up.

        Raises:
            InvalidInputError: It was said on another thread.
        """
        with self._changed:
            description, thread = self._said or (Description(), None)
            if thread not in {None, threading.get_ident()}:
                raise InvalidInputError(
                    "This save was described on another thread, which may mean another save by now.",
                    hint="Call describe() on the thread that saves; for dcp.async_save pass no async_stager, so that "
                    "it stages through the writer.",
                )
            self._said = None
            return description

    def hand_over(self, description: Description) -> None:
        """Keep `description` for the background save that this thread is about to begin."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed is None, TAKEN_SECONDS)
            self._handed = description, threading.get_ident()

    def take_handed(self) -> Description | None:
        """Return what another thread handed over, which uses it up; None if nothing was."""
        with self._changed:
            if self._handed is None or self._handed[1] == threading.get_ident():
                return None
            description, self._handed = self._handed[0], None
            self._changed.notify_all()
            return description


class SaveSession:
    """The private side of a writer. Picklable: with the description that was handed over, and nothing live.

    Args:
        group: Of the writer.
        one_rank: This process saves alone.
        seconds: How long a rank that does not come is waited for.
        carried: What the next save records.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, one_rank: bool, seconds: float, carried: Description | None = None
    ) -> None:
        self.group, self._one_rank, self.seconds = group, one_rank, seconds
        self.descriptions = Descriptions(carried)
        self.outstanding: Any = None
        """The future of the last `storage_writers.async_save`, until all ranks know how it ended."""
        self._here = threading.local()

    @property
    def save(self) -> Save | None:
        """The save that this thread began last; None after `forget`."""
        save: Save | None = getattr(self._here, "save", None)
        return save

    @save.setter
    def save(self, save: Save | None) -> None:
        self._here.save = save

    def peers(self) -> ranks.Peers:
        """Return who saves together, as it is now."""
        return ranks.peers_of(self.group, one_rank=self._one_rank)

    def forget(self) -> None:
        """Let go of what this thread saved before, so that `lost` speaks of nothing but the save that begins now."""
        self.save = None

    def lost(self) -> CkptStoreError | None:
        """Return what to raise when a collective of this thread's save has failed; None if no save has begun."""
        save = self.save
        if save is None or save.peers.store is None:
            return None
        peers = dataclasses.replace(save.peers, channel=save.save_id)
        return survivors.lost_in_save(peers, save.name, save.committed)

    def __reduce__(self) -> tuple[object, ...]:
        # DCP sends the writer to the process that saves from a thread of its own.
        return _copied, (self._one_rank, self.seconds, self.descriptions.take_handed())


def _copied(one_rank: bool, seconds: float, carried: Description | None) -> SaveSession:  # noqa: FBT001  (pickle's)
    return SaveSession(None, one_rank=one_rank, seconds=seconds, carried=carried)
