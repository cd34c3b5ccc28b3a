"""Work counted, not timed: no clock says how busy the machine was."""

import sys


def calls_of(work, *, events=("call", "c_call")):
    """Return how many functions are called by `work`: `call` are those of Python, `c_call` those of C."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in events

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
