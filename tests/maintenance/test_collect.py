"""What is collected: what is retired and what can never commit, as it was shown, and nothing else (I7, I8, I17)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from odd_stores import Denies, NamesNoUploads

from ckptstore import CheckpointStore
from ckptstore.clock import SystemClock
from ckptstore.errors import (
    AccessDeniedError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from ckptstore.events import Collected, Deleted, Retired
from ckptstore.format.layout import parse_data_key, slot_key
from ckptstore.format.records import LEVELS, Verified
from ckptstore.maintenance import collect as collecting
from ckptstore.maintenance.collect import collect, collect_retired, retire, retire_by
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.maintenance.retention import Keep, retirable
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.traces import write_trace
from ckptstore.testing import simulated
from ckptstore.testing.faults import Fault, FaultyStore

HOUR = 3600.0


class Clock(SystemClock):
    """A clock that may be set."""

    ahead = 0.0

    def now(self):
        return datetime.now(UTC) + timedelta(seconds=self.ahead)


class Run:
    """A run of one job, in memory, in a store whose clock may be set."""

    def __init__(self, saves=0):
        self.clock, self.events = Clock(), []
        self.store = MemoryStore(clock=self.clock)
        self.log = self.open()
        self.job = Incarnation.new(job="gpt")
        for step in range(1, saves + 1):
            self.save(step)

    def open(self, store=None, **options):
        store = self.store if store is None else store
        return RunLog.create(store, observer=self.events.append, options=LogOptions(**options))

    def save(self, step=0, job=None):
        self.log.refresh()
        return simulated.save(self.log, job or self.job, f"step-{step}", step=step, seed=step, world_size=2)

    def upload(self, name, job=None):
        """Upload an attempt's shards, and do not commit."""
        self.log.refresh()
        attempt = begin(self.log, job or self.job, checkpoint_id=name, world_size=2)
        for rank in range(2):
            simulated.upload(self.store, attempt, rank)
        return attempt

    def plan(self, log=None, **how):
        return plan_collection(log or self.log, **{"grace_seconds": 0, **how})

    def collect(self, log=None, **how):
        log, how = log or self.log, {"grace_seconds": 0, **how}
        return collect(log, digest=plan_collection(log, **how).digest, options=simulated.OPTIONS, **how)

    @property
    def seqs(self):
        return sorted(self.log.refresh().commits)

    @property
    def names(self):
        """Whose data there is."""
        return {info.key.split("/")[2].split(".t0")[0] for info in self.store.list("data/")}

    def whole(self):
        catalog = Catalog(RunLog.open(self.store))
        return all(catalog.verify(each, level="full").ok for each in catalog.checkpoints(include_set_aside=True))


def test_what_is_retired_goes_with_all_that_lies_under_it_and_the_rest_stays_bit_by_bit():
    run = Run(saves=5)
    old = run.log.fold.commits[2]
    write_trace(run.log, old, {"steps": []})
    before = {info.key: run.store.get(info.key, max_bytes=1 << 20) for info in run.store.list("")}
    report = run.collect(keep=Keep(last=3))
    assert (report.retired, report.collected, report.failed) == ([1, 2], [1, 2], {})
    gone = {each.key for each in report.deleted}
    under = {key for key in before if any(run_of(key, name) for name in ("step-1", "step-2"))}
    assert gone == under
    assert {key.rpartition("/")[2] for key in gone} == {
        "COMMITTED",
        "trace.json",
        "part-00000.json.gz",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }
    now = {info.key: run.store.get(info.key, max_bytes=1 << 20) for info in run.store.list("")}
    assert {key: body for key, body in before.items() if key not in gone} == {
        key: now[key] for key in before if key not in gone
    }
    assert (run.seqs, run.whole(), run.log.fold.retired) == ([3, 4, 5], True, {})
    assert run.plan().is_empty


def run_of(key, name):
    return key.startswith("data/") and key.split("/")[2].startswith(f"{name}.t0")


