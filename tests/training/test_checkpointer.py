"""A run that is asked to stop ends in time, on all ranks at one step, with one last save if there is time for it."""

import itertools
import logging
import os
import shutil
import signal
import threading

import pytest
from odd_stores import Denies, Gated
from stoppable import Tiny
from torch import distributed as dist

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import (
    AccessDeniedError,
    BusyError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ResumeError,
    StalledError,
    UnavailableError,
)
from ckptstore.events import Resumed, Stopping
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.objectstore.wrappers.throttled import ThrottledStore
from ckptstore.testing.simulated import ManualClock
from ckptstore.training import Checkpointer, StoppedBySignal, resume
from ckptstore.training.flow import Flow
from storage_writers import roots

_runs = itertools.count()
STOPS = (signal.SIGUSR1, signal.SIGUSR2)
"""What the tests in this process are stopped by: pytest keeps the others."""


@pytest.fixture
def url():
    """The root of a run in memory that no other test has."""
    return f"memory://checkpointer-{next(_runs)}"


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def stored(monkeypatch):
    """Lets what a checkpointer saves to be wrapped into another store."""

    def wrap(wrapper):
        monkeypatch.setattr(roots, "open_store", lambda *args, **options: wrapper(open_store(*args, **options)))

    return wrap


class Run:
    """A training and its checkpointer, with what its observer heard of its end."""

    def __init__(self, url, **options):
        self.tiny, self.events = Tiny(), []
        self.checkpointer = Checkpointer(
            url, self.tiny.state, **{"stop_signals": STOPS, "observer": self.note, "proof_steps": 0, **options}
        )

    def note(self, event):
        if isinstance(event, Stopping | Resumed):
            self.events.append(event)

    def until(self, step):
        self.tiny.run(self.checkpointer, step)

    def stopped_in(self, work):
        """Do something within the checkpointer that ends in a stop; return its exit code and what was heard of it."""
        with pytest.raises(StoppedBySignal) as stopped, self.checkpointer:
            work()
        self.checkpointer.close()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        return stopped.value.code, self.events[-1]


def steps(url):
    """Return at which steps there are checkpoints, each verified byte by byte."""
    store = CheckpointStore.open(url)
    verdicts = store.verify_kept(level="full")
    assert [verdict for verdict in verdicts if not verdict.ok] == []
    return [each.global_step for each in store.checkpoints()]


def asked(number=signal.SIGUSR1):
    os.kill(os.getpid(), number)


def test_one_last_save_and_the_end(url, caplog):
    run = Run(url, every_steps=3)

    def work():
        run.until(4)
        asked()
        run.until(10)

    code, said = run.stopped_in(work)
    assert code == 128 + signal.SIGUSR1
    assert steps(url) == [5, 3]
    assert said == Stopping("SIGUSR1 on rank 0", 5, CheckpointStore.open(url).latest().seq, saved=True)
    assert [record.getMessage() for record in caplog.records if record.name == "ckptstore.training"] == [
        f"Stopping at step 5, which is saved: SIGUSR1 on rank 0. Newest commit: seq {said.newest_seq}."
    ]
    again = Run(url, every_steps=3)
    with again.checkpointer as checkpointer:
        assert checkpointer.resume().global_step == 5
        again.until(6)
    assert steps(url) == [6, 5, 3]


@pytest.mark.parametrize("background", [True, False])
def test_a_step_that_is_saved_is_not_saved_again(url, background):
    run = Run(url, every_steps=3, background=background)

    def work():
        run.until(3)
        asked()
        run.checkpointer.due()

    assert run.stopped_in(work)[1].saved
    assert steps(url) == [3]


def test_a_run_that_was_resumed_and_took_no_step_has_nothing_to_save(url):
    first = Run(url, every_steps=3)
    with first.checkpointer:
        first.until(3)
    run = Run(url, every_steps=3)

    def work():
        asked()
        run.checkpointer.resume()
        pytest.fail("a run that is asked to stop does not begin")

    code, said = run.stopped_in(work)
    assert code == 128 + signal.SIGUSR1
    assert (said.global_step, said.newest_seq, said.saved) == (3, CheckpointStore.open(url).latest().seq, True)
    assert steps(url) == [3]


