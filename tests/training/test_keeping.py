"""What a job lets go of while it trains, and what it holds until it has committed."""

import itertools
import logging
import multiprocessing
import re
import threading
import time
from concurrent.futures import Future

import pytest
from hanging import HangsInDelete, train_where_deletions_hang
from interrupted import WHENS, interrupt_start
from odd_stores import Denies
from ranks import PRELOADED
from stoppable import Tiny

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import FencedError, InvalidInputError, UnavailableError
from ckptstore.events import Deleted, Retired
from ckptstore.maintenance import retention
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.training import Checkpointer, Keep, KeepFailed, keeping, save
from ckptstore.training import asked as asking
from ckptstore.training.holding import Holding

_runs = itertools.count()


@pytest.fixture
def url():
    return f"memory://keeping-{next(_runs)}"


def steps(url):
    return [each.global_step for each in CheckpointStore.open(url).checkpoints()]


def pins(url):
    found = CheckpointStore.open(url).checkpoints(include_set_aside=True)
    return {
        each.global_step: [uncounted(pin.holder) for pin in each.committed.pins]
        for each in found
        if each.committed.pins
    }


def uncounted(holder):
    return re.sub(r"^(resume [0-9a-f]{32}) \d+", r"\1 n", holder)


def held(url, *, of=None):
    """Return as who the newest start of a job holds what it goes on from; counts are left out."""
    claim = CheckpointStore.open(url).reign
    return f"resume {claim.incarnation} n" + (f" of {of}" if of else "")


def names(url):
    return {info.key.split("/")[2].split(".t0")[0] for info in open_store(url).list("data/")}


def kinds(url):
    return [entry.record.KIND for entry in CheckpointStore.open(url).records()]


def trained(url, saves, *, resumes=False, source=None, **options):
    """Train and save, as one start of a job does; return what was told."""
    events = []
    sw.begin_incarnation(url)
    tiny = Tiny()
    options = {"proof_steps": 0, "background": False, **options}
    with Checkpointer(url, tiny.state, observer=events.append, **options) as checkpointer:
        if resumes:
            checkpointer.resume(source=source)
        for loss in saves:
            tiny.step()
            checkpointer.save(metrics={"loss": loss})
    return events


def saved_anew(url, saves):
    """Save as a job that owns its loop and resumed nothing."""
    sw.begin_incarnation(url)
    tiny = Tiny()
    with sw.CkptStoreWriter(url) as writer:
        for _ in range(saves):
            tiny.step()
            save(tiny.state, writer)


def test_it_is_the_keep_of_collections():
    assert Keep is retention.Keep


@pytest.mark.parametrize("background", [False, True])
def test_after_each_commit_the_rest_is_retired_and_deleted_at_the_end_too(url, background):
    keep = Keep(last=2, best=("loss", "min", 1))
    events = trained(url, [3.0, 1.0, 2.0, 5.0, 4.0, 6.0], keep=keep, keep_grace_seconds=0, background=background)
    assert steps(url) == [6, 5, 2]
    assert names(url) == {"step-2", "step-5", "step-6"}
    retired = [event for event in events if isinstance(event, Retired)]
    assert sorted(seq for event in retired for seq in event.seqs) == sorted(
        seq
        for entry in CheckpointStore.open(url).records()
        if entry.record.KIND == "RETIRE"
        for seq in entry.record.seqs
    )
    assert {event.reason for event in retired} == {"keep last 2, best loss min 1"}
    assert any(isinstance(event, Deleted) for event in events)
    assert {entry.record.term for entry in CheckpointStore.open(url).records() if entry.record.KIND == "RETIRE"} == {1}


def test_what_is_retired_stays_for_an_hour_unless_it_is_asked_otherwise(url):
    trained(url, [1.0] * 5, keep=Keep(last=2))
    assert steps(url) == [5, 4]
    assert names(url) == {f"step-{step}" for step in range(1, 6)}
    trained(url, [1.0], resumes=True, keep=Keep(last=2), keep_grace_seconds=0)
    assert names(url) == {"step-6", "step-5"}


def test_without_a_policy_nothing_is_let_go_of(url):
    trained(url, [1.0] * 4)
    assert kinds(url) == ["CLAIM"] + ["COMMIT"] * 4


