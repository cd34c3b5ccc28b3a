"""The invariants, checked on the raw objects by other code than that under test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptstore.errors import CkptStoreError, NotFoundError, ResumeError
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_documents
from ckptstore.testing import simulated
from ckptstore.testing.tapped import Act, Call, TappedStore
from ckptstore.testing.told import Told
from ckptstore.units import GIB

Found = tuple[int, str] | None
"""Seq and record hash of the latest checkpoint; None: nothing was ever committed."""
NONE_SELECTABLE = (-1, "")
"""There are commits, and none may be selected: an error, which is not None."""

AFTER_THE_COMMIT = ("/COMMITTED", "/trace.json")
_FILE = r"(?:rank-[0-9]{5,}\.safetensors|part-[0-9]{5,}\.json\.gz|fingerprints\.json\.gz|trace\.json|COMMITTED)"
_OWN = re.compile(rf"data/[0-9a-f]/([^/]+\.t[0-9]{{4,}}\.a[0-9]{{4,}}\.[0-9a-f]{{32}})/{_FILE}")


@dataclass(frozen=True, slots=True)
class Shown:
    """What a collection said that it would do.

    Args:
        retire: The seqs that it would retire.
        delete: The keys that it would delete.
    """

    retire: frozenset[int]
    delete: frozenset[str]


class Watch:
    """Looks at a store again and again, and remembers what it saw and what processes were told.

    Args:
        store: The store itself, past all faults.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.told = store, Told()
        self.looks: Counter[str] = Counter()
        """How often each invariant was looked at."""
        self.damaged: set[str] = set()
        """Keys of objects that were damaged on purpose."""
        self._objects: dict[str, bytes] = {}
        self._first: dict[str, bytes] = {}
        self._newest: list[Found] = [None]
        self._whole: dict[int, dict[str, bytes]] = {}
        self._returned: set[str] = set()
        self._doomed: set[str] = set()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._heard: list[str] = []
        self._later: list[Callable[[], Iterator[str]]] = []

    # What processes were told.

    def told_done(self, prefix: str) -> None:
        """Remember that a process was told that `prefix` is committed."""
        self._done.add(prefix)

    def told_failed(self, prefix: str) -> None:
        """Remember that a process was told that `prefix` is not committed.

        One that was committed and is retired may be called superseded: there is nothing to be had of it either.
        """
        if self.told.by_prefix.get(prefix) not in self.told.retired:
            self._failed.add(prefix)

    @property
    def moment(self) -> int:
        """A number for now, for `told_latest`."""
        return len(self._newest) - 1

    @property
    def has_heard(self) -> bool:
        """Whether a process was told something wrong since the last look."""
        return bool(self._heard or self._later)

    def told_latest(self, found: Committed | None, *, since: int) -> None:
        """Remember that a process which began to ask at `since` was told that `found` is the latest (I11)."""
        self.looks["I11"] += 1
        told = None if found is None else (found.seq, found.blake3)
        if told not in self._newest[since:]:
            self._heard.append(f"I11: a reader was given {told}, right was {list(dict.fromkeys(self._newest[since:]))}")

    def told_none_selectable(self, *, since: int) -> None:
        """Remember that a process which began to ask at `since` was told that none may be selected (I11)."""
        self.looks["I11"] += 1
        if NONE_SELECTABLE not in self._newest[since:]:
            self._heard.append(f"I11: a reader was refused, right was {list(dict.fromkeys(self._newest[since:]))}")

    def told_unreadable(self, committed: Committed, why: str) -> None:
        """Remember that a load of `committed` found damage (I4)."""
        self.looks["I4"] += 1
        if committed.seq in self.told.kept and not self.was_damaged(committed):
            self._heard.append(f"I4: {committed.commit.prefix} is kept and cannot be loaded: {why}")

    def told_loaded(self, ranks: Iterable[tuple[Committed, npt.NDArray[np.generic]]]) -> None:
        """Remember what each rank of one load was given (I12)."""
        self.looks["I12"] += 1
        loaded = list(ranks)
        seqs = {(committed.seq, committed.blake3) for committed, _ in loaded}
        if len(seqs) != 1:
            self._heard.append(f"I12: the ranks of one load were given {sorted(seqs)}")
        for committed, rows in loaded:
            if self.told.hashes[committed.seq] != committed.blake3:
                self._heard.append(f"I12: slot {committed.seq} does not hold {committed.blake3}")
            if not np.array_equal(rows, values_of(committed)):
                number = "I13" if self.was_damaged(committed) else "I4"
                self._heard.append(f"{number}: a load of {committed.commit.prefix} gave other values")

    def told_verdict(self, committed: Committed, *, ok: bool, damaged_before: bool) -> None:
        """Remember a verdict at level `full`, and whether the bytes were damaged before it began (I13)."""
        self.looks["I13"] += 1
        if ok and damaged_before and self.is_damaged(committed):
            self._heard.append(f"I13: {committed.commit.prefix} is damaged and was found whole")
        if not ok and not self.was_damaged(committed) and committed.seq in self.told.kept:
            self._heard.append(f"I4: {committed.commit.prefix} is whole and was found damaged")

    def told_fenced(self, incarnation: str) -> None:
        """Remember that `incarnation` was told that a newer one reigns (I15)."""
        self.looks["I15"] += 1
        claims = [record["incarnation"] for record in self.told.records if record["kind"] == "CLAIM"]
        if not claims or claims[-1] == incarnation:
            self._heard.append(f"I15: {incarnation} was told that it is fenced, and it reigns")

    def told_collected(self, shown: Shown, *, deleted: set[str], writer: str, after: str, ended: bool) -> None:
        """Remember what a collection did (I17).

        Args:
            shown: What it said before.
            deleted: The keys that it sent a deletion of.
            writer: What the identifiers of its process begin with.
            after: The last of them before it began: a request that was sent earlier may land meanwhile.
            ended: It ended well.
        """
        self.looks["I17"] += 1

        def check() -> Iterator[str]:
            records = [record for record in self.told.records if record["kind"] == "RETIRE"]
            own = [each for each in records if each["writer"].startswith(writer) and each["writer"] > after]
            retired = {seq for record in own for seq in record["seqs"]}
            if more := sorted(retired - shown.retire):
                yield f"I17: {more} were retired and not shown"
            if more := sorted(deleted - shown.delete):
                yield f"I17: {more} were deleted and not shown"
            if ended and (left := sorted(shown.retire - self.told.retired)):
                yield f"I17: shown was to retire {left}, and they are kept"

        self._later.append(check)  # its last record may not have been looked at yet

    def told_kept(self, seq: int | None, *, ok: bool) -> None:
        """Remember a verdict on the log or on a kept checkpoint, when all is quiet (I4, I13)."""
        self.looks["I13"] += 1
        if seq is None and not ok:
            self._heard.append("I1: the log does not link")
        if seq is not None and ok == self._is_damaged(self.told.commits[seq]["prefix"]):
            self._heard.append(f"I13: the verdict on {seq} is {ok}")

    def was_damaged(self, committed: Committed) -> bool:
        """Say whether an object of `committed` was ever damaged on purpose."""
        return any(f"/{committed.commit.prefix}/" in key for key in self.damaged)

    def is_damaged(self, committed: Committed) -> bool:
        """Say whether it is so now: a repeated request may have brought the right bytes back."""
        return self._is_damaged(committed.commit.prefix)

    def _is_damaged(self, prefix: str) -> bool:
        own = [key for key in self.damaged if f"/{prefix}/" in key]
        return any(self._objects.get(key) != self._first[key] for key in own)

    def objects_of(self, seq: int) -> list[str]:
        """Return the keys of all that the kept checkpoint `seq` names, sorted."""
        return sorted(self._whole.get(seq, {}))

    # What the store holds.

    def look(self, touched: Iterable[str] | None = None) -> list[str]:
        """Return what is broken now, each line beginning with the invariant's number.

        Args:
            touched: The keys that may have changed since the last look; None: all.
        """
        found, self._heard = self._heard, []
        if touched is None:
            touched = {info.key for info in self.store.list("")} | self._objects.keys()
        bodies = {key: self._body(key) for key in touched}
        changed = [key for key, body in bodies.items() if body != self._objects.get(key)]
        before, slots = self.moment, len(self.told.records)
        # Several changes at once are taken in the order in which they are allowed.
        for key in sorted(changed, key=lambda key: (bodies[key] is None, key.startswith("log/"), key)):
            found += self._change(key, self._objects.get(key), bodies[key])
        for seq in range(slots, len(self.told.records)):
            found += self._left(seq)
        read_again = any(key.startswith(("run.json", "log/", "latest.json", "state/")) for key in changed)
        for invariant in ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I14", "I15", "I16"):
            self.looks[invariant] += 1
        found += self._answers()
        later, self._later = self._later, []
        found += [complaint for check in later for complaint in check()]
        if read_again:
            found += self._reader(self.store, "I11", "with hints")
        if self.moment != before:
            found += self._reader(without_hints(self.store), "I10", "without hints")
        return found

    def _body(self, key: str) -> bytes | None:
        try:
            return self.store.get(key, max_bytes=GIB)
        except NotFoundError:
            return None

    def _change(self, key: str, old: bytes | None, new: bytes | None) -> Iterator[str]:
        if new is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = new
        first = self._first.setdefault(key, new or b"")
        if key.startswith(("log/", "run.json")):
            if old is not None:
                yield f"I1: {key} {'disappeared' if new is None else 'changed'}"
            elif key.startswith("log/") and new is not None:
                yield from self._append(key, new)
        elif key.startswith("data/"):
            prefix = prefix_of(key)
            if new is None:
                yield from self._lost(key, prefix)
            elif new != first and not key.endswith("/COMMITTED") and key not in self.damaged:
                yield f"I6: {key} changed"
            if new is not None and prefix is not None and self.told.by_prefix.get(prefix) in self.told.retired:
                self._returned.add(key)  # a request that was under way brings it back: nobody was told that it is gone

    def _append(self, key: str, body: bytes) -> Iterator[str]:
        seq = len(self.told.records)
        if key != f"log/{seq:012d}.json":
            yield f"I2: {key} appears above slot {seq - 1}"
            return
        yield from self.told.add(body)
        record, newest = self.told.records[-1], self.told.newest
        none = NONE_SELECTABLE if self.told.commits else None
        self._newest.append(none if newest is None else (newest, self.told.hashes[newest]))
        if record["kind"] == "COMMIT":
            yield from self._complete(seq, record)
        for target in record["seqs"] if record["kind"] == "RETIRE" else ():
            self._whole.pop(target, None)

    def _left(self, seq: int) -> Iterator[str]:
        """Check that all is gone of which a record says so (I8)."""
        record = self.told.records[seq]
        for target in record["seqs"] if record["kind"] == "COLLECTED" else ():
            prefix = self.told.commits[target]["prefix"]
            if left := sorted(key for key in self._objects.keys() - self._returned if prefix_of(key) == prefix):
                yield f"I8: slot {seq} says that the bytes of {target} are gone, and {left} are there"

    def _complete(self, seq: int, commit: dict[str, Any]) -> Iterator[str]:
        """Check that all is there that a new commit names (I4)."""
        own = {key: body for key, body in self._objects.items() if prefix_of(key) == commit["prefix"]}
        own = {key: body for key, body in own.items() if not key.endswith(AFTER_THE_COMMIT)}
        shards = [len(body) for key, body in own.items() if key.endswith(".safetensors")]
        if commit["shards"] != {"count": len(shards), "bytes": sum(shards)}:
            yield f"I4: slot {seq} names {commit['shards']}, there are {shards}"
        for ref in [*commit["parts"], *([commit["documents"]] if commit["documents"] else [])]:
            body = own.get(ref["path"], b"")
            if (len(body), blake3(body).hexdigest()) != (ref["size"], ref["blake3"]):
                yield f"I4: slot {seq} names {ref['path']}, which is not there as it was written"
        self._whole[seq] = own

    def _lost(self, key: str, prefix: str | None) -> Iterator[str]:
        """Say what is wrong if an object of `data/` is deleted now."""
        seq = self.told.by_prefix.get(prefix or "")
        if prefix is None:
            yield f"I8: {key} was deleted, which is nobody's"
        elif seq is None and not self.told.is_orphan(prefix):
            yield f"I7: {key} was deleted, and its commit can still land"
        elif seq in self.told.kept and not key.endswith(AFTER_THE_COMMIT):
            yield f"I8: {key} was deleted, and slot {seq} names it"

    def _answers(self) -> Iterator[str]:
        committed = self.told.by_prefix.keys()
        yield from (f"I5: {prefix} was reported done and is not committed" for prefix in sorted(self._done - committed))
        yield from (f"I5: {prefix} was reported failed and is committed" for prefix in sorted(self._failed & committed))
        self._done.clear()
        if doomed := sorted(self._doomed & committed):
            yield f"I7: {doomed} could be collected as orphans and are committed"
        prefixes = {prefix for key in self._objects if (prefix := prefix_of(key)) is not None}
        self._doomed |= {prefix for prefix in prefixes if self.told.is_orphan(prefix)}
        for seq, own in self._whole.items():
            for key, body in own.items():
                if self._objects.get(key) is not body and self._objects.get(key) != body and key not in self.damaged:
                    yield f"I4: slot {seq} names {key}, which is not what was written"

    def _reader(self, store: ObjectStore, number: str, how: str) -> Iterator[str]:
        self.looks[number] += 1
        right = self._newest[-1]
        try:
            catalog = Catalog(RunLog.open(store, clock=simulated.ManualClock()))
            try:
                latest = catalog.latest()
            except ResumeError:
                if right != NONE_SELECTABLE:
                    raise
                return
            found = None if latest is None else (latest.seq, latest.blake3)
            if found != right:
                yield f"{number}: a reader {how} is given {found}, right is {right}"
            if latest is not None and not self.was_damaged(latest):
                if not np.array_equal(simulated.load(catalog, latest), values_of(latest)):
                    yield f"I4: {latest.commit.prefix} holds other values"
                seed = latest.commit.metrics["seed"]
                if latest.commit.documents and load_documents(store, latest) != {"seed": seed}:
                    yield f"I4: {latest.commit.prefix} holds other documents"
        except CkptStoreError as error:
            yield f"{number}: a reader {how} fails: {error!r}"


def prefix_of(key: str) -> str | None:
    """Return the attempt that a key of `data/` belongs to; None if it is foreign."""
    match = _OWN.fullmatch(key)
    return match[1] if match else None


def values_of(committed: Committed) -> npt.NDArray[np.float32]:
    """Return the tensor that a simulated save of `committed` saved."""
    seed, ranks = int(committed.commit.metrics["seed"]), range(committed.commit.saved_world_size)
    return np.concatenate([simulated.values(rank, seed) for rank in ranks])


def without_hints(store: ObjectStore) -> TappedStore:
    """Return a view of `store` in which `latest.json` and `state/` are absent."""

    def hide(call: Call, act: Act) -> Any:
        if call.operation == "get" and call.key.startswith(("latest.json", "state/")):
            raise NotFoundError(f"{call.key} is hidden.", key=call.key)
        return act()

    return TappedStore(store, hide)
