"""Rules in any order, drawn and made smaller by Hypothesis: after each of them no invariant is broken.

Unlike the drawn histories, nobody overlaps here within a call but by a request that arrives late; what fails is short.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from ckptstore.errors import CkptStoreError, CommitUnknownError, ConflictError, InvalidInputError
from ckptstore.maintenance.collect import collect, retire, retire_by
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.maintenance.retention import Keep
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.testing.crash import Killed
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.reference import Shown, Watch
from ckptstore.testing.simulated import OPTIONS, CountedIds, ManualClock, upload

KEEPS = (None, Keep(last=1), Keep(last=2), Keep(every=2))
FAULTS = (Fault.REFUSED, Fault.UNSENT, Fault.LOST_REPLY, Fault.LATE, Fault.RETRIED, Fault.DUPLICATED)
CHANGES = ("rollback", "pin", "unpin", "aside", "restore", "retire")
HINTS = ("latest.json", "state/000000000064.json")


class Job:
    """One start of a training job, or a tool: its log, its incarnation, and what its next calls meet."""

    def __init__(self, store, number):
        self.number, self.ids = number, CountedIds(f"{number:x}")
        self.meets, self.dies_in, self.begun = {}, None, 0
        self.store = FaultyStore(store, self.fault)
        self.clock = ManualClock()
        self.log = RunLog.create(store, clock=self.clock, ids=self.ids, options=LogOptions(deadline_seconds=1))
        self.log.store = self.store
        self.incarnation = Incarnation(self.ids.nonce(), job=f"job-{number}", host="host")
        self.attempts, self.plan = [], None

    def fault(self, call):
        after = call.index - self.begun
        if self.dies_in is not None and after >= self.dies_in:
            raise Killed(f"job {self.number} in {call}")
        return self.meets.get(after)

    def under(self, meets, dies_in=None):
        self.meets, self.dies_in, self.begun = dict(meets), dies_in, len(self.store.calls)


class Machine(RuleBasedStateMachine):
    """A run, jobs on it, and what is under way."""

    jobs = Bundle("jobs")
    meets = st.dictionaries(st.integers(0, 24), st.sampled_from(FAULTS), max_size=2)

    def __init__(self):
        super().__init__()
        self.store = MemoryStore(clock=ManualClock())
        self.watch, self.numbers, self.seeds = Watch(self.store), itertools.count(1), itertools.count(1)
        self.all = []

    @rule(target=jobs)
    def start(self):
        if len(self.all) == 6:
            return multiple()
        self.all.append(Job(self.store, next(self.numbers)))
        return self.all[-1]

    def ended(self, job, work):
        """Do it; say whether it ended well. A dead job does nothing any more."""
        try:
            work()
        except (CkptStoreError, Killed):
            return False
        finally:
            job.under({})
        return True

    @rule(job=jobs, meets=meets, dies_in=st.none() | st.integers(0, 20), commits=st.booleans())
    def save(self, job, meets, dies_in, commits):
        job.under(meets, dies_in)
        self.ended(job, lambda: self.begin(job, commits=commits))

    def begin(self, job, *, commits):
        seed = next(self.seeds)
        said = Description(seed % 5, metrics={"seed": seed})
        attempt = begin(job.log, job.incarnation, checkpoint_id=f"step-{seed % 5}", world_size=1, description=said)
        job.attempts.append((attempt, [upload(job.store, attempt, 0, seed=seed)]))
        if commits:
            self.commit(job, -1)

    @rule(job=jobs, meets=meets, which=st.integers(0, 3))
    def commit_an_earlier_attempt(self, job, meets, which):
        if job.attempts:
            job.under(meets)
            self.ended(job, lambda: self.commit(job, which % len(job.attempts)))

    def commit(self, job, which):
        attempt, shards = job.attempts.pop(which)
        prefix = str(attempt.stem)
        try:
            commit(job.log, job.incarnation, attempt, shards, options=OPTIONS)
        except (CommitUnknownError, Killed):
            job.attempts.append((attempt, shards))
            raise
        except CkptStoreError:
            self.watch.told_failed(prefix)
            raise
        self.watch.told_done(prefix)

    @rule(job=jobs, meets=meets, act=st.sampled_from(CHANGES), which=st.integers(0, 5))
    def change(self, job, meets, act, which):
        catalog = Catalog(job.log)
        kept = Catalog(RunLog.open(self.store, clock=ManualClock())).checkpoints(include_set_aside=True)
        if not kept:
            return
        seq = kept[which % len(kept)].seq
        job.under(meets)
        acts = {
            "rollback": lambda: catalog.rollback(seq),
            "pin": lambda: catalog.pin(seq, holder="eval", reason=""),
            "unpin": lambda: catalog.unpin(seq, holder="eval"),
            "aside": lambda: catalog.set_aside([seq], reason="quarantined"),
            "restore": lambda: catalog.restore([seq]),
            "retire": lambda: retire(job.log, [seq], reason="asked"),
        }
        with contextlib.suppress(InvalidInputError):
            self.ended(job, acts[act])

    @rule(job=jobs, meets=meets, keep=st.sampled_from(KEEPS[1:]))
    def retire(self, job, meets, keep):
        job.under(meets)
        self.ended(job, lambda: retire_by(job.log, keep))

    @rule(job=jobs, keep=st.sampled_from(KEEPS))
    def plan(self, job, keep):
        self.ended(job, lambda: setattr(job, "plan", (keep, plan_collection(job.log, keep=keep, grace_seconds=0))))

    @rule(job=jobs, meets=meets, dies_in=st.none() | st.integers(0, 30))
    def apply(self, job, meets, dies_in):
        if job.plan is None:
            return
        (keep, plan), job.plan = job.plan, None
        after, calls, ended = job.ids.nonce(), len(job.store.calls), False
        job.under(meets, dies_in)
        with contextlib.suppress(ConflictError):
            ended = self.ended(
                job, lambda: collect(job.log, digest=plan.digest, keep=keep, grace_seconds=0, options=OPTIONS)
            )
        shown = Shown(frozenset(plan.retire), frozenset(each.key for each in plan.delete))
        deleted = {call.key for call in job.store.calls[calls:] if call.operation == "delete"}
        deleted = {key for key in deleted if key.startswith("data/")}
        writer = f"{job.number:x}"
        self.watch.told_collected(shown, deleted=deleted, writer=writer, after=after, ended=ended)

    @rule(job=jobs)
    def arrive(self, job):
        job.store.deliver()

    @rule(key=st.sampled_from(HINTS), body=st.none() | st.binary(max_size=8))
    def spoil_a_hint(self, key, body):
        if body is None:
            self.store.delete(key)
        else:
            self.store.put(key, body)

    @invariant()
    def nothing_is_broken(self):
        """I1 to I17 without I9: see `ckptstore.testing.reference`."""
        assert self.watch.look() == []


def run(examples, steps):
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=profile)


def test_no_order_of_rules_breaks_an_invariant():
    run(60, 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_long_order_of_rules_breaks_an_invariant():
    run(2000, 50)