def test_a_grace_is_a_length_of_time(url):
    with pytest.raises(InvalidInputError, match="grace"):
        Checkpointer(url, Tiny().state, keep_grace_seconds=-1)


def test_a_fenced_job_lets_go_of_nothing_and_says_so_once(url, caplog):  # I3
    tiny, events = Tiny(), []
    with Checkpointer(
        url, tiny.state, keep=Keep(last=2), observer=events.append, background=False, proof_steps=0
    ) as checkpointer:
        for _ in range(2):
            tiny.step()
            checkpointer.save()
        checkpointer._keeping.end()
        claim(RunLog.create(open_store(url)), Incarnation.new(job="other"))
        for _ in range(2):
            checkpointer._keeping._begun = -1
            checkpointer._keeping.saved(None, seq=2)
            checkpointer._keeping.end()
        tiny.step()
        with pytest.raises(FencedError):
            checkpointer.save()
    assert steps(url) == [2, 1]
    assert len([event for event in events if isinstance(event, KeepFailed)]) == 1


def test_where_the_job_may_not_delete_it_says_once_who_is_to_do_it(url, monkeypatch, caplog):
    def limited(url, **named):
        return Denies(open_store(url), "delete")

    monkeypatch.setattr(asking, "open_root", limited)
    with caplog.at_level(logging.WARNING, "ckptstore.training"):
        events = trained(url, [1.0] * 6, keep=Keep(last=2), keep_grace_seconds=0)
    assert steps(url) == [6, 5]  # retired is retired
    assert names(url) == {f"step-{step}" for step in range(1, 7)}
    said = [event.reason for event in events if isinstance(event, KeepFailed)]
    assert len(said) == 1
    assert "ckptstore gc" in said[0]
    assert len([record for record in caplog.records if "ckptstore gc" in record.message]) == 1


