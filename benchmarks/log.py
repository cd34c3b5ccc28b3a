"""Open a run with a very long history, find its latest checkpoint, list its newest: requests, bytes, time, memory."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks import results
from benchmarks.measure import measured
from ckptstore.format.codec import PartRef
from ckptstore.format.layout import LATEST_KEY, RUN_KEY, STATE_PREFIX, Stem, slot_key, state_key
from ckptstore.format.records import (
    FOLD_EVERY,
    Claim,
    Collected,
    Commit,
    Envelope,
    Known,
    LatestHint,
    Retire,
    RunFile,
    SetAside,
    ShardTotals,
    encode_latest,
    encode_record,
    encode_run,
)
from ckptstore.format.version import FORMAT
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import ObjectStore
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.fold import Fold, apply_to_own, fold_blake3
from ckptstore.protocol.log import RunLog
from ckptstore.testing.tapped import Act, Call, TappedStore

PAGE_KEYS = 1000
"""What one LIST request of S3 returns."""
STATES_LEFT = 3
"""Snapshots that stay: nobody reads an older one."""
BATCH = 50
NEWEST = 100
_AT = "2026-01-01T00:00:00Z"


class LongLog:
    """Writes a run's log quickly, record by record, with the hints that a writer leaves.

    Args:
        store: Empty.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        run = RunFile(run="0" * 32, created_at=_AT, created_by="a benchmark")
        body = encode_run(run)
        store.put(RUN_KEY, body)
        digest = blake3(body).hexdigest()
        self.fold = Fold(run=run.run, run_blake3=digest, last=digest)

    def put(self, record: Known) -> None:
        """Append a record."""
        below, seq = self.fold, self.fold.end
        fold = None
        if seq % FOLD_EVERY == 0:
            fold = fold_blake3(below)
            if seq:
                self.store.put(state_key(seq), below.encode())
                self.store.delete(state_key(seq - STATES_LEFT * FOLD_EVERY))
        envelope = Envelope(FORMAT, below.run, seq, f"{seq:032x}", _AT, below.last, fold)
        body = encode_record(record, envelope)
        self.store.put(slot_key(seq), body)
        self.fold = apply_to_own(below, envelope, record, blake3(body).hexdigest())

    def hint(self) -> None:
        """Write `latest.json`."""
        newest = self.fold.kept[-1]
        hint = LatestHint(newest.seq, newest.blake3, newest.commit.checkpoint_id, newest.commit.global_step, _AT)
        self.store.put(LATEST_KEY, encode_latest(hint))


def write_history(store: ObjectStore, *, commits: int, live: int, others: str) -> Fold:
    """Write a run of so many commits, of which the newest `live` may be loaded; return its fold.

    Args:
        store: Empty.
        commits: How many there ever were.
        live: How many are left.
        others: What became of the others: `collected` (retired, their bytes gone), `retired` or `set aside`.
    """
    log = LongLog(store)
    log.put(Claim(1, "1" * 32, "job", "host"))
    held: list[int] = []
    for number in range(1, commits + 1):
        held.append(log.fold.end)
        log.put(_commit(number))
        if len(held) == live + BATCH or (number == commits and len(held) > live):
            gone, held = tuple(held[:-live]), held[-live:]
            log.put(SetAside(gone, "abandoned") if others == "set aside" else Retire(gone, "old"))
            if others == "collected":
                log.put(Collected(gone))
    log.hint()
    return log.fold


def _commit(number: int) -> Commit:
    name = f"step-{number}"
    stem = Stem(name, 1, number, f"{number:032x}")
    return Commit(
        checkpoint_id=name,
        global_step=number,
        term=1,
        attempt=number,
        parent=None,
        prefix=str(stem),
        saved_world_size=8,
        parallelism={"dp": 8},
        training_state={"epoch": 0, "consumed_samples": number * 4096},
        fingerprints={},
        metrics={"loss": 1.5},
        tags=(),
        shards=ShardTotals(8, 1 << 30),
        parts=(PartRef(stem.part_key(0), 10_000, "0" * 64, 100_000, (0, 7)),),
        documents=None,
        software={"torch": "2.13.0"},
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of a store.

    Args:
        requests: By kind; a listing counts once for each page of a thousand keys.
        bytes: Of the bodies that came, a listed key counted as its own length.
    """

    requests: Mapping[str, int]
    bytes: int

    @property
    def total(self) -> int:
        """How many requests."""
        return sum(self.requests.values())


def asked(store: ObjectStore, work: Callable[[ObjectStore], object]) -> Asked:
    """Return what `work` asks of `store`, counted at the port."""
    counts: Counter[str] = Counter()
    size = 0

    def tap(call: Call, act: Act) -> Any:
        nonlocal size
        counts[call.operation] += 1
        answer = act()
        if call.operation == "list":
            infos = list(answer)
            counts["list"] += max(0, (len(infos) - 1) // PAGE_KEYS)
            size += sum(len(info.key) for info in infos)
            return iter(infos)
        size += len(answer) if isinstance(answer, bytes | memoryview) else 0
        return answer

    work(TappedStore(store, tap))
    return Asked(dict(counts), size)


def open_and_list(store: ObjectStore) -> tuple[int | None, list[int]]:
    """Open a run, find its latest, list its newest hundred; return their positions."""
    catalog = Catalog(RunLog.open(store))
    latest = catalog.latest()
    return None if latest is None else latest.seq, [each.seq for each in catalog.checkpoints()[-NEWEST:]]


def damage(store: ObjectStore, hints: str) -> None:
    """Take hints away, or spoil them: `all there`, `no latest.json`, `damaged latest.json`, `no state/`."""
    if hints == "no latest.json":
        store.delete(LATEST_KEY)
    elif hints == "damaged latest.json":
        store.put(LATEST_KEY, b"{}")
    elif hints == "no state/":
        for info in list(store.list(STATE_PREFIX)):
            store.delete(info.key)


HINTS = ("all there", "no latest.json", "damaged latest.json", "no state/")


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks log", description=__doc__)
    parser.add_argument("--commits", type=int, default=100_000, help="so many, ever. [100000]")
    parser.add_argument("--live", type=int, default=100, help="so many may be loaded. [100]")
    parser.add_argument("--others", default="collected", choices=("collected", "retired", "set aside"))
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    given = parser.parse_args(argv)
    store = MemoryStore("memory://log")
    fold = write_history(store, commits=given.commits, live=given.live, others=given.others)
    rows = []
    for hints in HINTS:
        damage(store, hints)
        found: list[tuple[int | None, list[int]]] = []
        cost = measured(lambda: found.append(open_and_list(store)))  # noqa: B023  (called at once)
        requests = asked(store, open_and_list)
        right = found == [(fold.kept[-1].seq, [each.seq for each in fold.selectable][-NEWEST:])]
        rows.append(
            {"hints": hints, "right": right, "total_requests": requests.total, **asdict(requests), **asdict(cost)}
        )
        print(rows[-1])
    about = {"commits": given.commits, "live": given.live, "others": given.others, "slots": fold.end}
    print(results.write("log", rows, about=about, folder=given.results))
    return 0 if all(row["right"] for row in rows) else 1
