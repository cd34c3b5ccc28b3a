"""The one track on which the background saves of a process and a group run, whichever writer they are of.

They use one group, and meet under one name: two at once would run into each other's collectives, in another order on
every rank. Sync saves of several writers wait for it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import _get_default_store

from storage_writers.outstanding import Outstanding
from storage_writers.ranks import Peers


@dataclass
class Track:
    """What the writers that save with the same ranks share.

    Args:
        last: The save that began last, until all ranks know that it has ended.
        used: Whether there ever was one: the same on all ranks.
        generation: How often everything was left behind to a save that was given up.
        given_up: Saves that were, and have not ended.
        calls: How many calls about saves in the background there were here: after an interrupt on one rank, two ranks
            may otherwise meet in different ones. None: what the others say.
    """

    last: Outstanding | None = None
    used: bool = False
    generation: int = 0
    given_up: list[Outstanding] = field(default_factory=list)
    calls: int | None = 0

    def count(self) -> None:
        """Count a call."""
        if self.calls is not None:
            self.calls += 1

    def held(self) -> int:
        """Return how many saves that were given up still hold threads and memory."""
        self.given_up = [save for save in self.given_up if not save.ended]
        return len(self.given_up)


_tracks: dict[str, tuple[object, Track]] = {}


def track_of(peers: Peers, *, alone: Track) -> Track:
    """Return the track of those who save together.

    Args:
        peers: As `ranks.peers_of` returns them.
        alone: Of one rank, whose saves meet nobody.
    """
    if peers.store is None:
        return alone
    group, store = peers.channel.rpartition("/")[0], _get_default_store()
    if group not in _tracks or _tracks[group][0] is not store:  # torch.distributed was set up anew
        _tracks[group] = store, Track()
    return _tracks[group][1]