def test_a_store_that_hangs_holds_up_neither_the_training_nor_its_end(url, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(keeping, "LAST_SECONDS", 0.1)

    def slow(*given, **named):
        gate.wait(30)
        return open_store(given[0])

    monkeypatch.setattr(asking, "open_root", slow)
    events = trained(url, [1.0] * 6, keep=Keep(last=2))
    assert steps(url) == [6, 5, 4, 3, 2, 1]
    assert [event.reason for event in events if isinstance(event, KeepFailed)] == [
        "what is retired was not deleted in time; a collection by `ckptstore gc URL` goes on"
    ]
    thread = next(each for each in threading.enumerate() if each.name == "ckptstore-keep")
    gate.set()
    thread.join(30)
    assert steps(url) == [6, 5]


def test_whatever_is_raised_is_told_and_the_training_goes_on(url, monkeypatch):
    def broken(*given, **named):
        raise RuntimeError("no")

    monkeypatch.setattr(keeping, "retire_by", broken)
    events = trained(url, [1.0] * 3, keep=Keep(last=2))
    assert {event.reason for event in events if isinstance(event, KeepFailed)} == {"RuntimeError"}
    assert steps(url) == [3, 2, 1]


# -- what it goes on from


def test_what_was_resumed_is_pinned_until_the_job_has_committed(url):  # I14
    trained(url, [1.0] * 3)
    trained(url, [], resumes=True)
    assert pins(url) == {3: [held(url)]}
    saved_anew(url, 2)
    assert CheckpointStore.open(url).retire_by(Keep(last=2)) == [1, 2]
    assert steps(url) == [2, 1, 3]
    trained(url, [1.0], resumes=True)
    assert pins(url) == {}
    assert CheckpointStore.open(url).retire_by(Keep(last=2)) == [3, 7]
    assert steps(url) == [3, 2]


def test_what_dead_jobs_hold_goes_with_the_next_one_s_first_commit(url):
    trained(url, [1.0] * 3)
    trained(url, [], resumes=True)
    saved_anew(url, 2)
    trained(url, [], resumes=True)
    assert [len(each) for each in pins(url).values()] == [1, 1]
    stranger = f"resume {'0' * 32} 1"  # of an incarnation that never claimed: nobody knows that it is dead
    CheckpointStore.open(url).pin("step-1", holder=stranger)
    trained(url, [1.0], resumes=True)
    assert pins(url) == {1: [uncounted(stranger)]}


def test_what_a_dead_job_holds_of_another_run_goes_with_the_next_one_s_first_commit(url):
    source = f"{url}-source"
    trained(source, [1.0] * 3)
    trained(source, [], resumes=True)  # the other run's own, which goes on
    own = pins(source)[3]
    trained(url, [], resumes=True, source=source)
    trained(f"{url}-2", [], resumes=True, source=source)
    assert len(pins(source)[3]) == 3
    trained(url, [1.0], resumes=True, source=source)
    assert sorted(pins(source)[3]) == sorted([*own, held(f"{url}-2", of=f"{url}-2")])


def test_a_job_lets_go_of_nothing_but_its_own_pin(url):
    trained(url, [1.0] * 3)
    store = CheckpointStore.open(url)
    one, other = (Holding(asking.Asked(url), pytest.fail) for _ in range(2))
    one.hold(asking.Asked(url), store, store.latest(), incarnation="1" * 32)
    other.hold(asking.Asked(url), store, store.latest(), incarnation="2" * 32)
    one.held[0].is_due = True
    one.release()
    assert pins(url) == {3: [uncounted(each.holder) for each in other.held]}
    assert one.held == ()


def test_a_commit_lets_go_of_nothing_that_was_pinned_after_its_save_began(url):
    trained(url, [1.0] * 3)
    with Checkpointer(url, Tiny().state, proof_steps=0) as checkpointer:
        checkpointer.resume()
        save = Future()
        save.seq = CheckpointStore.open(url).latest().seq
        checkpointer._keeping.saved(save, seq=None)
        checkpointer.resume()
        (second,) = CheckpointStore.open(url).latest().committed.pins
        save.set_result(None)
        checkpointer._keeping.end()
        assert CheckpointStore.open(url).latest().committed.pins == (second,)


def test_what_cannot_be_let_go_of_is_tried_again_at_the_next_commit_and_told_once(url, monkeypatch):
    trained(url, [1.0] * 3)
    real, refusals = CheckpointStore.unpin, iter([True, True, False])

    def unpin(self, *given, **named):
        if next(refusals):
            raise UnavailableError("not now")
        return real(self, *given, **named)

    monkeypatch.setattr(CheckpointStore, "unpin", unpin)
    tiny, events = Tiny(), []
    with Checkpointer(url, tiny.state, observer=events.append, background=False, proof_steps=0) as checkpointer:
        checkpointer.resume()
        for left in (1, 1, 0):
            tiny.step()
            checkpointer.save()
            checkpointer._keeping.end()
            assert len(pins(url)) == left
    assert len([event for event in events if isinstance(event, KeepFailed)]) == 1


def test_a_new_incarnation_of_this_very_process_ends_nothing(url):  # I15
    tiny, events = Tiny(), []
    options = {"keep": Keep(last=3), "observer": events.append, "background": False, "proof_steps": 0}
    with Checkpointer(url, tiny.state, **options) as checkpointer:
        for _ in range(3):
            tiny.step()
            checkpointer.save()
        checkpointer._keeping.end()
        checkpointer.resume(step=3)  # a new incarnation
        tiny.step()
        checkpointer.save()
        checkpointer._keeping.end()
        checkpointer._keeping._begun = -1
        checkpointer._keeping.saved(None, seq=3)  # of the term before, as a thread that comes late sees it
        checkpointer._keeping.end()
        for _ in range(3):
            tiny.step()
            checkpointer.save()
    assert steps(url) == [7, 6, 5]
    assert pins(url) == {}
    assert [event for event in events if isinstance(event, KeepFailed)] == []


def test_a_store_whose_deletions_hang_does_not_hold_up_the_end_of_the_process(tmp_path):
    root = str(tmp_path / "run")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=train_where_deletions_hang, args=(root,), daemon=True)
    process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    process.join(10)
    assert not hangs
    assert process.exitcode == 0
    assert steps(root)[:2] == [4, 3]
    assert "step-1" in names(root)  # it hangs in the deletion of the first


