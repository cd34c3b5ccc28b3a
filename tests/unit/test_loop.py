"""One loop for all threads of a process, and none of its parent's."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.objectstore import loop


async def add(one, two):
    await asyncio.sleep(0)
    return one + two


def test_what_a_coroutine_returns_or_raises_comes_back():
    async def fails():
        raise ZeroDivisionError

    assert loop.run(add(1, 2), timeout=10) == 3
    with pytest.raises(ZeroDivisionError):
        loop.run(fails(), timeout=10)


def test_many_threads_share_one_loop():
    async def which():
        await asyncio.sleep(0.2)
        return asyncio.get_running_loop()

    began = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        loops = {done.result() for done in [threads.submit(loop.run, which(), timeout=10) for _ in range(64)]}
    assert loops == {loop.current()}
    assert time.monotonic() - began < 64 * 0.2  # which one after the other would take


def test_it_may_be_called_where_another_loop_runs():
    async def outer():
        return loop.run(add(1, 2), timeout=10)

    assert asyncio.run(outer()) == 3


def test_what_takes_too_long_is_cancelled():
    seen = threading.Event()

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            seen.set()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        loop.run(slow(), timeout=0.1)
    assert time.monotonic() - began < 20
    assert seen.is_set()


def test_a_loop_that_is_held_up_does_not_hold_up_who_waits(monkeypatch):
    monkeypatch.setattr(loop, "_GRACE_SECONDS", 0.2)
    held, go_on = threading.Event(), threading.Event()

    async def holds():
        held.set()
        go_on.wait(30)

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(loop.run, holds(), timeout=30)
        held.wait(10)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            loop.run(add(1, 2), timeout=0.1)
        assert time.monotonic() - began < 20
        go_on.set()
        holding.result(30)
    assert loop.run(add(1, 2), timeout=10) == 3


def test_an_interrupted_wait_cancels_what_it_waited_for():
    begun, cancelled = threading.Event(), threading.Event()

    async def slow():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    def interrupt():
        begun.wait(10)
        signal.raise_signal(signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run(slow(), timeout=30)
    assert cancelled.wait(10)


def test_a_coroutine_that_exits_ends_nothing_but_itself():
    async def exits():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        loop.run(exits(), timeout=10)
    assert loop.run(add(1, 2), timeout=10) == 3


def test_the_loops_own_thread_is_refused_instead_of_waiting_for_itself():
    async def inner():
        return loop.run(add(1, 2), timeout=10)

    with pytest.raises(RuntimeError, match="own thread"):
        loop.run(inner(), timeout=10)


def test_what_is_spawned_runs_without_being_waited_for():
    done = threading.Event()

    async def close():
        done.set()

    assert loop.spawn(loop.current(), close())
    assert done.wait(10)


def test_what_belongs_to_another_loop_is_not_spawned():
    other = asyncio.new_event_loop()
    assert not loop.spawn(other, add(1, 2))
    other.close()


def run(code, *arguments):
    """Run code in a process of its own; return its exit status and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_process_that_used_it_ends_at_once_and_silently():
    code = """
        import asyncio, time
        from ckptstore.objectstore import loop
        async def slow():
            await asyncio.sleep(0.2)
            print("closed", flush=True)
        loop.run(asyncio.sleep(0), timeout=10)
        loop.spawn(loop.current(), slow())
    """
    began = time.monotonic()
    assert run(code) == (0, "closed\n")
    assert time.monotonic() - began < 20


def test_a_forked_child_has_a_loop_of_its_own():
    code = """
        import asyncio, os
        from ckptstore.objectstore import loop
        before = loop.current()
        child = os.fork()
        loop.run(asyncio.sleep(0.01), timeout=10)
        assert (loop.current() is before) == bool(child)
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print("both")
    """
    assert run(code) == (0, "both\n")


def test_a_fork_in_the_middle_of_calls_never_hangs():
    code = """
        import asyncio, os, threading
        from ckptstore.objectstore import loop
        stop = threading.Event()
        def work():
            while not stop.is_set():
                loop.run(asyncio.sleep(0.0001), timeout=10)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            child = os.fork()
            if not child:
                loop.run(asyncio.sleep(0.001), timeout=10)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        print("all")
    """
    assert run(code) == (0, "all\n")


def test_a_fork_in_a_waiting_thread_leaves_the_child_with_an_error():
    code = """
        import asyncio, os, signal
        from ckptstore.errors import OutcomeUnknownError
        from ckptstore.objectstore import loop
        signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
        children = []
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            print(loop.run(asyncio.sleep(3, "parent"), timeout=30), flush=True)
        except OutcomeUnknownError:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    """
    assert run(code) == (0, "parent\n")


def test_a_child_does_not_disturb_the_connections_of_its_parent():
    """What the child forgets, its parent still listens to."""

    async def opened(port):
        return await asyncio.open_connection("127.0.0.1", port)

    with socket.create_server(("127.0.0.1", 0)) as server:
        reader, writer = loop.run(opened(server.getsockname()[1]), timeout=10)
        peer, _ = server.accept()
        with peer:
            child = os.fork()
            if not child:
                try:
                    writer.write(b"not from the child")
                    writer.transport.abort()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            peer.sendall(b"still here")
            assert loop.run(reader.readexactly(10), timeout=10) == b"still here"
            peer.settimeout(0)
            with pytest.raises(BlockingIOError):
                peer.recv(100)

            async def close():
                writer.close()
                await writer.wait_closed()

            loop.run(close(), timeout=10)