def test_each_deletion_is_told_before_it_is_sent_and_again_when_it_is_done():
    run = Run(saves=4)
    order = []

    class Telling(ForwardingStore):
        def delete(self, key):
            order.append(("delete", key))
            super().delete(key)

    log = run.open(Telling(run.store))
    plan = run.plan(log, keep=Keep(last=2))
    report = collect(
        log,
        digest=plan.digest,
        keep=Keep(last=2),
        grace_seconds=0,
        audit=lambda some: order.extend(("line", each.key) for each in some),
        options=simulated.OPTIONS,
    )
    keys = [key for what, key in order if what == "delete" and key.startswith("data/")]
    assert keys == [each.key for each in report.deleted] == [each.key for each in plan.delete]
    assert all(order.index(("line", key)) < order.index(("delete", key)) for key in keys)
    assert [(event.key, event.size, event.why) for event in run.events if isinstance(event, Deleted)] == [
        (each.key, each.size, each.why) for each in plan.delete
    ]
    assert [event.seqs for event in run.events if isinstance(event, Retired)] == [(1, 2)]
    assert [event.seqs for event in run.events if isinstance(event, Collected)] == [(1, 2)]


def test_where_no_line_can_be_written_nothing_is_deleted():
    run = Run(saves=3)
    retire(run.log, [1], reason="old")
    plan = run.plan()

    def full(some):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        collect(run.log, digest=plan.digest, grace_seconds=0, audit=full)
    assert run.plan().delete == plan.delete


# -- the plan that was shown


def test_another_digest_is_refused_with_both_and_nothing_is_changed():
    run = Run(saves=4)
    shown = run.plan(keep=Keep(last=3))
    run.save(5)
    end = run.log.refresh().end
    with pytest.raises(ConflictError) as caught:
        collect(run.log, digest=shown.digest, keep=Keep(last=3), grace_seconds=0)
    assert shown.digest in caught.value.message
    assert caught.value.facts["planned"] == run.plan(keep=Keep(last=3)).digest
    assert caught.value.facts["retire"] == [1, 2]
    assert run.log.refresh().end == end
    assert run.seqs == [1, 2, 3, 4, 5]


