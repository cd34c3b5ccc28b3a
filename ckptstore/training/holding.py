"""What a job holds until it has committed: pins of what it goes on from, in its own run or in another one.

The holder is `resume`, the job's incarnation and a count, so that no other job, and no later resume, lets go of it.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore import Checkpoint, CheckpointStore
from ckptstore.errors import CkptStoreError, CommitUnknownError, NotFoundError
from ckptstore.protocol.fold import Fold
from ckptstore.training.asked import Asked

HOLDER = "resume"
MAX_HOLDER = 200

_HELD_BY = re.compile(rf"{HOLDER} ([0-9a-f]{{32}}) [0-9]+(?: of (.+))?", re.DOTALL)
_counts = itertools.count(1)


@dataclass(eq=False, slots=True)
class Held:
    """One pin.

    Args:
        asked: How its run is opened.
        seq: What it pins.
        holder: Who holds it.
        is_due: What was trained from it is committed, or something else is trained from.
        is_told: That it could not be let go of was told.
    """

    asked: Asked
    seq: int
    holder: str
    is_due: bool = False
    is_told: bool = False


class Holding:
    """The pins of one job, on rank 0. Thread-safe; it never raises.

    Args:
        asked: How the job's own run is opened.
        told: Told of what failed.
    """

    def __init__(self, asked: Asked, told: Callable[[str], None]) -> None:
        self._asked, self._told = asked, told
        self._held: list[Held] = []
        self._lock = threading.Lock()
        self._is_swept = False

    @property
    def held(self) -> tuple[Held, ...]:
        """What is held now."""
        with self._lock:
            return tuple(self._held)

    def hold(self, asked: Asked, store: CheckpointStore, checkpoint: Checkpoint, *, incarnation: str) -> None:
        """Pin what is about to be loaded, and let go of what was loaded before.

        If killed: it is pinned or not. What a dead job pinned, the next one lets go of.
        """
        own, before = asked.url == self._asked.url, self.held
        try:
            holder = f"{HOLDER} {incarnation} {next(_counts)}"
            pin = Held(asked, checkpoint.seq, holder if own else _abroad(holder, self._asked))
            try:
                store.pin(checkpoint, holder=pin.holder, reason="a job goes on from it")
            except CommitUnknownError:  # it may stand
                self._add(pin)
                raise
        except CkptStoreError as error:
            advice = " Pin it there with credentials that may write, or see to it that nobody retires it."
            if own or isinstance(error, NotFoundError):  # it is retired
                advice = ""
            self._told(f"{checkpoint.exact_name} of {store.url} could not be pinned: {error}{advice}")
            return
        self._add(pin)
        for each in before:
            each.is_due = True
        self.release()

    def release(self) -> None:
        """Let go of what is due, and of nothing else; what fails is tried again at the next commit.

        If killed: of some of it; the next job does the rest.
        """
        for each in self.held:
            if not each.is_due:
                continue
            try:
                _unpin(each.asked.open(), each.seq, each.holder)
            except CkptStoreError as error:
                if not each.is_told:
                    self._told(f"{each.asked.url}: what {each.holder!r} holds could not be let go of: {error}")
                each.is_told = True
            else:
                self._drop(each)

    def sweep(self, fold: Fold, others: Sequence[Held]) -> None:
        """Let go, once, of what dead jobs of this run hold: their incarnations reigned, and newer ones claimed since.

        Args:
            fold: Of the job's own run, after the job's own commit.
            others: What this job held when it committed: dead jobs began from the same runs, if they did from another.

        If killed: see `release`.
        """
        if self._is_swept:
            return
        for asked in {each.url: each for each in (self._asked, *(each.asked for each in others))}.values():
            try:
                self._sweep(asked, fold)
            except CkptStoreError as error:
                self._told(f"{asked.url}: what dead jobs hold could not be let go of: {error}")
                return
        self._is_swept = True

    def _sweep(self, asked: Asked, fold: Fold) -> None:
        store = asked.open()
        own = asked.url == self._asked.url
        for each in store.checkpoints(include_set_aside=True):
            for pin in each.committed.pins:
                found = _HELD_BY.fullmatch(pin.holder)
                if found is None or not fold.fences(fold.reigns.get(found[1], fold.term)):
                    continue
                if found[2] is None if own else pin.holder == _abroad(pin.holder.partition(" of ")[0], self._asked):
                    _unpin(store, each.seq, pin.holder)

    def _add(self, pin: Held) -> None:
        with self._lock:
            self._held.append(pin)

    def _drop(self, pin: Held) -> None:
        with self._lock:
            if pin in self._held:  # two threads may have let go of it
                self._held.remove(pin)


def _abroad(holder: str, own: Asked) -> str:
    return f"{holder} of {own.open().url}"[:MAX_HOLDER]


def _unpin(store: CheckpointStore, seq: int, holder: str) -> None:
    try:
        store.unpin(store.get(seq=seq), holder=holder)
    except NotFoundError:  # it is retired: there is nothing to hold
        return