def test_a_fresh_run_that_is_stopped_in_its_resume_saves_nothing(url):
    run = Run(url)

    def work():
        asked()
        run.checkpointer.resume()

    said = run.stopped_in(work)[1]
    assert (said.global_step, said.newest_seq, said.saved) == (0, None, False)
    assert steps(url) == []


def slow_by(clock, seconds):
    return lambda store: ThrottledStore(store, seconds_per_request=seconds, clock=clock)


@pytest.mark.parametrize("background", [True, False])
def test_there_is_no_last_save_without_time_for_it(url, clock, stored, background):
    """Of 30 seconds 27 are over when ranks meet, and the save before took longer than what is left."""
    stored(slow_by(clock, 0.2))
    run = Run(url, every_steps=3, background=background, clock=clock)

    def work():
        run.until(3)
        run.checkpointer.wait()
        asked()
        clock.sleep(27)
        run.until(10)

    code, said = run.stopped_in(work)
    assert (code, said.global_step, said.saved) == (128 + signal.SIGUSR1, 4, False)
    assert steps(url) == [3]


def test_there_is_one_with_time_for_it(url, clock, stored):
    stored(slow_by(clock, 0.2))
    run = Run(url, every_steps=3, clock=clock)

    def work():
        run.until(3)
        run.checkpointer.wait()
        asked()
        clock.sleep(5)
        run.until(10)

    assert run.stopped_in(work)[1].saved
    assert steps(url) == [4, 3]


def test_a_loop_that_never_saves_ends_when_the_time_is_over(url, clock):
    run = Run(url, every_steps=100, clock=clock)
    due = []

    def work():
        asked()
        while True:
            clock.sleep(10)
            due.append(run.checkpointer.due())

    assert run.stopped_in(work)[1].saved is False
    assert due == [True, True]


def test_between_micro_steps_a_last_save_is_put_off_for_half_of_the_time(url, clock):
    def micro_steps(run, count):
        for _ in range(count):
            run.tiny.progress.micro_step += 1
            if run.checkpointer.due():
                run.checkpointer.save()
            clock.sleep(4)

    run = Run(url, clock=clock)

    def work():
        asked()
        micro_steps(run, 2)
        run.tiny.progress.micro_step = 0
        run.until(2)

    assert run.stopped_in(work)[1].saved
    assert [each.checkpoint_id for each in CheckpointStore.open(url).checkpoints()] == ["step-1"]

    run = Run(url, clock=clock)

    def longer():
        asked()
        micro_steps(run, 6)

    assert run.stopped_in(longer)[1].saved
    assert CheckpointStore.open(url).latest().checkpoint_id == "step-0.micro-5"  # 16 of 28 s were over


@pytest.mark.parametrize("background", [True, False])
def test_a_training_that_never_asks_what_is_due_ends_in_its_next_save(url, background):
    run = Run(url, background=background)

    def work():
        run.tiny.step()
        run.checkpointer.save()
        asked()
        run.tiny.step()
        run.checkpointer.save(metrics={"loss": 1.0})
        pytest.fail("it is saved, and ends")

    assert run.stopped_in(work)[1].saved
    assert steps(url) == [2, 1]
    assert CheckpointStore.open(url).latest().metrics == {"loss": 1.0}


def when_saving(number, *, at):
    """Return a wrapper of a store in which a signal comes when the next attempt's first upload begins."""

    class Asking(ForwardingStore):
        def open_upload(self, key, *, size):
            if at in key:
                os.kill(os.getpid(), number)
            return super().open_upload(key, size=size)

    return Asking


@pytest.mark.parametrize("background", [True, False])
def test_a_signal_in_the_middle_of_a_save_ends_the_run_with_that_save(url, stored, background):
    stored(when_saving(signal.SIGUSR2, at="step-3"))
    run = Run(url, every_steps=3, background=background)
    code, said = run.stopped_in(lambda: run.until(20))
    assert code == 128 + signal.SIGUSR2
    assert said.saved
    assert steps(url)[0] == said.global_step
    assert steps(url)[-1] == 3


