"""What a log says, read the slow way: by the letter of the protocol, as plain JSON, and by no code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

MIN_KEEP = 2
FOLD_EVERY = 64
SEAL_BYTES = 76
"""Of `,"self":"…"}` and the newline."""


@dataclass
class Told:
    """The records so far, and what they say together.

    Args:
        records: By slot.
        hashes: Of their bytes.
        term: The newest; 0 before the first claim.
        tip: The highest committed attempt of it.
        commits: Every commit ever, by seq.
        aside: Kept ones that are not selectable, and why.
        pins: Who holds a kept one.
        verified: Kept ones of which every byte was verified.
        retired: Those that are no longer kept.
        collected: Those whose bytes are said to be gone.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    term: int = 0
    tip: int = 0
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)
    aside: dict[int, str] = field(default_factory=dict)
    pins: dict[int, set[str]] = field(default_factory=dict)
    verified: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)
    collected: set[int] = field(default_factory=set)
    by_prefix: dict[str, int] = field(default_factory=dict)
    _incarnations: set[str] = field(default_factory=set)
    _writers: set[str] = field(default_factory=set)

    @property
    def kept(self) -> set[int]:
        """Committed and not retired."""
        return self.commits.keys() - self.retired

    @property
    def selectable(self) -> set[int]:
        """Kept and not set aside."""
        return self.kept - self.aside.keys()

    @property
    def newest(self) -> int | None:
        """The highest selectable seq."""
        return max(self.selectable, default=None)

    @property
    def newest_verified(self) -> int | None:
        """The highest selectable seq of which every byte was verified."""
        return max(self.selectable & self.verified, default=None)

    def add(self, body: bytes) -> Iterator[str]:
        """Take the next record and yield what is wrong with it: our own code never appends an invalid one."""
        value, seq = json.loads(body), len(self.records)
        yield from self._broken_envelope(value, body)
        self.records.append(value)
        self.hashes.append(blake3(body).hexdigest())
        take: Callable[[int, dict[str, Any]], Iterator[str]] = getattr(self, f"_{value['kind'].lower()}")
        yield from take(seq, value)

    def is_orphan(self, prefix: str) -> bool:
        """Say whether a collector may delete what lies under `prefix` although no RETIRE names it (I7)."""
        _, term, attempt, _ = prefix.rsplit(".", 3)
        own = (int(term[1:]), int(attempt[1:]))
        return prefix not in self.by_prefix and (own[0] < self.term or (own[0] == self.term and own[1] <= self.tip))

    def _broken_envelope(self, value: dict[str, Any], body: bytes) -> Iterator[str]:
        seq, head = len(self.records), body[:-SEAL_BYTES]
        if value["seq"] != seq or (seq and value["prev"] != self.hashes[-1]):
            yield f"I1: slot {seq} does not follow the one before"
        if value["self"] != blake3(head).hexdigest():
            yield f"I13: slot {seq} is not sealed"
        if ("fold" in value) != (seq % FOLD_EVERY == 0):
            yield f"I10: slot {seq} and the hash of the fold below it do not belong together"
        if value["writer"] in self._writers:
            yield f"I16: slot {seq} holds a record that was made for another slot"
        self._writers.add(value["writer"])

    def _claim(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        if value["term"] <= self.term:
            yield f"I3: slot {seq} claims term {value['term']} after {self.term}"
        if value["incarnation"] in self._incarnations:
            yield f"I15: slot {seq} claims again for {value['incarnation']}, which fences itself"
        self._incarnations.add(value["incarnation"])
        self.term, self.tip = value["term"], 0

    def _commit(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        if value["term"] != self.term:
            yield f"I3: slot {seq} commits in term {value['term']} during term {self.term}"
        elif value["attempt"] <= self.tip:
            yield f"I7: slot {seq} commits attempt {value['attempt']} after {self.tip}"
        if value["prefix"] in self.by_prefix:
            yield f"I16: slot {seq} commits {value['prefix']} twice"
        if value["parent"] is not None and not value["parent"] < seq:
            yield f"I1: slot {seq} goes on from {value['parent']}"
        self.tip = max(self.tip, value["attempt"])
        self.commits[seq], self.by_prefix[value["prefix"]] = value, seq

    def _set_aside(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        yield from self._not_kept(seq, value["seqs"], "I11")
        for target in value["seqs"]:
            self.aside[target] = value["reason"] if self.aside.get(target) != "quarantined" else "quarantined"
        if value["reason"] == "abandoned" and (self.newest or 0) > min(value["seqs"]):
            yield f"I11: the roll-back in slot {seq} leaves {self.newest} selectable"

    def _restore(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        yield from self._not_kept(seq, value["seqs"], "I11")
        for target in value["seqs"]:
            self.aside.pop(target, None)

    def _retire(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        targets, left = set(value["seqs"]), self.selectable - set(value["seqs"])
        yield from self._not_kept(seq, value["seqs"], "I14")
        if value["term"] not in (None, self.term):
            yield f"I3: slot {seq} retires in term {value['term']} during term {self.term}"
        if pinned := sorted(target for target in targets if self.pins.get(target)):
            yield f"I14: slot {seq} retires {pinned}, which are pinned"
        if self.newest in targets:
            yield f"I14: slot {seq} retires {self.newest}, the newest"
        if self.newest_verified in targets:
            yield f"I14: slot {seq} retires {self.newest_verified}, the newest that was verified"
        if targets & self.selectable and len(left) < MIN_KEEP:
            yield f"I14: slot {seq} leaves {sorted(left)}"
        self.retired |= targets
        for target in targets:
            self.aside.pop(target, None)
            self.pins.pop(target, None)

    def _collected(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        if strange := sorted(set(value["seqs"]) - (self.retired - self.collected)):
            yield f"I8: slot {seq} says that {strange} are gone, which are not retired"
        self.collected |= set(value["seqs"])

    def _pin(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        yield from self._not_kept(seq, [value["target"]], "I14")
        self.pins.setdefault(value["target"], set()).add(value["holder"])

    def _unpin(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        yield from self._not_kept(seq, [value["target"]], "I14")
        self.pins.get(value["target"], set()).discard(value["holder"])

    def _verified(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        yield from self._not_kept(seq, [value["target"]], "I13")
        if value["level"] == "full":
            self.verified.add(value["target"])

    def _proved(self, seq: int, value: dict[str, Any]) -> Iterator[str]:
        yield from self._not_kept(seq, [value["target"]], "I12")

    def _not_kept(self, seq: int, targets: list[int], invariant: str) -> Iterator[str]:
        if strange := sorted(set(targets) - self.kept):
            kind = self.records[seq]["kind"]
            yield f"{invariant}: the {kind} in slot {seq} is about {strange}, which are not kept"
