"""A state of the model: what the store holds, what is under way to it, and where each process stands.

How `create_once` is modelled. A request that was sent waits in `net`; the store takes it at any later time, or never.
It can change something only while its slot is free, so when a slot is filled the other requests to it are forgotten:
that covers duplicates, tries again below us, late arrivals and lost replies. Whatever the reply was, the author reads
the slot, and what it finds there is its answer: its own record (CREATED, MINE), another one (OTHER), or nothing. Then
it sends the same bytes again, which changes nothing, or its deadline has passed: UNKNOWN, and the request stays in
`net`. A try that is refused leaves nothing there. A pause between a decision and the send is the request that waits.

A death needs no step of its own: a process that is dead is one that takes no step any more, and in each state each
process may have taken its last. A restart is the next process; one that goes on all the same is the ghost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.commit_model.records import Attempt, Kept, Log, Record, Wrong

PIECES = (0, 1)
"""Objects of an attempt: two, so that an upload and a deletion can end half-way."""
SHARED = Attempt(0, 0, -1)
"""Stands for a key that is named by what it holds, which several attempts share. Only a wrong program has one."""

Object = tuple[Attempt, int]


class Budget(NamedTuple):
    """How often something may still happen that the processes do not need."""

    unknowns: int = 0
    refusals: int = 0
    torn: int = 0
    rollbacks: int = 0
    quarantines: int = 0
    restores: int = 0
    verifications: int = 0
    trainer_retires: int = 0
    late_puts: int = 0
    failed_deletes: int = 0


_NOTHING = Budget()


@dataclass(frozen=True)
class Setting:
    """The bounds of one exploration, and what its protocol forgets. What needs more of anything is not found.

    Args:
        writers: Starts of a training job, ghosts and restarts together.
        saves: Attempts of each.
        slots: No record is sent to this slot or a later one.
        collectors: How many may be at work.
        reader: `plain` reads without a pin, `pinned` with one.
        door: `claim first`: a resume claims, selects below its claim and pins; `load first`: DCP's door, where the
            claim comes with the first save and nothing is pinned.
        loads_any: A process may go on from any selectable checkpoint, not from the newest only.
        again: An attempt whose outcome is unknown may be committed again.
        budget: Of what may happen.
        wrong: What is forgotten.
    """

    writers: int = 2
    saves: int = 2
    slots: int = 6
    collectors: int = 0
    reader: str = ""
    door: str = "claim first"
    loads_any: bool = False
    again: bool = False
    budget: Budget = _NOTHING
    wrong: Wrong = frozenset()


class Sent(NamedTuple):
    """A record whose outcome its author waits for. In doubt: a try may have arrived."""

    slot: int
    record: Record
    in_doubt: bool


class Writer(NamedTuple):
    """A start of a training job: its incarnation, and its one save or append under way.

    Args:
        at: What it does.
        term: Its own, 0 before the claim.
        number: Attempts taken in this term.
        attempt: That under way.
        loaded: seq of what it goes on from.
        step: Of its training.
        pinned: It holds a pin on what it loaded.
        unknown: An attempt whose outcome was unknown.
        sent: What it waits for.
    """

    at: str = "new"
    term: int = 0
    number: int = 0
    attempt: Attempt | None = None
    loaded: int | None = None
    step: int = 0
    pinned: bool = False
    unknown: Attempt | None = None
    sent: Sent | None = None


class Plan(NamedTuple):
    """What a collection will do: what it retires, what it deletes, whose bytes are gone then."""

    retire: tuple[int, ...]
    delete: tuple[Object, ...]
    gone: tuple[int, ...]


class Collector(NamedTuple):
    """A collection: the plan that was shown, and how far it is applied."""

    at: str = "idle"
    plan: Plan | None = None
    left: tuple[Object, ...] = ()
    sent: Sent | None = None


class Reader(NamedTuple):
    """A load of two ranks, each of which reads one object.

    Args:
        at: What it does.
        seq: What was selected.
        read: What rank 0 has read, or None.
        pinned: It holds a pin.
        tries: How often it may still select anew.
        sent: Its PIN or UNPIN.
    """

    at: str = "idle"
    seq: int | None = None
    read: int | None = None
    pinned: bool = False
    tries: int = 1
    sent: Sent | None = None


class State(NamedTuple):
    """All of it.

    Args:
        log: What stands in it.
        objects: Data that the store holds.
        net: Slots and records that may still arrive.
        writers, collectors, reader: Where each stands.
        budget: What may still happen.
        deleted: Data that were there once; only kept where they may come back.
        returned: Data that came back.
    """

    log: Log
    objects: frozenset[Object]
    net: frozenset[tuple[int, Record]]
    writers: tuple[Writer, ...]
    collectors: tuple[Collector, ...]
    reader: Reader
    budget: Budget
    deleted: frozenset[Object] = frozenset()
    returned: frozenset[Object] = frozenset()


class Step(NamedTuple):
    """One step: who does what, what is then, and which invariant that breaks by itself, or None."""

    label: tuple[object, ...]
    state: State
    broken: str | None = None


def first(setting: Setting) -> State:
    """Return the state before anything happened."""
    return State(
        Log(setting.wrong),
        frozenset(),
        frozenset(),
        (Writer(),) * setting.writers,
        (Collector(),) * setting.collectors,
        Reader(),
        setting.budget,
    )


def spend(state: State, what: str) -> State:
    """Return the state with one less of `what` to happen."""
    left: int = getattr(state.budget, what)
    return state._replace(budget=state.budget._replace(**{what: left - 1}))


def with_writer(state: State, i: int, writer: Writer) -> State:
    """Return the state with another writer `i`."""
    return state._replace(writers=(*state.writers[:i], writer, *state.writers[i + 1 :]))


def with_collector(state: State, i: int, collector: Collector) -> State:
    """Return the state with another collector `i`."""
    return state._replace(collectors=(*state.collectors[:i], collector, *state.collectors[i + 1 :]))


def sendings(state: State, record: Record, setting: Setting) -> Iterator[tuple[State, Sent]]:
    """Yield what may become of a first try to append `record`: it is under way, or it was refused."""
    slot = state.log.end
    if slot < setting.slots:
        yield state._replace(net=state.net | {(slot, record)}), Sent(slot, record, in_doubt=True)
        if state.budget.refusals:
            yield spend(state, "refusals"), Sent(slot, record, in_doubt=False)


def outcomes(state: State, sent: Sent, setting: Setting) -> Iterator[tuple[str, State, Sent]]:
    """Yield how `create_once` may go on: `landed`, `other`, `refused`, `unknown`, or `again` with another try."""
    slot, record, in_doubt = sent
    if slot < state.log.end:
        found = state.log.records[slot]
        yield ("landed" if is_own(found, record, setting) else "other"), state, sent
        return
    if not in_doubt:
        yield "again", state._replace(net=state.net | {(slot, record)}), sent._replace(in_doubt=True)
        yield "refused", state, sent
        return
    if "no read-back" in setting.wrong or ("refusal believed" in setting.wrong and state.budget.refusals):
        yield "refused", state, sent
    if "bytes remade" in setting.wrong and record.made == 1:
        remade = record._replace(made=2)
        yield "again", state._replace(net=state.net | {(slot, remade)}), sent._replace(record=remade)
    if state.budget.unknowns:
        yield "unknown", spend(state, "unknowns"), sent


def is_own(found: Record | None, record: Record, setting: Setting) -> bool:
    """Say whether what stands in a slot is what was sent there: the same bytes, or a commit of the same attempt."""
    if "no read-back" in setting.wrong:
        return False
    if found == record:
        return True
    if found is None or "bytes remade" in setting.wrong:
        return False
    return found.kind == record.kind == "COMMIT" and found.attempt == record.attempt


def objects_of(attempt: Attempt, wrong: Wrong) -> tuple[Object, ...]:
    """Return what a commit of `attempt` names."""
    return ((attempt, 0), (SHARED, 1)) if "hash-named" in wrong else ((attempt, 0), (attempt, 1))


def named(log: Log) -> set[Object]:
    """Return what kept commits name."""
    return {each for kept in log.fold.kept for each in objects_of(kept.attempt, log.wrong)}


def chosen(log: Log) -> Kept | None:
    """Return the checkpoint that is the latest, as the protocol under test says."""
    if "latest by step" in log.wrong:
        return max(log.fold.selectable, key=lambda each: each.step, default=None)
    return log.fold.newest
