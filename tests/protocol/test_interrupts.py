"""From the first send to the decision no interrupt leaves a commit."""

from __future__ import annotations

import _thread
import threading

import pytest
from run_samples import Job, opened

from ckptstore.errors import FencedError
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol.interrupts import decided
from ckptstore.testing.tapped import TappedStore

WAIT_SECONDS = 10


def test_an_interrupt_while_the_commit_is_under_way_is_raised_after_the_decision():
    """I5: the commit stands, and the next save goes on from it."""
    inner, armed = MemoryStore(), []

    def interrupted(call, act):
        if armed and call.key == slot_key(2) and call.operation == "put":
            armed.clear()
            _thread.interrupt_main()
            threading.Event().wait(0.2)  # the main thread has been interrupted by now, and waits
        return act()

    job = Job(TappedStore(inner, interrupted))
    job.save("a")
    armed.append(True)
    with pytest.raises(KeyboardInterrupt) as caught:
        job.save("b")
    assert "success" in caught.value.__notes__[0]
    assert opened(inner).latest().commit.checkpoint_id == "b"
    assert job.save("c").commit.parent == 2


def test_an_interrupt_hides_no_fence():
    inner, armed = MemoryStore(), []

    def interrupted(call, act):
        if armed and call.key == slot_key(2) and call.operation == "put":
            armed.clear()
            Job(inner, job="other").save("theirs")
            _thread.interrupt_main()
            threading.Event().wait(0.2)
        return act()

    job = Job(TappedStore(inner, interrupted))
    job.save("a")
    armed.append(True)
    with pytest.raises(KeyboardInterrupt) as caught:
        job.save("b")
    assert "Term 2" in caught.value.__notes__[0]
    with pytest.raises(FencedError):
        job.save("c")


def test_work_on_another_thread_runs_where_it_is():
    found = []
    thread = threading.Thread(target=lambda: found.append(decided(threading.current_thread)))
    thread.start()
    thread.join(WAIT_SECONDS)
    assert found == [thread]


def test_what_the_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        decided(lambda: 1 // 0)
    assert decided(lambda: 7) == 7


def test_without_a_thread_to_be_had_the_work_is_done_all_the_same(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert decided(lambda: 7) == 7
