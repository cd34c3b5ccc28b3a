"""Every fault at every store call of small histories, against the invariants.

A story is a short history of a few processes on one store. One of them, the victim, meets one fault in one of its
store calls; then all others go on, what was under way arrives, and a `Watch` looks at the store after each step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from ckptstore.errors import CkptStoreError, CommitUnknownError, FencedError, SupersededError
from ckptstore.format.documents import encode_documents
from ckptstore.format.shard import StoredShard
from ckptstore.objectstore.port import ObjectInfo, ObjectStore, PutMode
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import Attempt, Description, begin
from ckptstore.protocol.capable import PROBED
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.testing.crash import DyingStore, Killed
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.reference import Watch
from ckptstore.testing.simulated import OPTIONS, CountedIds, ManualClock, upload
from ckptstore.testing.tapped import Act, Call, TappedStore

RANKS = 3


class Process:
    """One start of a training job: its view of the store, its incarnation, and what it was told.

    Args:
        store: What it sees.
        watch: Hears what it is told.
        digit: Of its identifiers; its own.
        job: The job's name.
        options: How it appends.
    """

    def __init__(
        self, store: ObjectStore, watch: Watch, digit: str, *, job: str = "job", options: LogOptions | None = None
    ) -> None:
        self.store, self.watch = store, watch
        self.ids, self.clock = CountedIds(digit), ManualClock()
        self.options = options or LogOptions()
        self.incarnation = Incarnation(self.ids.nonce(), job=job, host=f"host-{digit}")
        self.error: CkptStoreError | None = None
        self._log: RunLog | None = None
        self._receipts: dict[str, list[StoredShard]] = {}

    @property
    def log(self) -> RunLog:
        """Its log, which it creates when it first needs it."""
        if self._log is None:
            self._log = RunLog.create(self.store, clock=self.clock, ids=self.ids, options=self.options)
        return self._log

    def begin(self, step: int) -> Attempt:
        """Begin an attempt."""
        self.error = None
        description = Description(step, metrics={"seed": step}, documents=encode_documents({"seed": step}))
        return begin(
            self.log, self.incarnation, checkpoint_id=f"step-{step}", world_size=RANKS, description=description
        )

    def finish(self, attempt: Attempt) -> bool:
        """Upload, once, and commit; say whether it is known to be committed."""
        prefix, seed = str(attempt.stem), attempt.global_step or 0
        try:
            if prefix not in self._receipts:
                self._receipts[prefix] = [upload(self.store, attempt, rank, seed=seed) for rank in range(RANKS)]
            commit(self.log, self.incarnation, attempt, self._receipts[prefix], options=OPTIONS)
        except CkptStoreError as error:
            self.error = error
            if not isinstance(error, CommitUnknownError):
                self.watch.told_failed(prefix)
            return False
        self.watch.told_done(prefix)
        return True

    def save(self, step: int) -> bool:
        """Save; say whether it is known to be committed."""
        try:
            attempt = self.begin(step)
        except CkptStoreError as error:
            self.error = error
            return False
        return self.finish(attempt)


class World:
    """A store, what its victim sees of it, and who looks.

    Args:
        store: Empty.
        wrap: Returns the victim's view of the store, given this world.
        options: How processes append.
    """

    def __init__(
        self, store: ObjectStore, wrap: Callable[[World], TappedStore], *, options: LogOptions | None = None
    ) -> None:
        self.store, self.options = store, options or LogOptions()
        self.watch = Watch(store)
        self.victim_store = wrap(self)
        self.answering = True
        self.intruder: Process | None = None

    def victim(self) -> Process:
        """Return the process that meets the fault."""
        return Process(self.victim_store, self.watch, "a", options=self.options)

    def other(self, digit: str, *, job: str = "job") -> Process:
        """Return a process that meets none."""
        return Process(self.store, self.watch, digit, job=job, options=self.options)

    def arrive(self) -> None:
        """Let what is under way arrive."""
        if isinstance(self.victim_store, FaultyStore):
            self.victim_store.deliver()

    def intrude(self) -> None:
        """Let another job claim the run and save."""
        self.intruder = self.other("f", job="intruder")
        if not self.intruder.save(90):
            raise AssertionError(f"the intruder could not save: {self.intruder.error!r}")


Story = Callable[[World], Iterator[str]]
"""A history. It yields after each step what is wrong beside the store: empty text if nothing."""


def restart(world: World) -> Iterator[str]:
    """A job saves, meets the fault, and goes on if it can; then it is started again."""
    job = world.victim()
    with contextlib.suppress(Killed):
        for step in (1, 2):
            job.save(step)
            yield ""
        if not (job.save(3) or job.save(4)):  # the fault may be in one of them
            yield f"after one fault the job cannot save: {job.error!r}"
    world.arrive()
    yield ""
    again = world.other("b")
    for step in (5, 6):
        if not again.save(step):
            yield f"the job that was started again cannot save: {again.error!r}"
        world.arrive()
        yield ""


def first_open(world: World) -> Iterator[str]:
    """A job meets the fault while it asks the store what it can do, and is started again."""
    PROBED.clear()
    job = world.victim()
    with contextlib.suppress(Killed):
        job.save(1)
        yield ""
    world.arrive()
    again = world.other("b")
    if not again.save(2):
        yield f"the job that was started again cannot save: {again.error!r}"
    yield ""


def unknown(world: World, *, arrives_first: bool) -> Iterator[str]:
    """A commit's outcome is unknown; a later attempt commits; then the first is tried again."""
    job = world.victim()
    job.save(1)
    world.answering = True
    yield ""
    attempt = job.begin(2)
    job.finish(attempt)
    world.answering = True
    yield ""
    if arrives_first:
        world.arrive()
        yield ""
    saved = job.save(3)
    world.answering = True  # the outage may have come only now
    if not saved and not job.save(4):
        yield f"after an unknown outcome the job cannot save: {job.error!r}"
    yield ""
    if not job.finish(attempt) and not isinstance(job.error, SupersededError):
        yield f"an attempt below a committed one should be superseded, not {job.error!r}"
    yield ""
    world.arrive()
    yield ""
    if not world.other("b").save(5):
        yield "the job that was started again cannot save"
    yield ""


