"""Who plays in a simulation: plain functions that call what a trainer, a reader and an operator call."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.clock import Clock, IdSource
from ckptstore.errors import (
    CkptStoreError,
    CommitUnknownError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ResumeError,
    UnsupportedError,
)
from ckptstore.format.documents import encode_documents
from ckptstore.format.records import Known, Verified
from ckptstore.format.shard import StoredShard
from ckptstore.maintenance import collect
from ckptstore.maintenance.retention import Keep
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import Attempt, Description, begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.commit import commit
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_parts
from ckptstore.protocol.traces import write_trace
from ckptstore.testing.reference import Watch
from ckptstore.testing.simulated import OPTIONS, upload
from ckptstore.testing.weather import StormyStore
from ckptstore.transfer.assemble import read_bytes, whole

STEPS = 12
MAX_SEED = 100_000
"""Of the values of a save: two saves of one step hold other bytes, as training on a GPU gives them."""
TRIES = 3
REOPENED = 0.2
"""How probable it is that the next question opens the log anew."""
PINS = ("eval", "release")


@dataclass
class Process:
    """What one simulated process has.

    Args:
        name: Of the process.
        number: What its identifiers begin with.
        store: What it sees of the store.
        clock: Its own.
        ids: Its own.
        watch: Hears what it is told.
        chance: Decides what it does.
        job: Its job's name.
        options: How it appends.
    """

    name: str
    number: str
    store: StormyStore
    clock: Clock
    ids: IdSource
    watch: Watch
    chance: random.Random
    job: str = "job"
    options: LogOptions = field(default_factory=LogOptions)
    errors: list[CkptStoreError] = field(default_factory=list)

    def opened(self) -> RunLog:
        """Return the log, opened for reading."""
        return RunLog.open(self.store, clock=self.clock, ids=self.ids, options=self.options)

    def created(self) -> RunLog:
        """Return the log, opened for writing."""
        return RunLog.create(self.store, clock=self.clock, ids=self.ids, options=self.options)

    def ended_well(self, work: Callable[[], object]) -> bool:
        """Do `work`, and say whether it ended well. A misuse of our own is no ending."""
        try:
            work()
        except (InvalidInputError, UnsupportedError):
            raise
        except CkptStoreError as error:
            self.errors.append(error)
            return False
        return True


class Trainer:
    """One start of a training job, as `Checkpointer` is used: claim, resume, pin what was loaded, save, go back."""

    def __init__(self, process: Process) -> None:
        self.process, self.chance, self.watch = process, process.chance, process.watch
        self.log = process.created()
        self.incarnation = Incarnation(process.ids.nonce(), job=process.job, host=process.name)
        self.held: int | None = None
        self.in_doubt: list[tuple[Attempt, list[StoredShard], Incarnation]] = []
        self.pickled: list[bytes] = []

    def resume(self) -> None:
        """Claim first, then select, then pin."""
        self.log.refresh()
        claim(self.log, self.incarnation)
        chosen = latest(self.process, Catalog(self.log))
        if chosen is not None:
            Catalog(self.log).pin(chosen.seq, holder=self.process.name, reason="resumed")
            self.held = self.incarnation.loaded = chosen.seq
            load(self.process, [chosen])

    def save(self, step: int) -> None:
        """Begin, upload, commit; an unknown outcome is left, or asked for again, now or later."""
        seed, ranks = self.chance.randrange(MAX_SEED), self.chance.randint(1, 3)
        description = Description(step, metrics={"seed": seed}, documents=encode_documents({"seed": seed}))
        name = f"step-{step}"
        self.pickled.append(pickle.dumps(self.incarnation))
        attempt = begin(self.log, self.incarnation, checkpoint_id=name, world_size=ranks, description=description)
        try:
            shards = [upload(self.process.store, attempt, rank, seed=seed) for rank in range(ranks)]
        except CkptStoreError:
            self.watch.told_failed(str(attempt.stem))
            raise
        self.commit(attempt, shards, self.incarnation)

    def commit(self, attempt: Attempt, shards: Sequence[StoredShard], incarnation: Incarnation) -> None:
        """Commit as the incarnation that began the attempt, which knows of doubts, and tell what became of it."""
        prefix = str(attempt.stem)
        for _ in range(TRIES):
            try:
                done = commit(self.log, incarnation, attempt, shards, options=OPTIONS)
            except CommitUnknownError:
                if self.chance.random() < 0.7:  # noqa: PLR2004
                    self.in_doubt.append((attempt, [*shards], incarnation))
                    raise
            except CkptStoreError:
                self.watch.told_failed(prefix)
                raise
            else:
                self.watch.told_done(prefix)
                self.let_go()
                if self.chance.random() < 0.2:  # noqa: PLR2004
                    write_trace(self.log, done, {"steps": [1]})
                return

    def let_go(self) -> None:
        """Unpin what was resumed from, after the first own commit."""
        if self.held is not None:
            held, self.held = self.held, None
            Catalog(self.log).unpin(held, holder=self.process.name)

    def ask_again(self, _: int) -> None:
        """Try an attempt again whose outcome was unknown, though later ones may have been committed since."""
        if self.in_doubt:
            self.commit(*self.in_doubt.pop(0))

    def keep(self, _: int) -> None:
        """Let go of what a policy does not keep, as `Checkpointer(keep=...)` does after its commits."""
        if self.incarnation.term is not None:
            collect.retire_by(self.log, Keep(last=self.chance.randint(1, 3)), term=self.incarnation.term)
            collect.collect_retired(self.log, now=None, grace_seconds=0, options=OPTIONS)

    def new_writer(self, _: int) -> None:
        """Go on with a new writer object, which carries the incarnation as it is now or was before."""
        older = [pickle.dumps(self.incarnation), *self.pickled[-2:]]
        self.incarnation = pickle.loads(self.chance.choice(older))  # noqa: S301  (our own bytes)
        self.log = self.process.created()

    def go_back(self, _: int) -> None:
        """Go back in the running process: a new incarnation claims, and what lies above the target is abandoned."""
        self.incarnation = Incarnation(self.process.ids.nonce(), job=self.process.job, host=self.process.name)
        self.in_doubt.clear()
        self.pickled.clear()
        claim(self.log, self.incarnation)
        kept = Catalog(self.log).checkpoints()
        if kept:
            target = self.chance.choice(kept[-3:])
            roll_back(self.log, target.seq)
            self.incarnation.loaded = target.seq


def trains(process: Process) -> None:
    """Train from the newest checkpoint on, until fenced."""
    trainers: list[Trainer] = []
    chance = process.chance
    while not trainers:
        process.ended_well(lambda: trainers.append(Trainer(process)))
    trainer = trainers[0]
    step = 100 * chance.randint(1, 9)
    try:
        while not process.ended_well(trainer.resume):
            _stop_if_fenced(process)
        again = False
        for _ in range(chance.randint(1, STEPS)):
            if again and chance.random() < 0.5:  # noqa: PLR2004  (what failed may be tried by a new writer)
                process.ended_well(lambda step=step: trainer.new_writer(step))  # type: ignore[misc]
            else:
                step += chance.random() < 0.7  # noqa: PLR2004  (else the step before is saved again)
            acts = (trainer.save, trainer.ask_again, trainer.keep, trainer.new_writer, trainer.go_back)
            asks = 4 if trainer.in_doubt else 0
            act = trainer.save if again and not trainer.in_doubt else chance.choices(acts, (12, asks, 3, 2, 1))[0]
            again = not process.ended_well(lambda act=act, step=step: act(step))  # type: ignore[misc]
            _stop_if_fenced(process)
    except FencedError:
        process.watch.told_fenced(trainer.incarnation.id)


def goes_on(process: Process) -> None:
    """Begin the job again when all is well: it resumes and saves, whatever happened before."""
    trainer = Trainer(process)
    trainer.resume()
    for step in (1, 2):
        trainer.save(step)


def _stop_if_fenced(process: Process) -> None:
    if process.errors and isinstance(process.errors[-1], FencedError):
        raise process.errors[-1]


def reads(process: Process) -> None:
    """Load the latest on several ranks, again and again, with one open log or new ones."""
    logs: list[RunLog] = []
    for _ in range(process.chance.randint(1, 6)):
        if not logs or process.chance.random() < REOPENED:
            process.ended_well(lambda: logs.append(process.opened()))
        if logs:
            process.ended_well(lambda: _load_on_ranks(process, logs[-1]))


def _load_on_ranks(process: Process, log: RunLog) -> None:
    """Rank 0 selects, the others find what it selected, each in its own view of the log (I12)."""
    chosen = latest(process, Catalog(log))
    if chosen is not None:
        others = [Catalog(process.opened()).find(seq=chosen.seq) for _ in range(process.chance.randint(0, 2))]
        load(process, [chosen, *others])


def latest(process: Process, catalog: Catalog) -> Committed | None:
    """Return the latest, and tell the watch."""
    since = process.watch.moment
    try:
        found = catalog.latest()
    except ResumeError:
        process.watch.told_none_selectable(since=since)
        return None
    process.watch.told_latest(found, since=since)
    return found


def load(process: Process, ranks: Sequence[Committed]) -> None:
    """Load the same checkpoint on each rank, every byte verified, and tell the watch."""
    loaded: list[tuple[Committed, npt.NDArray[np.generic]]] = []
    for committed in ranks:
        try:
            loaded.append((committed, _read(process.store, committed)))
        except IntegrityError as error:
            process.watch.told_unreadable(committed, str(error))
            return
    process.watch.told_loaded(loaded)


def _read(store: ObjectStore, committed: Committed) -> npt.NDArray[np.generic]:
    """Return the tensor, as `Checkpoint.read` does, whose cache is locked for the whole process by Python 3.11."""
    parts = load_parts(store, committed)
    items = [(stored.shard, item) for part in parts for stored in part.shards for item in stored.items]
    raw = read_bytes(store, items, whole(items[0][1].chunk.tensor), options=OPTIONS)
    return raw.view(np.float32)[..., 0]


def operates(process: Process) -> None:
    """Pin, unpin, set aside, restore, verify, prove, go back."""
    logs: list[RunLog] = []
    acts: tuple[Callable[[Process, RunLog], object], ...] = (
        _pin, _pin, _unpin, _quarantine, _restore, _verify, _verify, _prove, _roll_back
    )  # fmt: skip
    for _ in range(process.chance.randint(1, 8)):
        if not logs or process.chance.random() < REOPENED:
            process.ended_well(lambda: logs.append(process.opened()))
        act = process.chance.choice(acts)
        if logs:
            process.ended_well(lambda act=act: act(process, logs[-1]))  # type: ignore[misc]


def any_kept(process: Process, log: RunLog) -> Committed:
    """Return one of the kept, as this process last saw them: others may have retired it since."""
    kept = log.fold.kept if process.chance.random() < 0.3 else Catalog(log).checkpoints()  # noqa: PLR2004
    if not kept:
        raise NotFoundError("Nothing is kept.")
    return process.chance.choice(kept)


def _pin(process: Process, log: RunLog) -> Any:
    return Catalog(log).pin(any_kept(process, log).seq, holder=process.chance.choice(PINS), reason="asked")


def _unpin(process: Process, log: RunLog) -> Any:
    return Catalog(log).unpin(any_kept(process, log).seq, holder=process.chance.choice(PINS))


def _quarantine(process: Process, log: RunLog) -> Any:
    return Catalog(log).set_aside([any_kept(process, log).seq], reason="quarantined")


def _restore(process: Process, log: RunLog) -> Any:
    aside = [each.seq for each in Catalog(log).checkpoints(include_set_aside=True) if each.set_aside]
    return Catalog(log).restore(process.chance.sample(aside, min(2, len(aside))))


def roll_back(log: RunLog, seq: int) -> None:
    """Go back to `seq`, unless somebody has set it aside since it was chosen: that is refused."""
    with contextlib.suppress(InvalidInputError):
        Catalog(log).rollback(seq)


def _prove(process: Process, log: RunLog) -> Any:
    return Catalog(log).prove(any_kept(process, log).seq, verdict="as before")


def _roll_back(process: Process, log: RunLog) -> None:
    if selectable := Catalog(log).checkpoints():
        roll_back(log, process.chance.choice(selectable).seq)


def _verify(process: Process, log: RunLog) -> None:
    """Verify every byte; what is damaged is quarantined, what is whole is recorded so."""
    committed = any_kept(process, log)
    damaged = process.watch.is_damaged(committed)
    verdict = Catalog(log).verify(committed, level="full", options=OPTIONS)
    if verdict.retired:  # meanwhile: there is nothing to be said of it any more
        return
    process.watch.told_verdict(committed, ok=verdict.ok, damaged_before=damaged)
    if not verdict.ok:
        Catalog(log).set_aside([committed.seq], reason="quarantined", note="verified")
        return

    def decide(fold: Fold) -> Known | None:
        found = fold.commits.get(committed.seq)
        return None if found is None or found.verified == "full" else Verified(committed.seq, "full")

    log.append(decide)
