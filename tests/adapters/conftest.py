import signal

import pytest

from ckptstore.training.signals import STOPPING


@pytest.fixture(autouse=True)
def handlers():
    """A run that was asked to stop notes further signals until its process ends; the process of the tests goes on."""
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGUSR2, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