def ghost(world: World) -> Iterator[str]:
    """Another job claims and commits while one of this job's calls is under way."""
    job = world.victim()
    for step in (1, 2):
        job.save(step)
        yield ""
    if world.intruder is None:
        world.intrude()
    assert world.intruder is not None
    loser, winner = sorted((job, world.intruder), key=lambda each: each.incarnation.term or 0)
    for step in (3, 4):  # I15: fenced within one commit, for good
        if loser.save(step) or not isinstance(loser.error, FencedError):
            yield f"I15: the ghost's save ends with {loser.error!r}"
        yield ""
    if not winner.save(5):
        yield f"I15: the job that reigns cannot save: {winner.error!r}"
    yield ""


def many_writers(world: World) -> Iterator[str]:
    """One job makes a writer object per save; each carries the incarnation as it was pickled at some time."""
    job = world.victim()
    pickled = [pickle.dumps(job.incarnation)]
    for step in range(1, 5):
        writer = Process(job.store, world.watch, f"{step}", options=world.options)
        writer.incarnation = pickle.loads(pickled[step // 2])  # noqa: S301  (our own bytes)
        if not (writer.save(10 * step) or writer.save(10 * step + 1)):
            yield f"I15: one job fences itself: {writer.error!r}"
        pickled.append(pickle.dumps(writer.incarnation))
        yield ""


def roll_back(world: World) -> Iterator[str]:
    """Somebody goes back while the job saves; then it is started again, at a lower step."""
    job = world.other("b")
    job.save(50)
    target = job.log.fold.end - 1
    job.save(60)
    yield ""
    with contextlib.suppress(Killed, CkptStoreError):
        Catalog(world.victim().log).rollback(target)
    yield ""
    world.arrive()
    if not world.other("c").save(15):
        yield "after a roll-back the job cannot save"
    yield ""


def single_writer(world: World) -> Iterator[str]:
    """A store that overwrites, and the promise that one process at a time appends."""
    job = world.victim()
    for step in (1, 2, 3):
        job.save(step)
        yield ""
        world.arrive()
        yield ""
    if not job.save(4) and not job.save(5):
        yield f"after one fault the job cannot save: {job.error!r}"
    world.arrive()
    yield ""


Enumeration = Callable[[Callable[[], ObjectStore]], Iterator[str]]


def enumerations(options: LogOptions | None = None) -> dict[str, Enumeration]:
    """Return all enumerations by name. Each takes a maker of empty stores and yields what is wrong: nothing at best.

    Args:
        options: How processes append.
    """
    single = dataclasses.replace(options or LogOptions(), assume_single_writer=True)
    unknown_late = functools.partial(unknown, arrives_first=False)
    unknown_early = functools.partial(unknown, arrives_first=True)
    return {
        "each fault": lambda make: _each_fault(restart, make, options=options),
        "each death": lambda make: _each_death(restart, make, options=options),
        "first open, each fault": lambda make: _each_fault(first_open, make, options=options),
        "first open, each death": lambda make: _each_death(first_open, make, options=options),
        "each outage": lambda make: chain(
            _each_outage(unknown_late, make, options=options), _each_outage(unknown_early, make, options=options)
        ),
        "each intrusion": lambda make: _each_intrusion(ghost, make, options=options),
        "many writers": lambda make: _each_fault(many_writers, make, options=options),
        "roll-back, each fault": lambda make: _each_fault(roll_back, make, options=options),
        "roll-back, each death": lambda make: _each_death(roll_back, make, options=options),
        "roll-back, each intrusion": lambda make: _each_intrusion(roll_back, make, options=options),
        "single writer": lambda make: _each_fault(single_writer, lambda: overwriting(make()), options=single),
        "single writer, each death": lambda make: _each_death(restart, lambda: overwriting(make()), options=single),
    }


def overwriting(store: ObjectStore) -> TappedStore:
    """Return a view of `store` that ignores conditions, as some object stores do."""
    return Overwriting(store)


class Overwriting(TappedStore):
    """Answers "created" to every conditional create, and overwrites."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, lambda _, act: act())

    def put(self, key: str, body: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store, whatever `mode` says."""
        del mode
        return super().put(key, body)


def play(story: Story, world: World, *, what: str) -> Iterator[str]:
    """Play `story` and yield what is wrong, with what was done to the victim."""
    try:
        for complaint in story(world):
            yield from (f"{broken} [{what}]" for broken in ([complaint] if complaint else []) + world.watch.look())
    except AssertionError as error:
        yield f"{error} [{what}]"


def calls_of(story: Story, make_store: Callable[[], ObjectStore], options: LogOptions | None = None) -> list[Call]:
    """Return the calls that the victim makes if nothing happens to it."""
    RunLog.create(make_store(), options=options)  # the store is probed once per process: not in some plays only
    world = World(make_store(), lambda world: FaultyStore(world.store, lambda _: None), options=options)
    for _ in story(world):
        pass
    return world.victim_store.calls


def _each_fault(
    story: Story, make_store: Callable[[], ObjectStore], *, options: LogOptions | None = None
) -> Iterator[str]:
    writes = (Fault.UNSENT, Fault.LOST_REPLY, Fault.LATE, Fault.DUPLICATED)
    for call in calls_of(story, make_store, options):
        faults = [Fault.REFUSED, *(writes if call.writes else ()), *([Fault.RETRIED] if call.creates else ())]
        for fault in faults if call.operation != "abort" else ():

            def faulty(world: World, index: int = call.index, fault: Fault = fault) -> TappedStore:
                return FaultyStore(world.store, lambda now: fault if now.index == index else None)

            world = World(make_store(), faulty, options=options)
            yield from play(story, world, what=f"{_name(story)}, {call}: {fault.name}")


def _each_death(
    story: Story, make_store: Callable[[], ObjectStore], *, options: LogOptions | None = None
) -> Iterator[str]:
    for call in calls_of(story, make_store, options):
        for lands in (False, True) if call.writes else (False,):

            def dying(world: World, index: int = call.index, *, lands: bool = lands) -> TappedStore:
                return DyingStore(world.store, after_calls=index, last_call_lands=lands)

            world = World(make_store(), dying, options=options)
            yield from play(story, world, what=f"{_name(story)}, killed in {call}, {lands=}")


def _each_outage(
    story: Story, make_store: Callable[[], ObjectStore], *, options: LogOptions | None = None
) -> Iterator[str]:
    """From one send on, the log does not answer until the deadline has passed."""
    for call in calls_of(story, make_store, options):
        if not (call.creates and call.key.startswith("log/")):
            continue
        for fault in (Fault.UNSENT, Fault.LOST_REPLY, Fault.LATE):

            def silent(world: World, index: int = call.index, fault: Fault = fault) -> TappedStore:
                def plan(now: Call) -> Fault | None:
                    if now.index == index:
                        world.answering = False
                        return fault
                    return None if world.answering or not now.key.startswith("log/") else Fault.UNSENT

                return FaultyStore(world.store, plan)

            yield from play(
                story,
                World(make_store(), silent, options=options),
                what=f"{_name(story)}, no answer after {call}: {fault.name}",
            )


def _each_intrusion(
    story: Story, make_store: Callable[[], ObjectStore], *, options: LogOptions | None = None
) -> Iterator[str]:
    """Before or after one call of the victim another job claims and saves."""
    for call in calls_of(story, make_store, options):
        for lands in (False, True):

            def intruded(world: World, index: int = call.index, *, lands: bool = lands) -> TappedStore:
                def tap(now: Call, act: Act) -> Any:
                    if now.index != index or world.intruder is not None:  # one is enough
                        return act()
                    if lands:
                        result = act()
                        world.intrude()
                        return result
                    world.intrude()
                    return act()

                return TappedStore(world.store, tap)

            yield from play(
                story,
                World(make_store(), intruded, options=options),
                what=f"{_name(story)}, intruder at {call}, {lands=}",
            )


def _name(story: Story) -> str:
    return getattr(story, "__name__", None) or f"unknown {getattr(story, 'keywords', '')}"