def test_nothing_more_is_deleted_once_the_job_has_ended(url, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(keeping, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(asking, "open_root", lambda url, **_: HangsInDelete(open_store(url), hangs))
    trained(url, [1.0] * 4, keep=Keep(last=2), keep_grace_seconds=0)
    thread = next(each for each in threading.enumerate() if each.name == "ckptstore-keep")
    before = len(list(open_store(url).list("data/")))
    hangs.set()
    thread.join(30)
    assert len(list(open_store(url).list("data/"))) == before - 1  # the one that was on its way


@pytest.mark.parametrize(
    ("saves", "metrics", "told"),
    [(3, {"loss": 1.0}, ["there are the metrics 'loss'"]), (12, None, ["there are no metrics"]), (3, None, [])],
    ids=["misspelt", "never measured", "not measured yet"],
)
def test_a_metric_that_no_checkpoint_has_is_told_once_and_keeps_them_all(url, caplog, saves, metrics, told):
    tiny, keep = Tiny(), Keep(best=("los", "min", 1))
    with Checkpointer(url, tiny.state, keep=keep, background=False, proof_steps=0) as checkpointer:
        for _ in range(saves):
            tiny.step()
            checkpointer.save(metrics=metrics)
    assert len(steps(url)) == saves
    said = [each.message for each in caplog.records if "'los'" in each.message]
    assert said == [f"Of what to keep: No checkpoint has a finite metric 'los'; {each}." for each in told]


def test_another_s_pins_stay(url):
    trained(url, [1.0] * 3)
    CheckpointStore.open(url).pin("step-3", holder="eval")
    trained(url, [1.0], resumes=True)
    assert pins(url) == {3: ["eval"]}


def test_what_another_run_begins_from_is_pinned_there_until_it_has_committed(url):
    source = f"{url}-source"
    trained(source, [1.0] * 3)
    trained(url, [], resumes=True, source=source)
    assert pins(source) == {3: [held(url, of=url)]}
    saved_anew(source, 2)
    CheckpointStore.open(source).retire_by(Keep(last=1))
    assert steps(source) == [2, 1, 3]
    before = {info.key for info in open_store(source).list("data/")}
    trained(url, [1.0] * 4, resumes=True, source=source, keep=Keep(last=2), keep_grace_seconds=0)
    assert pins(source) == {}
    assert {info.key for info in open_store(source).list("data/")} == before  # another run's data are never touched


def test_a_source_that_may_only_be_read_is_begun_from_and_it_is_told_that_nothing_holds_it(url, monkeypatch):
    source = f"{url}-source"
    trained(source, [1.0] * 3)
    real = CheckpointStore.pin

    def pin(self, *given, **named):
        if self.url == source:
            self._log.store = Denies(self._log.store, "create")
        return real(self, *given, **named)

    monkeypatch.setattr(CheckpointStore, "pin", pin)
    events = trained(url, [1.0], resumes=True, source=source)
    (told,) = [event.reason for event in events if isinstance(event, KeepFailed)]
    assert "could not be pinned" in told
    assert "Pin it there with credentials" in told
    assert "step-3@3" in told
    assert steps(url) == [4]


def test_what_is_retired_before_it_is_pinned_is_told_without_advice_on_credentials(url):
    source = f"{url}-source"
    trained(source, [1.0] * 3)
    store, told = CheckpointStore.open(source), []
    old = store.get(step=1)
    store.retire(old, reason="It is old.")
    Holding(asking.Asked(url), told.append).hold(asking.Asked(source), store, old, incarnation="0" * 32)
    assert "step-1@1 is retired" in told[0]
    assert "credentials" not in told[0]


def test_a_promise_of_a_single_writer_holds_for_what_is_let_go_of_too(tmp_path):
    root = str(tmp_path / "run")
    options = {"engine": "fsspec", "log": LogOptions(assume_single_writer=True)}
    events = trained(root, [1.0] * 4, keep=Keep(last=2), keep_grace_seconds=0, **options)
    events += trained(root, [1.0], resumes=True, keep=Keep(last=2), keep_grace_seconds=0, **options)
    assert [event for event in events if isinstance(event, KeepFailed)] == []
    assert steps(root) == [5, 4]
    assert asking.Asked(root).log is None


@pytest.mark.parametrize("when", WHENS)
def test_after_a_commit_whose_keeping_was_interrupted_the_next_one_keeps(url, monkeypatch, when):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, keep=Keep(last=1), background=False, proof_steps=0) as checkpointer:
        interrupted = interrupt_start(monkeypatch, "ckptstore-keep", when)
        tiny.step()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save()
        time.sleep(0.3)
        for _ in range(3):
            tiny.step()
            checkpointer.save()
    assert interrupted
    assert steps(url) == [4, 3]