def test_ages_and_moments_are_not_in_the_digest():
    run = Run(saves=4)
    run.upload("lost")
    claim(run.log, Incarnation.new(job="gpt"))
    run.clock.ahead = 2 * HOUR
    first = run.plan(keep=Keep(last=2), grace_seconds=HOUR)
    run.clock.ahead = 3 * HOUR
    assert run.plan(keep=Keep(last=2), grace_seconds=HOUR).digest == first.digest
    assert sorted(each.key.rpartition("/")[2] for each in first.delete) == [
        "COMMITTED",
        "COMMITTED",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert run.plan(keep=Keep(last=3), grace_seconds=HOUR).digest != first.digest
    assert run.plan(grace_seconds=HOUR).digest != first.digest


class Intruded(ForwardingStore):
    """Lets something happen right before a record is appended."""

    def __init__(self, inner, before):
        super().__init__(inner)
        self.before = before

    def put(self, key, body, **more):
        if key.startswith("log/") and self.before:
            before, self.before = self.before, None
            before()
        return super().put(key, body, **more)


def test_a_pin_that_lands_between_the_plan_and_its_slot_is_obeyed_and_nothing_is_deleted():
    run = Run(saves=5)
    reader = Catalog(run.open())
    log = run.open(Intruded(run.store, lambda: reader.pin(2, holder="eval", reason="")))
    plan = run.plan(log, keep=Keep(last=3))
    assert plan.retire == (1, 2)
    with pytest.raises(ConflictError, match=": step-2@2 may not be retired now"):
        collect(log, digest=plan.digest, keep=Keep(last=3), grace_seconds=0)
    assert run.seqs == [1, 2, 3, 4, 5]
    assert run.whole()
    assert run.collect(keep=Keep(last=3)).retired == [1]


def test_a_pin_before_the_plan_is_applied_makes_it_another_one():
    run = Run(saves=5)
    plan = run.plan(keep=Keep(last=3))
    Catalog(run.log).pin(1, holder="eval", reason="")
    with pytest.raises(ConflictError):
        collect(run.log, digest=plan.digest, keep=Keep(last=3), grace_seconds=0)
    assert run.seqs == [1, 2, 3, 4, 5]


def test_a_commit_that_lands_at_the_slot_leaves_the_plan_as_it_was_shown():
    run = Run(saves=5)
    log = run.open(Intruded(run.store, lambda: run.save(6)))
    plan = run.plan(log, keep=Keep(last=3))
    report = collect(log, digest=plan.digest, keep=Keep(last=3), grace_seconds=0, options=simulated.OPTIONS)
    assert report.retired == [1, 2] == report.collected
    assert (run.seqs, run.whole()) == ([3, 4, 5, 6], True)


def test_another_collector_that_was_first_is_no_fault():
    run = Run(saves=5)
    log = run.open(Intruded(run.store, lambda: retire_by(run.log, Keep(last=3))))
    plan = run.plan(log, keep=Keep(last=3))
    report = collect(log, digest=plan.digest, keep=Keep(last=3), grace_seconds=0, options=simulated.OPTIONS)
    assert (report.retired, report.collected) == ([], [1, 2])
    assert [each.seqs for each in run.events if isinstance(each, Retired)] == [(1, 2)]


def test_where_it_is_not_known_whether_it_is_retired_nothing_is_deleted():
    run = Run(saves=4)
    silent = [False]

    def plan_of(call):
        silent[0] = silent[0] or (call.creates and call.key.startswith("log/"))
        return Fault.UNSENT if silent[0] and call.key.startswith("log/") else None

    log = run.open(FaultyStore(run.store, plan_of), deadline_seconds=0.2)
    plan = run.plan(log, keep=Keep(last=2))
    with pytest.raises(CommitUnknownError):
        collect(log, digest=plan.digest, keep=Keep(last=2), grace_seconds=0)
    assert run.whole()
    assert not any(isinstance(event, Deleted) for event in run.events)


# -- what is never retired


@pytest.mark.parametrize(
    ("seqs", "why"),
    [
        ([4], "^step-4@4 cannot be retired: it is the newest checkpoint. Nothing"),
        ([2], "^step-2@2 cannot be retired: it is the newest verified at level full. Nothing"),
        ([1], "^step-1@1 cannot be retired: it is pinned by eval. Nothing"),
        ([3, 1], "^step-1@1 cannot be retired: it is pinned by eval. Nothing"),
        ([9], "^slot 9 cannot be retired: it holds no kept checkpoint. Nothing"),
    ],
)
def test_what_somebody_relies_on_is_not_retired_and_of_several_none_is(seqs, why):  # I14
    run = Run(saves=4)
    run.log.append(lambda _: Verified(2, LEVELS[-1]))
    Catalog(run.log).pin(1, holder="eval", reason="")
    with pytest.raises(InvalidInputError, match=why):
        retire(run.log, seqs, reason="")
    assert run.seqs == [1, 2, 3, 4]


def test_two_stay(tmp_path):
    run = Run(saves=2)
    with pytest.raises(InvalidInputError, match="fewer than 2"):
        retire(run.log, [1], reason="")
    assert retire_by(run.log, Keep(last=1)) == []
    run.save(3)
    assert retire(run.log, [1], reason="") == [1]
    assert retire(run.log, [1], reason="") == []


def test_a_fenced_job_retires_nothing():  # I3
    run = Run(saves=4)
    term = run.job.term
    assert retire_by(run.log, Keep(last=3), term=term) == [1]
    claim(run.log, Incarnation.new(job="gpt"))
    with pytest.raises(FencedError):
        retire_by(run.log, Keep(last=2), term=term)
    assert run.seqs == [2, 3, 4]


def test_more_than_one_record_holds_are_refused_since_none_or_all_are_retired(monkeypatch):
    monkeypatch.setattr(collecting, "SEQS_AT_ONCE", 2)
    run = Run(saves=6)
    with pytest.raises(InvalidInputError, match="3 checkpoints are too many"):
        retire(run.log, [1, 2, 3], reason="")
    assert run.seqs == [1, 2, 3, 4, 5, 6]
    assert retire(run.log, [1, 2], reason="") == [1, 2]


def test_what_was_shown_is_retired_and_nothing_that_a_commit_since_has_made_old():  # I17
    run = Run(saves=5)
    log = run.open(Intruded(run.store, lambda: run.save(6)))
    shown = retirable(log.fold, Keep(last=3))
    run.save(7)
    assert retire_by(log, Keep(last=3), shown=shown) == shown == [1, 2]
    assert run.seqs == [3, 4, 5, 6, 7]
    Catalog(run.log).pin(4, holder="eval", reason="")
    with pytest.raises(ConflictError, match=": step-4@4 may not be retired now"):
        retire_by(run.log, Keep(last=3), shown=[3, 4])
    assert run.seqs == [3, 4, 5, 6, 7]


def test_the_copy_of_a_commit_goes_when_its_checkpoint_is_retired_and_others_stay():
    run = Run(saves=6)
    stems = {seq: each.commit.stem for seq, each in run.log.fold.commits.items()}

    def copies():
        keys = {info.key for info in run.store.list("data/")}
        return [seq for seq, stem in stems.items() if stem.committed_key in keys]

    retire(run.log, [1], reason="")
    assert copies() == [2, 3, 4, 5, 6]
    retire_by(run.log, Keep(last=4))
    assert copies() == [3, 4, 5, 6]
    retire_by(run.open(Denies(run.store, "delete")), Keep(last=3))  # best effort
    assert (run.seqs, copies()) == ([4, 5, 6], [3, 4, 5, 6])
    plan = run.plan(grace_seconds=HOUR)
    assert [each.key for each in plan.delete] == [stems[3].committed_key]
    assert sorted(each.objects for each in plan.waiting) == [3, 3, 3]
    assert run.collect(grace_seconds=HOUR).collected == []
    assert (copies(), run.names >= {"step-1", "step-2", "step-3"}) == ([4, 5, 6], True)


def test_a_thousand_and_more_are_retired_and_recorded_in_several_records(monkeypatch):
    monkeypatch.setattr(collecting, "SEQS_AT_ONCE", 2)
    run = Run(saves=7)
    assert retire_by(run.log, Keep(last=4)) == [1, 2, 3]
    assert run.collect(keep=Keep(last=2)).collected == [1, 2, 3, 4, 5]
    assert [event.seqs for event in run.events if isinstance(event, Retired)] == [(1, 2), (3,), (4, 5)]
    assert run.seqs == [6, 7]


# -- the grace


def test_the_bytes_stay_for_the_grace_by_the_clock_of_the_store():
    run = Run(saves=4)
    run.clock.ahead = 5 * HOUR  # the checkpoints are old, their retirement is not
    retire(run.log, [1], reason="old")
    run.clock.ahead = 5.5 * HOUR
    retire(run.log, [2], reason="old")
    plan = run.plan(grace_seconds=HOUR)
    assert (plan.delete, [each.prefix[:6] for each in plan.waiting]) == ((), ["step-1", "step-2"])
    run.clock.ahead = 6.1 * HOUR
    plan = run.plan(grace_seconds=HOUR)
    assert {key.key.split("/")[2][:6] for key in plan.delete} == {"step-1"}
    assert run.collect(grace_seconds=HOUR).collected == [1]
    assert len(run.plan(grace_seconds=HOUR, keep=Keep(last=2)).delete) == 0
    run.clock.ahead = 6.6 * HOUR
    assert run.collect(grace_seconds=HOUR).collected == [2]


def test_what_is_retired_now_is_deleted_by_a_later_run():
    run = Run(saves=4)
    report = run.collect(keep=Keep(last=2), grace_seconds=HOUR)
    assert (report.retired, report.collected) == ([1, 2], [])
    assert [each.key.rpartition("/")[2] for each in report.deleted] == ["COMMITTED"] * 2  # hints need no grace
    assert run.names == {"step-1", "step-2", "step-3", "step-4"}
    run.clock.ahead = 1.1 * HOUR
    assert run.collect(keep=Keep(last=2), grace_seconds=HOUR).collected == [1, 2]


def test_a_long_log_is_not_read_to_find_out_when_something_was_retired():
    run = Run(saves=3)
    retire(run.log, [1], reason="old")
    for number in range(100):
        Catalog(run.log).pin(3, holder=f"eval-{number}", reason="")
    run.clock.ahead = 2 * HOUR
    Catalog(run.log).pin(3, holder="late", reason="")
    calls = []

    class Counting(ForwardingStore):
        def head(self, key):
            calls.append(key)
            return super().head(key)

    log = run.open(Counting(run.store))
    assert len(run.plan(log, grace_seconds=HOUR).delete) == 3
    assert len([key for key in calls if key.startswith("log/")]) <= 8


class Timeless(ForwardingStore):
    """Does not tell when anything was stored."""

    def head(self, key):
        info = super().head(key)
        return type(info)(info.key, info.size, info.etag, None)

    def list(self, prefix, *, after=None):
        return (type(info)(info.key, info.size, info.etag, None) for info in super().list(prefix, after=after))


@pytest.mark.parametrize("wrap", [Timeless, lambda store: Denies(store, "overwrite")], ids=["no times", "no writes"])
def test_where_the_store_does_not_tell_the_time_nothing_is_deleted_that_needs_a_grace(wrap):
    run = Run(saves=4)
    run.upload("lost")
    claim(run.log, Incarnation.new(job="gpt"))
    retire(run.log, [1], reason="old")
    run.clock.ahead = 10 * HOUR
    log = RunLog.open(wrap(run.store))
    plan = run.plan(log, grace_seconds=HOUR)
    assert (plan.delete, len(plan.waiting)) == ((), 2)
    assert "does not tell its time" in plan.notes[0]
    assert len(run.plan(log).delete) == 5
    assert run.plan(log).notes == ()


@pytest.mark.parametrize("grace", [-1, True, "1h", float("nan"), 10**9])
def test_a_grace_is_a_length_of_time(grace):
    with pytest.raises(InvalidInputError, match="grace_seconds"):
        plan_collection(Run(saves=1).log, grace_seconds=grace)


# -- orphans


def test_what_can_never_commit_goes_and_what_may_still_commit_stays():  # I7
    run = Run()
    ghost, job = Incarnation.new(job="gpt"), Incarnation.new(job="gpt")
    run.upload("fenced", ghost)
    claim(run.log, job)
    run.upload("overtaken", job)
    run.save(1, job)
    run.save(2, job)
    run.upload("living", job)
    newer = MemoryStore()  # what a term leaves that this log does not know yet
    other = RunLog.create(newer)
    for _ in range(5):
        claim(other, Incarnation.new(job="gpt"))
    attempt = begin(other, Incarnation.new(job="gpt"), checkpoint_id="unknown", world_size=1)
    simulated.upload(run.store, attempt, 0)
    report = run.collect()
    assert {key.key.split("/")[2].split(".")[0] for key in report.deleted} == {"fenced", "overtaken"}
    assert run.names == {"step-1", "step-2", "living", "unknown"}


def test_the_grace_of_an_orphan_begins_when_its_newest_object_was_stored():
    run = Run(saves=1)
    attempt = run.upload("lost")
    claim(run.log, Incarnation.new(job="gpt"))
    run.clock.ahead = 0.9 * HOUR
    simulated.upload(run.store, attempt, 1)  # its ghost still writes
    run.clock.ahead = 1.5 * HOUR
    plan = run.plan(grace_seconds=HOUR)
    assert (plan.delete, [each.objects for each in plan.waiting]) == ((), [2])
    run.clock.ahead = 2 * HOUR
    assert len(run.plan(grace_seconds=HOUR).delete) == 2


@pytest.mark.parametrize("is_tip", [False, True], ids=["an older one", "the newest term's tip"])
@pytest.mark.parametrize("file", ["shard", "part", "trace", "COMMITTED"])
def test_a_request_that_lands_after_everything_was_collected_leaves_an_orphan(is_tip, file):
    """The fold has forgotten the prefix; that it can never commit again is still plain."""
    run = Run(saves=4)
    old = run.log.fold.commits[4 if is_tip else 2]
    if is_tip:
        Catalog(run.log).set_aside([4], reason="abandoned")
    stem = old.commit.stem
    keys = {
        "shard": stem.shard_key(1),
        "part": stem.part_key(0),
        "trace": stem.trace_key,
        "COMMITTED": stem.committed_key,
    }
    body = run.store.get(stem.committed_key, max_bytes=1 << 20)
    retire(run.log, [old.seq], reason="old")
    assert run.collect().collected == [old.seq]
    assert run.log.fold.committed_at(str(stem)) is None
    run.store.put(keys[file], body)
    assert [each.key for each in run.plan().delete] == [keys[file]]
    assert [each.key for each in run.collect().deleted] == [keys[file]]
    assert run.plan().is_empty
    assert run.whole()


def test_every_commit_that_was_ever_collected_is_an_orphan_by_the_rule():
    """I7, I8, over several terms: what the fold forgets it never takes for something that may commit."""
    run = Run()
    stems = []
    for job in (Incarnation.new(job="a"), Incarnation.new(job="b"), Incarnation.new(job="c")):
        stems += [run.save(step, job).commit.stem for step in range(3)]
        retire_by(run.log, Keep(last=2))
        run.collect()
        kept = {each.commit.prefix for each in run.log.fold.kept}
        for stem in stems:
            run.store.put(stem.shard_key(3), b"late") if str(stem) not in kept else None
        late = {str(parse_data_key(each.key).stem) for each in run.plan().delete}
        assert late == {str(stem) for stem in stems} - kept
        run.collect()
    assert run.whole()


def test_data_of_another_run_whose_log_was_lost_is_not_taken_for_garbage():
    run = Run(saves=3)
    before = {info.key: run.store.get(info.key, max_bytes=1 << 20) for info in run.store.list("data/")}
    for info in list(run.store.list("")):
        run.store.delete(info.key)
    run.log, run.job = run.open(), Incarnation.new(job="gpt")
    for step in range(10, 16):
        run.save(step)
    for key, body in before.items():
        run.store.put(key, body)
    plan = run.plan()
    assert (plan.delete, len(plan.waiting)) == ((), 3)
    assert "another run" in plan.waiting[0].why
    assert before.keys() <= {info.key for info in run.store.list("data/")}


def test_a_log_that_lost_its_tail_deletes_nothing():
    run = Run(saves=5)
    for seq in (4, 5):
        run.store.delete(f"log/{seq:012d}.json")
    log = RunLog.open(run.store)
    claim(log, Incarnation.new(job="gpt"))
    with pytest.raises(IntegrityError, match="lost"):
        run.plan(log)


@pytest.mark.parametrize(
    "act",
    [
        lambda log, digest: collect(log, digest=digest, grace_seconds=0),
        lambda log, _: collect_retired(log, now=None, grace_seconds=0),
    ],
    ids=["a collector", "a trainer"],
)
def test_a_log_that_loses_its_tail_between_the_plan_and_the_first_deletion_deletes_nothing(act):
    run = Run(saves=4)
    retire(run.log, [1], reason="")
    last, data = f"log/{run.log.fold.end - 1:012d}.json", {info.key for info in run.store.list("data/")}
    digest, looks = run.plan().digest, []

    class Losing(ForwardingStore):
        def get(self, key, **more):
            try:
                return super().get(key, **more)
            finally:
                if key == last:
                    looks.append(key)
                    run.store.delete(last)

    log = run.open()
    log.store = Losing(run.store)
    with pytest.raises(IntegrityError, match="is gone"):
        act(log, digest)
    assert len(looks) == 2  # the first for the plan, the second for the deletion
    assert {info.key for info in run.store.list("data/")} == data


def test_a_log_that_was_replaced_under_a_collector_deletes_nothing():
    run = Run(saves=3)
    for info in list(run.store.list("")):
        run.store.delete(info.key)
    old, run.log, run.job = run.log, run.open(), Incarnation.new(job="gpt")
    run.save(1)
    with pytest.raises(IntegrityError):
        run.plan(old)
    with pytest.raises(IntegrityError):
        collect_retired(old, now=None, grace_seconds=0)
    assert run.whole()


# -- exact keys


def test_what_nobody_of_this_run_spells_stays_and_is_told():
    run = Run(saves=4)
    prefix = run.log.fold.commits[1].commit.prefix
    foreign = [
        f"data/0/{prefix}/mine.bin",
        f"data/1/{prefix}/rank-00000.safetensors",  # the wrong lane
        f"data/0/{prefix}/deep/rank-00000.safetensors",
        "data/x/y/z",
        "data/0/README",
    ]
    elsewhere = ["data.bin", "probe/x/y", "nested/data/0/a/b", "log/b/run.json", "state/mine"]
    for key in (*foreign, *elsewhere):
        run.store.put(key, b"?")
    report = run.collect(keep=Keep(last=3))
    assert report.collected == [1]
    assert list(report.plan.foreign) == sorted(foreign)
    assert {*foreign, *elsewhere} <= {info.key for info in run.store.list("")}
    assert run.names >= {"step-2", "step-3", "step-4"}


def test_a_name_that_is_a_pattern_or_begins_another_touches_nothing_but_its_own():
    run = Run()
    names = [
        "run[1]",
        "run1",
        "a*",
        "ab",
        "q?x",
        "qax",
        "{x}",
        "x",
        "step-1",
        "step-10",
        "step-1.t0001.a0001",
        "a/b",
        "a",
    ]
    for name in names:
        simulated.save(run.log, run.job, name)
    for name in ("run[1]", "a*", "q?x", "{x}", "step-1", "a/b"):
        seq = Catalog(run.log).find(name).seq
        stem = run.log.fold.commits[seq].commit.stem
        retire(run.log, [seq], reason="")
        assert {str(parse_data_key(each.key).stem) for each in run.collect().deleted} == {str(stem)}
        assert run.whole()
    assert len(run.seqs) == len(names) - 6


# -- uploads that never ended


def test_uploads_that_never_ended_are_aborted_by_the_log_and_after_the_grace():
    run = Run(saves=2)
    committed, ghost = run.log.fold.commits[1].commit.stem, Incarnation.new(job="gpt")
    lost = begin(run.log, run.job, checkpoint_id="lost", world_size=1).stem
    claim(run.log, ghost)
    living = begin(run.log, ghost, checkpoint_id="living", world_size=1).stem
    begun = [run.store.open_upload(stem.shard_key(5), size=1) for stem in (committed, lost, living)]
    foreign = run.store.open_upload("elsewhere/data/0/x", size=1)
    assert run.plan(grace_seconds=HOUR).abort == ()
    run.clock.ahead = 1.1 * HOUR
    shown = run.plan(grace_seconds=HOUR)
    assert {each.key for each in shown.abort} == {committed.shard_key(5), lost.shard_key(5)}
    assert len(run.collect(grace_seconds=HOUR).aborted) == 2
    assert {each.key for each in run.store.list_uploads("")} == {living.shard_key(5), "elsewhere/data/0/x"}
    del begun, foreign


@pytest.mark.parametrize("wrap", [NamesNoUploads, lambda store: Denies(store, "list uploads")], ids=["no", "denied"])
def test_where_nobody_tells_of_uploads_the_rest_is_collected_and_that_is_said(wrap):
    run = Run(saves=3)
    log = run.open(wrap(run.store))
    retire(log, [1], reason="")
    report = run.collect(log)
    assert report.collected == [1]
    assert "Uploads that never ended are not looked for" in report.plan.notes[0]


# -- what goes wrong


def test_where_deleting_is_denied_it_is_tried_once_and_what_is_retired_stays_retired():
    run = Run(saves=9)
    log = run.open(Denies(run.store, "delete"))
    report = run.collect(log, keep=Keep(last=2))
    assert (report.is_denied, report.deleted, report.collected) == (True, [], [])
    assert all(isinstance(error, AccessDeniedError) for error in report.failed.values())
    assert run.collect().collected == [1, 2, 3, 4, 5, 6, 7]


def test_what_could_not_be_deleted_is_told_and_tried_again():
    run = Run(saves=4)

    class Flaky(ForwardingStore):
        def delete(self, key):
            if key.endswith("rank-00001.safetensors"):
                raise UnavailableError("503")
            super().delete(key)

    report = run.collect(run.open(Flaky(run.store)), keep=Keep(last=2))
    assert len(report.failed) == 2
    assert (report.collected, len(report.deleted)) == ([], 6)
    assert run.log.refresh().retired.keys() == {1, 2}
    assert run.collect().collected == [1, 2]


def test_a_trainer_deletes_what_is_retired_and_looks_at_nothing_else():
    run = Run(saves=4)
    run.upload("lost")
    claim(run.log, Incarnation.new(job="gpt"))
    retire(run.log, [1], reason="")
    listed = []

    class Listing(ForwardingStore):
        def list(self, prefix, *, after=None):
            listed.append(prefix)
            return super().list(prefix, after=after)

    log = run.open(Listing(run.store))
    listed.clear()
    assert collect_retired(log, now=None, grace_seconds=HOUR).plan.delete == ()
    now = run.store.head("log/000000000006.json").modified
    assert collect_retired(log, now=now, grace_seconds=HOUR).plan.delete == ()
    run.clock.ahead = 2 * HOUR
    assert collect_retired(log, now=now + 2 * HOUR, grace_seconds=HOUR).collected == [1]
    assert run.names == {"step-2", "step-3", "step-4", "lost"}
    assert all(prefix.split("/")[2].startswith("step-1.") for prefix in listed)


# -- the desk


def test_the_desk_retires_plans_and_collects():
    url = f"memory://{id(object())}"
    log, job = RunLog.create(open_store(url)), Incarnation.new(job="gpt")
    for step in range(1, 7):
        simulated.save(log, job, f"step-{step}", step=step)
    store = CheckpointStore.open(url)
    assert store.retire("step-1", store.get("step-2"), reason="old") == [1, 2]
    with pytest.raises(NotFoundError, match="retired"):
        store.retire("step-1@1")
    assert store.plan_retirement(Keep(last=3)) == [3]
    assert store.retire_by(Keep(last=3)) == [3]
    keep = Keep(last=2)
    plan = store.plan_collection(keep=keep, grace_seconds=0)
    report = store.collect(digest=plan.digest, keep=keep, grace_seconds=0)
    assert (plan.retire, report.retired, report.collected) == ((4,), [4], [1, 2, 3, 4])
    assert [each.seq for each in store.checkpoints()] == [6, 5]


def test_where_there_is_no_run_there_is_nothing_to_do():
    store = CheckpointStore.open(f"memory://{id(object())}")
    plan = store.plan_collection(keep=Keep(last=1))
    assert plan.is_empty
    assert store.collect(digest=plan.digest, keep=Keep(last=1)).deleted == []


def test_the_copy_of_a_commit_whose_record_is_gone_vouches_for_no_deletion():
    """A log that was cut out and went on: nobody can say any more that what the copy names was retired."""
    run = Run(saves=4)
    old = run.log.fold.commits[2]
    key = old.commit.stem.committed_key
    body = run.store.get(key, max_bytes=1 << 20)
    retire(run.log, [old.seq], reason="old")
    run.collect()
    run.store.put(key, body)
    assert [each.key for each in run.plan().delete] == [key]
    run.store.delete(slot_key(old.seq))
    assert run.plan().delete == ()
    assert "no record here" in run.plan().waiting[0].why
