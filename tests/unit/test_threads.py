"""A thread's work is done, or withdrawn, whatever interrupted its start."""

import threading
import time

import pytest
from interrupted import WHENS, interrupt_start

from ckptstore.telemetry.textfile import TextFile
from ckptstore.threads import OwnedThread
from ckptstore.training.ending import Ending
from ckptstore.training.stopping import Grace, Stop


@pytest.mark.parametrize("when", WHENS)
def test_work_that_is_withdrawn_is_not_done_and_any_other_is_waited_for(monkeypatch, when):
    begun, go, done = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        assert go.wait(20)
        done.append(True)

    thread = OwnedThread(work, "worker")
    interrupt_start(monkeypatch, "worker", when, until=begun)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    assert thread.withdraw() == (when != "running")
    go.set()
    time.sleep(0.3 if when == "late" else 0)
    if when != "before":
        thread.join(20)
    assert done == [True] * (when == "running")


def test_work_that_is_not_withdrawn_is_done_once_and_not_held():
    thread = OwnedThread(lambda: None, "worker")
    thread.start()
    thread.join(20)
    assert not thread.withdraw()
    assert thread.daemon


class Left:
    """A clock that stands still."""

    def monotonic(self):
        return 0.0


@pytest.mark.parametrize("when", ["before", "running"])
def test_a_time_limit_whose_start_was_interrupted_does_not_end_the_process_later(monkeypatch, when):
    ended = []
    grace = Grace(Stop(15, 0, 0.2), whole=0.2, clock=Left())
    monkeypatch.setattr(grace, "leave", ended.append)
    start, started = threading.Timer.start, []

    def starting(timer):
        started.append(timer)
        if when == "running":
            start(timer)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", starting)
    with pytest.raises(KeyboardInterrupt), grace.kept(lambda: None):
        raise AssertionError("not reached")
    monkeypatch.undo()
    time.sleep(0.5)
    assert started[0].finished.is_set()
    assert ended == []


@pytest.mark.parametrize("when", WHENS)
def test_a_watch_whose_start_was_interrupted_does_not_go_on(monkeypatch, when):
    dones = []

    class Watched:
        def _watch(self, done):
            dones.append(done)

    interrupted = interrupt_start(monkeypatch, "ckptstore-stop", when)
    with pytest.raises(KeyboardInterrupt), Ending.watched(Watched()):
        raise AssertionError("not reached")
    time.sleep(0.3 if when == "late" else 0.05)
    assert len(interrupted) == 1
    assert [done.is_set() for done in dones] == [True] * (when != "before")


def test_a_file_of_metrics_whose_start_was_interrupted_is_not_written_any_longer(monkeypatch, tmp_path):
    written = []

    def render():
        written.append(True)
        return b"x"

    interrupted = interrupt_start(monkeypatch, "ckptstore-metrics", "running")
    with pytest.raises(KeyboardInterrupt):
        TextFile(tmp_path / "a.prom", render, every_seconds=0.05)
    interrupted[0].join(20)
    assert not interrupted[0].is_alive()
    assert len(written) <= 2
