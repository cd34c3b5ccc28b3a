"""Signals are noted, and nothing else: what stood before stands again, and children die as they did."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from ckptstore.errors import InvalidInputError
from ckptstore.testing.simulated import ManualClock
from ckptstore.training.signals import STOPPING, Signals


@pytest.fixture
def heard():
    """The signals that a handler of somebody else's heard."""
    return []


@pytest.fixture
def theirs(heard):
    """That handler."""

    def note(number, frame):
        del frame
        heard.append(number)

    return note


def test_the_first_signal_is_noted_with_its_time_and_nothing_else_happens():
    clock = ManualClock()
    clock.sleep(5)
    signals = Signals(clock=clock)
    assert signals.install()
    assert signals.asked is None
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.raise_signal(number)
    assert signals.asked.number == signal.SIGUSR1
    assert signals.asked.at == pytest.approx(5, abs=0.01)


def test_handlers_that_stood_before_run_and_stand_again(heard, theirs):
    for number in STOPPING:
        signal.signal(number, theirs)
    signals = Signals()
    signals.install()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    signals.remove()
    assert [signal.getsignal(number) for number in STOPPING] == [theirs] * 3


def test_a_second_ctrl_c_interrupts_and_one_after_another_signal_does_not():
    signals = Signals()
    signals.install()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signals.asked.number == signal.SIGTERM


def test_a_ctrl_c_that_a_shell_had_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals = Signals()
    signals.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.raise_signal(signal.SIGINT)
    assert signals.asked is None
    signal.raise_signal(signal.SIGTERM)  # that one is a scheduler's, whoever ignored it
    assert signals.asked.number == signal.SIGTERM
    signals.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_when_the_time_is_over_a_signal_does_what_it_did_before(heard, theirs):
    clock = ManualClock()
    signal.signal(signal.SIGTERM, theirs)
    Signals(seconds=30, clock=clock).install()
    signal.raise_signal(signal.SIGUSR1)
    clock.sleep(29)
    signal.raise_signal(signal.SIGINT)
    clock.sleep(2)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(signal.SIGUSR1)  # by default the end of a process
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGUSR1


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_two_that_stand_on_each_other_both_note_and_go_in_any_order(heard, theirs, first):
    signal.signal(signal.SIGUSR1, theirs)
    outer, inner = Signals(), Signals()
    outer.install()
    inner.install()
    signal.raise_signal(signal.SIGUSR1)
    assert (outer.asked.number, inner.asked.number, heard) == (signal.SIGUSR1, signal.SIGUSR1, [signal.SIGUSR1])
    for signals in (inner, outer) if first == "inner" else (outer, inner):
        signals.remove()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2


@pytest.mark.parametrize("newer", [1, 2])
def test_one_whose_time_is_over_leaves_a_signal_to_a_newer_one_that_notes_it(newer):
    clock = ManualClock()
    old = Signals(seconds=30, clock=clock)
    old.install()
    signal.raise_signal(signal.SIGUSR1)
    clock.sleep(31)
    above = [Signals() for _ in range(newer)]
    for signals in above:
        signals.install()
    pid = os.fork()
    if pid == 0:
        for signals in (old, *above):  # as if it were the process that installed them
            signals._process = os.getpid()
        signal.raise_signal(signal.SIGUSR1)  # by default the end of a process, and Ctrl-C raises
        signal.raise_signal(signal.SIGINT)
        os._exit(7 if all(signals.asked.number == signal.SIGUSR1 for signals in above) else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for signals in above:
        signals.remove()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_that_calls_ours_may_go_on_doing_so_when_ours_is_gone():
    signals = Signals()
    signals.install()
    ours, heard = signal.getsignal(signal.SIGUSR1), []

    def chained(number, frame):
        heard.append(number)
        ours(number, frame)

    signal.signal(signal.SIGUSR1, chained)
    signal.raise_signal(signal.SIGUSR1)
    assert signals.asked is not None
    signals.remove()
    signal.raise_signal(signal.SIGUSR1)  # by default the end of this process
    assert signal.getsignal(signal.SIGUSR1) is chained
    signals.install()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 3


def test_off_the_main_thread_none_are_handled():
    before = signal.getsignal(signal.SIGTERM)
    done = []
    thread = threading.Thread(target=lambda: done.append(Signals().install()))
    thread.start()
    thread.join()
    assert done == [False]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, 0, 1000, "SIGTERM", None], ids=str)
def test_what_is_no_signal_that_can_be_handled_is_refused(number):
    with pytest.raises(InvalidInputError, match="no signal"):
        Signals((signal.SIGTERM, number))


def code_of_a_child(*numbers):
    """Fork, raise these signals in the child, and return what becomes of it: 7, or how it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            for number in numbers:
                signal.raise_signal(number)
        except KeyboardInterrupt:
            os._exit(9)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_dies_of_sigterm_as_ever_and_leaves_the_others_to_its_parent():
    signals = Signals()
    signals.install()
    assert code_of_a_child(signal.SIGTERM) == -signal.SIGTERM
    assert code_of_a_child(signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1) == 7
    assert code_of_a_child(signal.SIGUSR1, signal.SIGINT, signal.SIGINT) == 9
    assert signals.asked is None


def test_a_forked_child_runs_the_handlers_that_stood_before():
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(100 + number))
    signal.signal(signal.SIGUSR1, lambda number, _: os._exit(100 + number))
    Signals().install()
    assert code_of_a_child(signal.SIGTERM) == 100 + signal.SIGTERM
    assert code_of_a_child(signal.SIGUSR1) == 100 + signal.SIGUSR1


@pytest.mark.parametrize("was_asked", [False, True])
def test_a_forked_child_that_its_parent_terminates_is_gone(was_asked):
    Signals().install()
    if was_asked:
        signal.raise_signal(signal.SIGTERM)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM


def test_the_death_of_a_worker_interrupts_no_step_of_a_run_that_was_asked_to_stop():
    """As torch's own handler does, which raises wherever the main thread is."""

    def raising(number, frame):
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    signal.signal(signal.SIGCHLD, raising)
    signals = Signals()
    signals.install()
    with pytest.raises(RuntimeError):
        signal.raise_signal(signal.SIGCHLD)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGCHLD)
    signals.remove()
    assert signal.getsignal(signal.SIGCHLD) is raising


def test_a_signal_that_nobody_acted_upon_is_passed_on(heard, theirs):
    signals = Signals()
    signals.install()
    signal.raise_signal(signal.SIGINT)
    signals.remove()
    with pytest.raises(KeyboardInterrupt):
        signals.pass_on()
    signal.signal(signal.SIGUSR1, theirs)
    signals = Signals()
    signals.install()
    signal.raise_signal(signal.SIGUSR1)
    signals.remove()
    signals.pass_on()
    assert heard == [signal.SIGUSR1]  # it ran at once, and does not run twice
