"""The invariants, checked on the raw objects by other code than that under test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from ckptstore.errors import CkptStoreError, NotFoundError
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_documents
from ckptstore.testing import simulated
from ckptstore.testing.tapped import Act, Call, TappedStore
from ckptstore.units import GIB


@dataclass
class Told:
    """What a log says, read the slow way: all slots, by the letter of the protocol, as plain JSON.

    Args:
        records: By slot.
        hashes: Of their bytes.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    term: int = 0
    tip: int = 0
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)

    @property
    def newest(self) -> int | None:
        """The highest selectable seq."""
        return max(self.commits.keys() - self.aside, default=None)

    def add(self, body: bytes) -> Iterator[str]:
        """Take the next record and yield what is wrong with it."""
        value, seq = json.loads(body), len(self.records)
        self.records.append(value)
        self.hashes.append(blake3(body).hexdigest())
        if value["seq"] != seq or (seq and value["prev"] != self.hashes[seq - 1]):
            yield f"I1: slot {seq} does not follow the one before"
        if value["kind"] == "CLAIM":
            if value["term"] <= self.term:
                yield f"I3: slot {seq} claims term {value['term']} after {self.term}"
            self.term, self.tip = value["term"], 0
        elif value["kind"] == "COMMIT":
            if value["term"] != self.term:
                yield f"I3: slot {seq} commits in term {value['term']} during term {self.term}"
            elif value["attempt"] <= self.tip:
                yield f"I7: slot {seq} commits attempt {value['attempt']} after {self.tip}"
            if value["prefix"] in [commit["prefix"] for commit in self.commits.values()]:
                yield f"I16: slot {seq} commits {value['prefix']} twice"
            self.tip = max(self.tip, value["attempt"])
            self.commits[seq] = value
        elif value["kind"] == "SET_ASIDE":
            self.aside |= set(value["seqs"])
            if value["reason"] == "abandoned" and (self.newest or 0) > min(value["seqs"]):
                yield f"I11: the roll-back in slot {seq} leaves {self.newest} selectable"

    def is_orphan(self, prefix: str) -> bool:
        """Say whether a collector may delete what lies under `prefix`."""
        _, term, attempt, _ = prefix.rsplit(".", 3)
        own = (int(term[1:]), int(attempt[1:]))
        committed = prefix in [commit["prefix"] for commit in self.commits.values()]
        return not committed and (own[0] < self.term or (own[0] == self.term and own[1] <= self.tip))


class Watch:
    """Looks at a store again and again, and remembers what it saw and what processes were told.

    Args:
        store: The store itself, past all faults.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._frozen: dict[str, bytes] = {}
        self._doomed: set[str] = set()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._read_without_hints: list[str] | None = None

    def told_done(self, prefix: str) -> None:
        """Remember that a process was told that `prefix` is committed."""
        self._done.add(prefix)

    def told_failed(self, prefix: str) -> None:
        """Remember that a process was told that `prefix` is not committed."""
        self._failed.add(prefix)

    def look(self) -> list[str]:
        """Return what is broken now, each line beginning with the invariant's number."""
        objects = {info.key: self.store.get(info.key, max_bytes=GIB) for info in self.store.list("")}
        found = list(self._changed(objects))
        told = Told()
        slots = sorted(key for key in objects if key.startswith("log/"))
        if slots != [f"log/{seq:012d}.json" for seq in range(len(slots))]:
            return [*found, f"I2: the slots are {slots}"]
        for key in slots:
            found += told.add(objects[key])
        found += [*self._answers(told, objects), *self._reader(told, self.store, "I11", "with hints")]
        if told.hashes != self._read_without_hints:
            self._read_without_hints = told.hashes
            found += self._reader(told, without_hints(self.store), "I10", "without hints")
        return found

    def _changed(self, objects: dict[str, bytes]) -> Iterator[str]:
        for key, body in self._frozen.items():
            if (
                key.startswith(("log/", "run.json")) and objects.get(key) != body
            ):  # a loss of data shows in what reads it
                yield f"I1: {key} {'changed' if key in objects else 'disappeared'}"
            if key.startswith("data/") and objects.get(key, body) != body:
                yield f"I6: {key} changed"
        self._frozen |= {key: body for key, body in objects.items() if not key.endswith("/COMMITTED")}

    def _answers(self, told: Told, objects: dict[str, bytes]) -> Iterator[str]:
        committed = {commit["prefix"] for commit in told.commits.values()}
        yield from (f"I5: {prefix} was reported done and is not committed" for prefix in self._done - committed)
        yield from (f"I5: {prefix} was reported failed and is committed" for prefix in self._failed & committed)
        yield from (
            f"I7: {prefix} could be collected as an orphan and is committed" for prefix in self._doomed & committed
        )
        prefixes = {key.split("/")[2] for key in objects if key.startswith("data/")}
        self._doomed |= {prefix for prefix in prefixes if told.is_orphan(prefix)}

    def _reader(self, told: Told, store: ObjectStore, number: str, how: str) -> Iterator[str]:
        try:
            catalog = Catalog(RunLog.open(store, clock=simulated.ManualClock()))
            latest = catalog.latest()
            found = None if latest is None else (latest.seq, latest.blake3)
            right = None if told.newest is None else (told.newest, told.hashes[told.newest])
            if found != right:
                yield f"{number}: a reader {how} is given {found}, right is {right}"
            if latest is not None:
                seed, ranks = int(latest.commit.metrics["seed"]), range(latest.commit.saved_world_size)
                whole = np.concatenate([simulated.values(rank, seed) for rank in ranks])
                if not np.array_equal(simulated.load(catalog, latest), whole):
                    yield f"I4: {latest.commit.prefix} holds other values"
                if latest.commit.documents and load_documents(store, latest) != {"seed": seed}:
                    yield f"I4: {latest.commit.prefix} holds other documents"
        except CkptStoreError as error:
            yield f"{number}: a reader {how} fails: {error!r}"


def without_hints(store: ObjectStore) -> TappedStore:
    """Return a view of `store` in which `latest.json` and `state/` are absent."""

    def hide(call: Call, act: Act) -> Any:
        if call.operation == "get" and call.key.startswith(("latest.json", "state/")):
            raise NotFoundError(f"{call.key} is hidden.", key=call.key)
        return act()

    return TappedStore(store, hide)