def test_a_last_save_waits_for_the_save_in_flight(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url, every_steps=3)

    def work():
        run.until(3)
        assert store.begun.wait(30)
        asked()
        threading.Timer(0.3, store.gate.set).start()
        run.until(10)

    assert run.stopped_in(work)[1].saved
    assert steps(url) == [4, 3]


def test_a_save_in_flight_that_does_not_end_in_time_is_given_up(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url, every_steps=3, stop_seconds=4)

    def work():
        run.until(3)
        assert store.begun.wait(30)
        asked()
        run.until(10)

    code, said = run.stopped_in(work)
    assert (code, said.global_step, said.newest_seq, said.saved) == (128 + signal.SIGUSR1, 4, None, False)
    store.gate.set()
    run.checkpointer.writer.wait()


def down_at(name):
    """Return a store that takes no shard of this checkpoint."""

    class Down(ForwardingStore):
        def open_upload(self, key, *, size):
            if name in key:
                raise UnavailableError("The store is down.")
            return super().open_upload(key, size=size)

    return Down


def test_a_last_save_that_fails_ends_the_run_all_the_same(url, stored, caplog):
    stored(down_at("step-4"))
    run = Run(url, every_steps=3)

    def work():
        run.until(3)
        asked()
        run.until(10)

    code, said = run.stopped_in(work)
    assert (code, said.global_step, said.saved) == (128 + signal.SIGUSR1, 4, False)
    assert "The store is down." in caplog.text
    assert steps(url) == [3]


def test_a_save_before_that_failed_does_not_keep_the_last_one_from_being_made(url, stored, caplog):
    stored(down_at("step-3"))
    run = Run(url, every_steps=3)

    def work():
        run.until(3)
        asked()
        run.until(10)

    said = run.stopped_in(work)[1]
    assert (said.global_step, said.saved) == (4, True)
    assert "The store is down." in caplog.text
    assert steps(url) == [4]


def test_the_loop_knows_that_there_is_little_time(url):
    run = Run(url)
    said = []

    def work():
        said.append(run.checkpointer.is_stopping)
        asked()
        run.tiny.step()
        assert run.checkpointer.due()
        said.append(run.checkpointer.is_stopping)
        run.checkpointer.save()

    run.stopped_in(work)
    assert said == [False, True]


def test_ranks_that_wait_for_a_save_hear_of_signals(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url)

    def work():
        run.tiny.step()
        run.checkpointer.save()
        threading.Timer(0.3, asked).start()
        threading.Timer(1, store.gate.set).start()
        run.tiny.step()
        run.checkpointer.save()  # waits for the one before
        pytest.fail("it is saved, and ends")

    assert run.stopped_in(work)[1].saved
    assert steps(url) == [2, 1]


@pytest.mark.parametrize("work", ["wait", "close"])
def test_who_waits_for_a_save_that_does_not_end_in_time_ends(url, monkeypatch, work):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url, stop_seconds=1)

    def wait():
        run.tiny.step()
        run.checkpointer.save()
        threading.Timer(0.3, asked).start()
        getattr(run.checkpointer, work)()

    code, said = run.stopped_in(wait)
    assert (code, said.saved) == (128 + signal.SIGUSR1, False)
    store.gate.set()
    run.checkpointer.writer.wait()
    assert steps(url) == [1]  # it was not given up for good: the process had not ended yet


def test_a_signal_after_the_loop_ends_the_run_when_the_save_in_flight_has_ended(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url)

    def work():
        run.tiny.step()
        run.checkpointer.save()
        threading.Timer(0.3, asked).start()
        threading.Timer(1, store.gate.set).start()

    code, said = run.stopped_in(work)
    assert (code, said.global_step, said.saved) == (128 + signal.SIGUSR1, 1, True)
    assert steps(url) == [1]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError("a loss of nan")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("was_asked", [False, True])
