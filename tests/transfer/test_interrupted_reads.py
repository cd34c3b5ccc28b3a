"""Ctrl-C while the threads of a read are started: none of them writes into a target any longer."""

import threading
import time

import pytest
from interrupted import WHENS, interrupt_start

from ckptstore.transfer.download import in_flight


@pytest.mark.parametrize("when", WHENS)
def test_a_read_whose_submit_was_interrupted_has_no_work_under_way(monkeypatch, when):
    begun, done = threading.Event(), []

    def work(task):
        begun.set()
        time.sleep(0.2)
        done.append(task)

    interrupt_start(monkeypatch, "ckptstore-fetch", when, until=begun)
    with pytest.raises(KeyboardInterrupt):
        in_flight(range(50), work, limit=4)
    was = list(done)
    assert was == [0] * (when == "running")
    time.sleep(0.5)
    assert done == was
