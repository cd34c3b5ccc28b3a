"""What is on its way fits into one budget, whoever asks for it, and all of it is given back."""

import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.errors import StalledError, UnavailableError
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.transfer.budget import Budget
from ckptstore.units import KIB, MIB

OPTIONS = TransferOptions(transfer_bytes=16 * MIB, part_bytes=5 * MIB)
HASTY = TransferOptions(
    transfer_bytes=5 * MIB,
    part_bytes=5 * MIB,
    retry=RetryOptions(deadline_seconds=0.01, stall_timeout_seconds=0.01),
)


def waiting(budget, count):
    """Wait until `count` threads wait for room."""
    deadline = time.monotonic() + 10
    while len(budget._queue) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("users", [1, 2, 12])
def test_uploads_and_reads_together_never_hold_more_than_the_budget(users):
    budget, seen = Budget(), []

    def look():
        with budget._changed:
            seen.append(budget.held_bytes + budget.kept_bytes)

    def upload():
        with budget.parts(OPTIONS) as parts:
            for _ in range(30):
                part = parts.take(5 * MIB)
                look()
                part[0] = part[-1] = 1
                del part

    def read():
        for _ in range(30):
            with budget.taken(3 * MIB, options=OPTIONS):
                look()

    with ThreadPoolExecutor(users) as pool:
        for work in [pool.submit((upload, read)[n % 2]) for n in range(users)]:
            work.result(60)
    assert len(seen) == 30 * users
    assert 3 * MIB <= max(seen) <= OPTIONS.transfer_bytes
    assert budget.held_bytes == budget.kept_bytes == 0


def test_memory_is_used_again_once_nothing_refers_to_it():
    budget = Budget()
    with budget.parts(OPTIONS) as parts:
        first = parts.take(5 * MIB)
        kept = first[10:20]  # as a client does that may have to send it again
        kept[:] = b"0123456789"
        del first
        assert budget.held_bytes == 5 * MIB
        second = parts.take(5 * MIB)
        second[:] = bytes(5 * MIB)
        assert bytes(kept) == b"0123456789"
        del kept
        assert (budget.held_bytes, budget.kept_bytes) == (5 * MIB, 5 * MIB)
        third = parts.take(5 * MIB)
        assert budget.kept_bytes == 0
        assert bytes(third[10:20]) == b"0123456789"
        del second, third
    assert budget.held_bytes == budget.kept_bytes == 0


def test_memory_that_outlives_its_upload_is_not_counted_and_never_used_again():
    budget = Budget()
    with budget.parts(OPTIONS) as parts:
        late = parts.take(16 * MIB)
        late[:4] = b"late"
    assert budget.held_bytes == 0
    with budget.parts(OPTIONS) as parts:
        part = parts.take(16 * MIB)
        part[:4] = b"part"
        assert bytes(late[:4]) == b"late"
        del late
        gc.collect()
        assert (budget.held_bytes, budget.kept_bytes) == (16 * MIB, 0)


def test_memory_that_is_kept_makes_room_for_a_read():
    budget = Budget()
    with budget.parts(OPTIONS) as parts:
        for _ in range(3):
            del [*map(parts.take, [5 * MIB] * 3)][:]
        assert budget.kept_bytes == 15 * MIB
        with budget.taken(12 * MIB, options=OPTIONS):
            assert budget.kept_bytes <= 4 * MIB


def test_what_is_larger_than_the_budget_goes_alone():
    budget, began = Budget(), threading.Event()

    def large():
        with budget.taken(100 * MIB, options=OPTIONS):
            began.set()

    thread = threading.Thread(target=large)
    with budget.taken(KIB, options=OPTIONS):
        thread.start()
        waiting(budget, 1)
        assert not began.is_set()
    assert began.wait(10)
    thread.join()
    assert budget.held_bytes == 0


def test_a_large_wish_is_not_passed_over_by_small_ones():
    budget, order = Budget(), []

    def take(name, nbytes):
        with budget.taken(nbytes, options=OPTIONS):
            order.append(name)

    threads = [
        threading.Thread(target=take, args=["large", 16 * MIB]),
        threading.Thread(target=take, args=["small", 1]),
    ]
    with budget.taken(MIB, options=OPTIONS):
        for count, thread in enumerate(threads, 1):
            thread.start()
            waiting(budget, count)
    for thread in threads:
        thread.join()
    assert order == ["large", "small"]


def test_room_is_not_waited_for_for_ever():
    budget = Budget()
    with (
        budget.taken(5 * MIB, options=HASTY),
        pytest.raises(StalledError, match="none of these came to an end") as stalled,
        budget.taken(1, options=HASTY),
    ):
        pytest.fail("there was no room")
    assert stalled.value.facts["held"] == 5 * MIB
    with budget.taken(5 * MIB, options=HASTY):  # and whoever gave up is not in the way
        assert budget.held_bytes == 5 * MIB


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_gives_everything_back(kind):
    budget = Budget()

    def fails():
        with budget.parts(OPTIONS) as parts, budget.taken(MIB, options=OPTIONS):
            part = parts.take(5 * MIB)
            assert budget.held_bytes == 6 * MIB
            raise kind(len(part))

    with pytest.raises(kind) as kept:  # its traceback refers to the part
        fails()
    assert budget.held_bytes == budget.kept_bytes == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(budget.taken(16 * MIB, options=OPTIONS))
    assert kept.value.args == (5 * MIB,)


def test_memory_that_the_system_does_not_have_is_told_in_our_words():
    budget = Budget()
    with budget.parts(OPTIONS) as parts:
        with pytest.raises(UnavailableError, match="no memory for a part") as told:
            parts.take(1 << 60)
        assert "transfer_bytes" in told.value.hint
        assert len(parts.take(16 * MIB)) == 16 * MIB