def test_what_is_raised_in_the_loop_is_not_masked_and_leaves_the_last_commit_good(url, raised, was_asked, caplog):
    run = Run(url, every_steps=3)
    kind = raised if isinstance(raised, type) else type(raised)

    def work():
        run.until(4)
        run.checkpointer.wait()
        if was_asked:
            asked()
        raise raised

    with pytest.raises(kind), run.checkpointer:
        work()
    seq = CheckpointStore.open(url).latest().seq
    assert run.events == [Stopping(f"{kind.__name__} on rank 0", 4, seq, saved=False)]
    assert f"Stopping at step 4, which is not saved: {kind.__name__} on rank 0." in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    again = Run(url, every_steps=3)  # the same process may go on
    with again.checkpointer as checkpointer:
        assert checkpointer.resume().global_step == 3
        again.until(6)
    assert steps(url) == [6, 3]


def test_an_interrupt_in_a_save_leaves_the_last_commit_good(url, stored):
    class Interrupted(ForwardingStore):
        def open_upload(self, key, *, size):
            if "step-6" in key:
                raise KeyboardInterrupt
            return super().open_upload(key, size=size)

    stored(Interrupted)
    run = Run(url, every_steps=3, background=False)
    with pytest.raises(KeyboardInterrupt), run.checkpointer:
        run.until(10)
    assert steps(url) == [3]
    assert run.events[-1].reason == "KeyboardInterrupt on rank 0"


def test_a_save_is_skipped_while_another_is_in_flight_and_counts_as_none(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url, when_busy="skip", every_steps=2)

    def work():
        run.until(2)
        assert store.begun.wait(30)
        run.until(4)
        assert not run.checkpointer.due()  # not twice at one step
        asked()
        store.gate.set()
        assert run.checkpointer.due()  # this step is not saved
        run.checkpointer.save()

    assert run.stopped_in(work)[1].saved
    assert steps(url) == [4, 2]


def test_a_save_is_refused_while_another_is_in_flight(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url, when_busy="raise")
    with run.checkpointer as checkpointer:
        run.tiny.step()
        checkpointer.save()
        assert store.begun.wait(30)
        run.tiny.step()
        with pytest.raises(BusyError):
            checkpointer.save()
        store.gate.set()
        checkpointer.wait()
        checkpointer.save()
    assert steps(url) == [2, 1]


def test_a_save_waits_for_the_one_before_no_longer_than_it_is_told_to(url, monkeypatch):
    store = Gated(open_store(url))
    monkeypatch.setattr(roots, "open_store", lambda *_, **__: store)
    run = Run(url, busy_timeout_seconds=0.5)
    run.tiny.step()
    run.checkpointer.save()
    with pytest.raises(StalledError, match=r"within 0\.5 s"):
        run.checkpointer.save()
    store.gate.set()
    run.checkpointer.close()
    assert steps(url) == [1]


def test_a_background_save_that_failed_is_told_by_the_next_call(url, stored):
    stored(lambda store: Denies(store, "multipart"))
    run = Run(url)
    run.checkpointer.save()
    with pytest.raises(AccessDeniedError, match="multipart"):
        run.checkpointer.wait()
    run.checkpointer.close()


def test_a_step_whose_save_failed_is_saved_again_when_the_run_is_stopped(url, stored):
    refusing = []

    class Unsteady(Denies):
        def _refuse(self, call):
            if refusing:
                super()._refuse(call)

    stored(lambda store: Unsteady(store, "multipart"))
    run = Run(url, every_steps=3)

    def work():
        run.until(2)
        refusing.append(True)
        run.until(3)
        run.checkpointer._saving.outstanding.wait(30)  # which tells nobody
        refusing.clear()
        asked()
        assert run.checkpointer.due()
        run.checkpointer.save()

    said = run.stopped_in(work)[1]
    assert (said.global_step, said.saved) == (3, True)
    assert steps(url) == [3]


