"""Ctrl-C that comes while a thread is started, as far as its start may have come by then."""

import threading

WHENS = ("before", "running", "late")
"""The thread never begins; or it runs already; or it begins when its owner has heard of the interrupt."""


def interrupt_start(monkeypatch, name, when, *, until=None):
    """Let the next start of a thread whose name begins so be interrupted; return those that were.

    Args:
        monkeypatch: Of the test.
        name: How it begins.
        when: One of `WHENS`.
        until: Of a thread that runs: waited for before the interrupt comes.
    """
    start, interrupted = threading.Thread.start, []

    def starting(thread):
        if interrupted or not thread.name.startswith(name):
            start(thread)
            return
        interrupted.append(thread)
        if when == "running":
            start(thread)
            assert until is None or until.wait(20)
        elif when == "late":
            timer = threading.Timer(0.1, start, (thread,))
            timer.daemon = True
            start(timer)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", starting)
    return interrupted
