"""Where a drill has its run, and how it is reached, also from the processes of its ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.tapped import Act, Call, TappedStore
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.protocol.log import RunLog
from ckptstore.store import CheckpointStore

if TYPE_CHECKING:
    from ckptstore.drills.ranks import Ranks

IMPATIENT = TransferOptions(retry=RetryOptions(attempts=4, deadline_seconds=15.0, stall_timeout_seconds=10.0))
"""A drill has little time."""
DRILL_SECONDS = 300.0


class NotAsPromised(Exception):  # noqa: N818  (it is what was seen, and no error of the program)
    """Something that must hold does not; the text says what was seen instead."""


class NotApplicable(Exception):  # noqa: N818  (the same)
    """A drill means nothing here, or cannot be tried; the text says why."""


class CannotStart(Exception):  # noqa: N818  (the same)
    """No rank can be started on this machine, so no drill can be tried; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """The root of a run that does not exist yet. It may be pickled; the time limit and the ranks stay behind.

    Args:
        url: The root.
        engine: What moves the bytes.
        storage_options: Of the engine.
        prepare: `module:function`, called with the place in every process of ranks before anything else: how a test
            breaks the product, to see that a drill notices.
        until: When the drill must have ended, by `time.monotonic`.
        started: The ranks that were started here.
        over: Set by `close`: what this place gives away starts nothing any more, and does nothing to the store.
    """

    url: str
    engine: str | None = None
    storage_options: Mapping[str, object] = field(default_factory=dict)
    prepare: str | None = None
    until: float = field(default_factory=lambda: time.monotonic() + DRILL_SECONDS)
    started: list[Ranks] = field(default_factory=list, repr=False, compare=False)
    over: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def access(self) -> dict[str, Any]:
        """What a store, a writer, a reader and a checkpointer take."""
        return {"engine": self.engine, "storage_options": dict(self.storage_options), "transfer": IMPATIENT}

    def store(self) -> ObjectStore:
        """Return the objects of the run, as long as the drill goes on."""
        return TappedStore(open_store(self.url, **self.access), self._while_open)

    def opened(self) -> CheckpointStore:
        """Return the run, opened anew."""
        return CheckpointStore(RunLog.open(self.store()), IMPATIENT, again=self.store)

    def ranks(self, world_size: int, function: str, **arguments: Any) -> Ranks:
        """Start the ranks of a job, each a process that calls `function(voice, place, **arguments)`.

        Args:
            world_size: How many; they make a process group, also one alone.
            function: `module:function`.
            arguments: Plain values.

        Returns:
            The ranks; use them with `with`, at the end of which they are dead.
        """
        from ckptstore.drills.ranks import Ranks  # noqa: PLC0415  (it knows this module)

        return Ranks(self, world_size, function, arguments)

    def left_seconds(self, wanted: float) -> float:
        """Return `wanted`, or what is left for the drill if that is less."""
        return max(0.0, min(wanted, self.until - time.monotonic()))

    def close(self) -> None:
        """Kill whatever ranks are left, and let nothing be started or written any more."""
        self.over.set()
        for ranks in list(self.started):
            ranks.close()

    def check_open(self) -> None:
        """Go on if the drill does.

        Raises:
            NotAsPromised: It is over.
        """
        if self.over.is_set():
            raise NotAsPromised("The drill was over before it had ended.")

    def _while_open(self, call: Call, act: Act) -> Any:
        del call
        self.check_open()
        return act()

    def __reduce__(self) -> tuple[object, ...]:
        return Place, (self.url, self.engine, dict(self.storage_options), self.prepare)


def expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001  (it is what is expected)
    """Go on if something holds.

    Raises:
        NotAsPromised: It does not.
    """
    if not holds:
        raise NotAsPromised(otherwise)