@pytest.mark.parametrize("ended", [True, False], ids=["after the save", "during the save"])
def test_an_exception_leaves_no_memory_in_which_states_were_staged(url, stored, ended):
    gated = Gated(open_store(url))
    stored(lambda _: gated)
    run = Run(url)
    future = run.checkpointer.save()
    arena = run.checkpointer.writer._session._pool._arena
    if ended:
        gated.gate.set()
        future.result(30)
    assert arena.nbytes > 0
    with pytest.raises(ZeroDivisionError), run.checkpointer:
        raise ZeroDivisionError
    assert (arena.nbytes == 0) is ended
    gated.gate.set()
    future.result(30)
    assert arena.nbytes == 0
    run.checkpointer.close()
    assert steps(url) == [0]


def test_a_closed_checkpointer_may_be_closed_again(url):
    run = Run(url)
    with run.checkpointer as checkpointer:
        checkpointer.save()
    checkpointer.close()
    assert steps(url) == [0]


def test_a_part_is_taken_from_another_run_only(url):
    with pytest.raises(InvalidInputError, match="only="):
        Run(url).checkpointer.resume(only=("model",))


def run_and_be_asked(root, by, background):
    """Train; rank `by` (None: every rank) gets a signal, each at its own step. Return how it ended here."""
    rank = dist.get_rank()
    run = Run(root, every_steps=3, background=background, stop_seconds=120)  # it may be busy here
    said = logging.getLogger("ckptstore.training")
    said.disabled = True
    try:
        with run.checkpointer as checkpointer:
            checkpointer.resume()
            while True:
                run.tiny.step()
                if run.tiny.progress.global_step == 4 + rank and by in (None, rank):
                    asked()
                if checkpointer.due():
                    checkpointer.save()
    except StoppedBySignal as stopped:
        checkpointer.close()
        return stopped.code, run.events[-1]
    finally:
        said.disabled = False  # the process goes on with another test


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("by", "step"), [(0, 4), (1, 5), (None, 4)], ids=["rank 0", "rank 1", "all"])
def test_all_ranks_stop_at_one_step_whoever_was_asked(gang, tmp_path, by, step, background):
    ended = gang.values(2, run_and_be_asked, str(tmp_path), by, background, seconds=200)
    for code, said in ended:
        assert code == 128 + signal.SIGUSR1
        assert (said.reason, said.global_step, said.saved) == (f"SIGUSR1 on rank {by or 0}", step, True)
    assert ended[0][1].newest_seq == CheckpointStore.open(tmp_path).latest().seq
    assert steps(tmp_path) == [step, 3]


def save_apart(root, background):
    """Save on rank 1 of a half, and on each rank of the other half alone; return the steps that it resumes from."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    mine = {"process_group": pair} if rank < 2 else {"allow_one_rank": True}
    place = root if rank < 2 else f"{root}/{rank}"
    resumed = []
    for _ in range(2):
        run = Run(place, every_steps=2, background=background, **mine)
        with run.checkpointer as checkpointer:
            resumed.append(checkpointer.resume().global_step)
            run.until(3 + (rank == 2))  # who is alone is in nobody's step
    return resumed, run.tiny.progress.global_step


@pytest.mark.parametrize("background", [True, False])
def test_some_ranks_of_a_job_may_be_a_run_and_one_may_be_alone(gang, tmp_path, background):
    ended = gang.values(3, save_apart, str(tmp_path), background)
    assert ended == [([None, 2], 3), ([None, 2], 3), ([None, 4], 4)]
    assert (steps(tmp_path), steps(tmp_path / "2")) == ([2], [4, 2])


def saved_by_another_start(url):
    """Save step 1 as one start of the job; what comes then is another's."""
    first = Run(url)
    with first.checkpointer as checkpointer:
        first.tiny.step()
        checkpointer.save()
    sw.begin_incarnation(url)


