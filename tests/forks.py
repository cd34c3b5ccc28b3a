"""What a forked child of a test does first."""

import signal


def end_after(seconds):
    """Have the system end this process then: a child inherits pytest-timeout's handler, which only raises."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
