"""Who lets checkpoints go in a simulation: retires, plans, waits, and applies the plan that was shown."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from ckptstore.errors import ConflictError, InvalidInputError
from ckptstore.maintenance import collect, collect_plan
from ckptstore.maintenance.retention import Keep
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.log import RunLog
from ckptstore.testing.actors import REOPENED, Process, any_kept
from ckptstore.testing.reference import Shown
from ckptstore.testing.simulated import OPTIONS

GRACES_SECONDS = (0.0, 0.0, 5.0, 3600.0)
LONGEST_LOOK_SECONDS = 4000.0
"""How long a person looks at a plan."""


def collects(process: Process) -> None:
    """Retire some, retire by a policy, plan and apply, again and again."""
    logs: list[RunLog] = []
    acts: tuple[Callable[[Process, RunLog], None], ...] = (retire_some, retire_by, gc, gc, gc)
    for _ in range(process.chance.randint(1, 5)):
        if not logs or process.chance.random() < REOPENED:
            process.ended_well(lambda: logs.append(process.opened()))
        act = process.chance.choice(acts)
        if logs:
            process.ended_well(lambda act=act: act(process, logs[-1]))  # type: ignore[misc]


def retire_some(process: Process, log: RunLog) -> None:
    """Retire a few by name, whatever they are; what may not go is refused."""
    seqs = {any_kept(process, log).seq for _ in range(process.chance.randint(1, 3))}
    with contextlib.suppress(InvalidInputError):
        collect.retire(log, seqs, reason="asked")


def retire_by(process: Process, log: RunLog) -> None:
    """Retire what a policy lets go of."""
    collect.retire_by(log, _policy(process.chance))


def gc(process: Process, log: RunLog) -> None:
    """Plan, look at the plan for a while, and apply it: by another process's log, perhaps."""
    chance, store, watch = process.chance, process.store, process.watch
    keep = _policy(chance) if chance.random() < 0.7 else None  # noqa: PLR2004
    grace_seconds = chance.choice(GRACES_SECONDS)
    plan = collect_plan.plan_collection(log, keep=keep, grace_seconds=grace_seconds)
    shown = Shown(frozenset(plan.retire), frozenset(each.key for each in plan.delete))
    if chance.random() < 0.5:  # noqa: PLR2004
        process.clock.sleep(chance.uniform(0, LONGEST_LOOK_SECONDS))
    log = process.opened() if chance.random() < 0.5 else log  # noqa: PLR2004
    after, calls = process.ids.nonce(), len(store.calls)
    ended = False
    try:
        with contextlib.suppress(ConflictError):
            collect.collect(log, digest=plan.digest, keep=keep, grace_seconds=grace_seconds, options=OPTIONS)
            ended = True
    finally:
        deleted = {call.key for call in store.calls[calls:] if call.operation == "delete"}
        deleted = {key for key in deleted if key.startswith("data/")}
        watch.told_collected(shown, deleted=deleted, writer=process.number, after=after, ended=ended)


def collects_to_the_end(process: Process) -> None:
    """Collect when all is well: whatever happened before, what is retired goes."""
    log = process.opened()
    if log.run is not None:
        plan = collect_plan.plan_collection(log, grace_seconds=0)
        collect.collect(log, digest=plan.digest, grace_seconds=0, options=OPTIONS)
        if log.refresh().retired:
            raise AssertionError(f"After a collection {sorted(log.fold.retired)} are retired and not gone.")


def verifies_all(process: Process) -> None:
    """Verify at the end what is kept, every byte."""
    for verdict in Catalog(process.opened()).verify_kept(level="full", options=OPTIONS):
        process.watch.told_kept(verdict.seq, ok=verdict.ok)


def _policy(chance: random.Random) -> Keep:
    return chance.choice((Keep(last=1), Keep(last=2), Keep(last=4), Keep(every=2), Keep(best=("seed", "max", 1))))