def test_what_is_saved_without_a_resume_is_above_no_checkpoint_of_another_start(url):
    saved_by_another_start(url)
    again = Run(url)
    again.tiny.step()
    with again.checkpointer as checkpointer, pytest.raises(ResumeError, match="has resumed none") as refused:
        checkpointer.save()
    assert "Call resume() before the first step" in refused.value.hint
    assert steps(url) == [1]
    with Run(url).checkpointer as checkpointer:
        with pytest.raises(NotFoundError):
            checkpointer.resume(checkpoint_id="nothing")  # which claims the run, or not: it has resumed nothing
        with pytest.raises(ResumeError, match="has resumed none"):
            checkpointer.save()
    with Run(url).checkpointer as checkpointer:
        checkpointer.resume()
        checkpointer.save(checkpoint_id="again")
    again = Run(url)  # a second part of this very start, whose state is in memory
    with again.checkpointer as checkpointer:
        again.tiny.step()
        checkpointer.save(checkpoint_id="and again")
    assert len(steps(url)) == 3


def test_what_was_loaded_by_a_resume_of_one_s_own_is_gone_on_from(url):
    saved_by_another_start(url)
    own = Run(url)
    assert resume(own.tiny.state, url).global_step == 1
    with own.checkpointer as checkpointer:
        own.tiny.step()
        checkpointer.save()
    assert steps(url) == [2, 1]


def test_a_resume_that_failed_opens_no_way_to_save_above_what_it_refused(url):
    saved_by_another_start(url)
    store = CheckpointStore.open(url)
    store.set_aside(store.latest(), reason="quarantined", note="")
    with Run(url).checkpointer as checkpointer:
        with pytest.raises(ResumeError, match="none may be selected"):
            checkpointer.resume()
        with pytest.raises(ResumeError, match="has resumed none"):
            checkpointer.save()


def lose_the_log(root, left=()):
    """Delete all of a run but its data, and what is named."""
    shutil.rmtree(root / "log")
    for name in {"run.json", "latest.json"} - {*left}:
        (root / name).unlink()


@pytest.mark.parametrize("left", [("run.json", "latest.json"), ("run.json",), ("latest.json",), ()], ids="+".join)
def test_where_the_log_was_lost_nothing_is_begun_that_would_hinder_to_make_it_again(tmp_path, left):
    saved_by_another_start(tmp_path)
    lose_the_log(tmp_path, left)
    before = sorted(tmp_path.rglob("*"))
    with Run(tmp_path).checkpointer as checkpointer:
        for call in (checkpointer.resume, checkpointer.save):
            with pytest.raises(IntegrityError, match="was lost") as lost:
                call()
            assert "--rebuild-log" in lost.value.hint
    assert sorted(tmp_path.rglob("*")) == before
    repair = CheckpointStore.open(tmp_path).repair()
    repair.rebuild_log(repair.rebuilding())
    assert steps(tmp_path) == [1]


def test_a_lost_log_is_no_fresh_start_of_a_resume_that_writes_nothing_nor_of_a_run_that_begins_from_another(tmp_path):
    lost, own = tmp_path / "lost", tmp_path / "own"
    saved_by_another_start(lost)
    lose_the_log(lost)
    with pytest.raises(IntegrityError, match="the log was lost"):
        resume(Run(own).tiny.state, lost)
    with Run(own).checkpointer as checkpointer, pytest.raises(IntegrityError, match="the log was lost"):
        checkpointer.resume(source=lost)


@pytest.mark.parametrize("phase", ["_verify", "_gate", "_load"])
def test_what_is_retired_and_deleted_while_it_is_resumed_is_not_called_damaged(tmp_path, monkeypatch, phase):
    first = Run(tmp_path)
    with first.checkpointer as checkpointer:
        for _ in range(3):
            first.tiny.step()
            checkpointer.save()
    real = getattr(Flow, phase)

    def retired_before(flow, *given):
        store = CheckpointStore.open(tmp_path)
        store.retire(flow.checkpoint, reason="It is old.")
        for lane in (tmp_path / "data").glob(f"*/{flow.checkpoint.commit.stem}"):
            shutil.rmtree(lane)
        return real(flow, *given)

    monkeypatch.setattr(Flow, phase, retired_before)
    with pytest.raises(ConflictError, match=r"step-1@\d+ was retired"):
        resume(Run(tmp_path).tiny.state, tmp_path, step=1)
