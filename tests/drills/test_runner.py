"""How drills are run: beside a run that they do not touch, in time, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckptstore.clock import SystemIds
from ckptstore.drills import runner
from ckptstore.drills.place import NotAsPromised, Place, expect
from ckptstore.drills.report import document, junit
from ckptstore.drills.runner import Conduct, run_drills
from ckptstore.drills.scratch import MARKER, Scratch, seen_by
from ckptstore.drills.verdict import Drill
from ckptstore.errors import ConflictError, UnavailableError, UnsupportedError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated

COMMAND = [sys.executable, "-m", "ckptstore.cli", "drill"]


def drill(run, name="one", **more):
    return Drill(1, name, "Something breaks.", "Nothing is lost.", run, **more)


def contents(url):
    store = open_store(url)
    return {info.key: store.get(info.key, max_bytes=1 << 24) for info in store.list("")}


def writes(place):
    place.store().put("log/000000000000.json", b"x")
    return "It was written."


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "run")


def test_a_run_beside_is_not_touched_and_nothing_is_left(url, tmp_path):
    log = RunLog.create(open_store(url))
    simulated.save(log, Incarnation.new(job="gpt", host="node"), "a")
    before = contents(url)
    report = run_drills(url, [drill(writes)])
    assert report.verdicts["one"].status == "passed"
    assert contents(url) == before
    assert not (tmp_path / "run" / "drill").exists()


def test_what_was_seen_is_the_verdict_and_an_error_is_no_pass(url):
    def breaks(place):
        expect(place.url == "", "The moon fell down.")

    def fails(_):
        raise UnavailableError("The store is away.")

    def stumbles(_):
        raise KeyError("typo")

    report = run_drills(url, [drill(each, each.__name__) for each in (writes, breaks, fails, stumbles)])
    assert {name: (each.status, each.seen) for name, each in report.verdicts.items()} == {
        "writes": ("passed", "It was written."),
        "breaks": ("failed", "The moon fell down."),
        "fails": ("failed", "UnavailableError: The store is away."),
        "stumbles": ("failed", "The drill itself failed: KeyError: 'typo'"),
    }
    assert report.failed == ["breaks", "fails", "stumbles"]


def test_a_drill_that_does_not_end_has_failed_and_its_ranks_are_dead(url, ranks_are_quick):
    started = []

    def waits(place):
        with place.ranks(2, "sabotage:sleeps") as ranks:
            started.extend(process for process, _ in ranks._workers)
            while True:
                time.sleep(0.1)
                if not started[0].is_alive():
                    raise NotAsPromised("too late")

    report = run_drills(url, [drill(waits), drill(writes, "next")], conduct=Conduct(timeout_seconds=15.0))
    assert report.verdicts["one"].seen == "It did not end within 15 s."
    assert report.verdicts["next"].status == "passed"
    assert [process.is_alive() for process in started] == [False, False]


def test_ranks_that_do_not_say_what_is_waited_for_are_waited_for_no_longer_than_the_drill(url, ranks_are_quick):
    def waits(place):
        with place.ranks(1, "sabotage:sleeps") as ranks:
            ranks.hear("anything", seconds=1000)
        return ""

    report = run_drills(url, [drill(waits)], conduct=Conduct(timeout_seconds=10.0))
    assert report.verdicts["one"].status == "failed"
    assert report.seconds < 60


def test_ranks_may_be_closed_by_several_threads_at_once(url, ranks_are_quick):
    """Ctrl-C closes them while the drill's own thread sees that one died, and leaves its `with`."""
    for _ in range(12):
        place = Place(url)
        ranks, together, raised = place.ranks(1, "sabotage:sleeps"), threading.Barrier(4), []

        def close(ranks=ranks, together=together, raised=raised):
            together.wait(10)
            try:
                ranks.close()
            except BaseException as error:  # noqa: BLE001  (all that is raised is what is looked for)
                raised.append(error)

        threads = [threading.Thread(target=close) for _ in range(together.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert raised == []
        assert place.started == []
        assert not any(process.is_alive() for process, _ in ranks._workers)


def test_a_drill_that_means_nothing_somewhere_says_why(url):
    report = run_drills(url, [drill(writes, not_on={"file": "Files have no credentials."})])
    assert (report.verdicts["one"].status, report.verdicts["one"].seen) == (
        "not applicable",
        "Files have no credentials.",
    )
    assert report.failed == []


def test_what_a_killed_drill_left_is_removed_and_a_living_one_is_left_alone(url):
    store, ids = open_store(url), SystemIds()
    dead, living, kept = (Scratch.begin(store, ids=ids) for _ in range(3))
    for scratch in (dead, kept):
        say(store, scratch, pid=pid_of_nobody())
        store.put(scratch.prefix + "one/data/x", b"x")
    kept.keep()
    store.put("drill/my-own/notes", b"mine")
    store.put("drill/" + "0" * 32 + "/no-marker", b"mine")
    report = run_drills(url, [drill(writes)])
    assert report.removed == (dead.url,)
    places = {info.key.split("/")[1] for info in store.list("drill/")}
    assert places == {living.prefix.split("/")[1], kept.prefix.split("/")[1], "my-own", "0" * 32}


def say(store, scratch, **facts):
    said = json.loads(store.get(scratch.prefix + MARKER, max_bytes=4096))
    store.put(scratch.prefix + MARKER, json.dumps({**said, **facts}).encode())


def pid_of_nobody():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    return gone.pid


@pytest.mark.parametrize("where", ["another boot", "another container", "nobody knows"])
def test_a_drill_whose_process_cannot_be_seen_from_here_is_left_alone(url, where, monkeypatch):
    """Containers of one image may all have the same host name, and one does not see the others' processes."""
    store = open_store(url)
    if where == "nobody knows":
        monkeypatch.setattr("ckptstore.drills.scratch.PROCESSES", Path("/nowhere"))
    other = Scratch.begin(store, ids=SystemIds())
    boot, _, processes = seen_by().partition(" ")
    by = {"another boot": f"0{boot[1:]} {processes}", "another container": f"{boot} pid:[1]", "nobody knows": ""}[where]
    say(store, other, pid=pid_of_nobody(), seen_by=by)
    assert run_drills(url, [drill(writes)]).removed == ()
    monkeypatch.setattr("ckptstore.drills.scratch.KEPT_SECONDS", 0.0)
    assert run_drills(url, [drill(writes)]).removed == (other.url,)


def test_what_came_after_its_marker_was_gone_is_removed_a_day_later(url, monkeypatch):
    store, late = open_store(url), f"drill/{'a' * 32}/one/data/late"
    store.put(late, b"x")
    assert run_drills(url, [drill(writes)]).removed == ()
    monkeypatch.setattr("ckptstore.drills.scratch.KEPT_SECONDS", 0.0)
    assert run_drills(url, [drill(writes)]).removed == (f"{store.url}/drill/{'a' * 32}",)
    assert contents(url) == {}


def test_a_drill_that_is_over_starts_and_writes_nothing_any_more(url):
    refused, done = [], threading.Event()

    def goes_on(place):
        log = RunLog.create(place.store())
        simulated.save(log, Incarnation.new(job="gpt", host="node"), "a")
        opened, store = place.opened(), place.store()
        place.over.wait(60)
        for act in (
            lambda: store.put("log/000000000009.json", b"x"),
            lambda: place.store().put("log/000000000009.json", b"x"),
            lambda: opened.pin("a", holder="drill", reason="It goes on."),
            lambda: place.ranks(1, "sabotage:nothing"),
        ):
            try:
                act()
            except NotAsPromised as error:
                refused.append(str(error))
        done.set()
        return ""

    report = run_drills(url, [drill(goes_on)], conduct=Conduct(timeout_seconds=3.0))
    assert report.verdicts["one"].seen == "It did not end within 3 s."
    assert done.wait(20)
    assert refused == ["The drill was over before it had ended."] * 4
    assert contents(url) == {}


def test_what_was_kept_is_removed_a_day_later(url, monkeypatch):
    report = run_drills(url, [drill(writes)], conduct=Conduct(keeps=True))
    assert report.left_behind == (report.scratch,)
    assert run_drills(url, [drill(writes)]).removed == ()
    monkeypatch.setattr("ckptstore.drills.scratch.KEPT_SECONDS", 0.0)
    assert run_drills(url, [drill(writes)]).removed == (report.scratch,)


def test_a_place_that_is_not_empty_is_refused(url):
    class Same(SystemIds):
        def nonce(self):
            return "a" * 32

    open_store(url).put(f"drill/{'a' * 32}/there", b"x")
    with pytest.raises(ConflictError):
        run_drills(url, [drill(writes)], ids=Same())


def test_without_torch_it_says_what_to_install(url, monkeypatch):
    monkeypatch.setattr(runner, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(UnsupportedError, match=r"no_such_package.*pip install 'ckptstore\[training\]'"):
        run_drills(url, [drill(writes)])


def test_a_report_is_json_and_junit(url):
    def breaks(_):
        raise NotAsPromised("It \x00 <broke>.")

    drills = [drill(writes), drill(breaks, "two"), drill(writes, "three", not_on={"file": "No."})]
    report = run_drills(url, drills)
    told = document(report, drills)
    assert [each["status"] for each in told["drills"]] == ["passed", "failed", "not applicable"]
    assert told["passed"] is False
    (suite,) = ET.fromstring(junit(report, drills))  # noqa: S314  (our own)
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
        "errors": "0",
    }
    assert [case.get("name") for case in suite] == ["one", "two", "three"]
    assert suite[1].find("failure").get("message") == "It \N{REPLACEMENT CHARACTER} <broke>."


@contextlib.contextmanager
def under_way(url, *more):
    """Yield the command, in the middle of a drill: ranks have written."""
    command = subprocess.Popen(
        [*COMMAND, "killed-rank", url, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        store, deadline = open_store(url), time.monotonic() + 60
        while not any("/data/" in info.key for info in store.list("drill/")):
            assert time.monotonic() < deadline
            assert command.poll() is None
            time.sleep(0.05)
        yield command
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait(30)
        command.stdout.close()
        command.stderr.close()


def members(group):
    """Return how many processes of a group live."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, of_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            found += int(of_group) == group and state != "Z"
    return found


def waits_until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_ends_the_drill_and_nothing_is_left(url):
    with under_way(url) as command:
        os.kill(command.pid, signal.SIGINT)
        printed, said = command.communicate(timeout=60)
        assert command.returncode == 130, printed + said
        waits_until(lambda: members(command.pid) == 0)
    assert contents(url) == {}


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_prints_no_traceback(url):
    """The forkserver is still importing torch: that takes it a second or more."""
    command = subprocess.Popen(
        [*COMMAND, "killed-rank", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        waits_until(lambda: any(b"multiprocessing.forkserver" in line for line in lines_of(command.pid)))
        time.sleep(0.3)
        os.killpg(command.pid, signal.SIGINT)
        _, said = command.communicate(timeout=60)
        waits_until(lambda: members(command.pid) == 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
    assert command.returncode == 130
    assert b"Traceback" not in said
    assert said.splitlines() == [
        b"error: Stopped.",
        b"hint: The run was not touched. What may be left under drill/, the next drill removes.",
    ]
    assert contents(url) == {}


def lines_of(group):
    """Return the command lines of a group's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                yield (process / "cmdline").read_bytes()


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
@pytest.mark.parametrize("arguments", [["all"], ["reshard", "--from", "dp=2", "--to", "tp=2"]], ids=["all", "reshard"])
def test_a_torch_that_cannot_be_imported_is_said_and_is_no_broken_promise(url, tmp_path, error, arguments):
    (tmp_path / "torch.py").write_text(f"raise {error}('libcudart is gone')")
    name, *more = arguments
    ended = subprocess.run(
        [*COMMAND, name, url, *more],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 6, ended.stdout + ended.stderr
    assert "Ranks cannot start: torch cannot be imported." in " ".join(ended.stderr.split())
    assert "libcudart is gone" in ended.stderr
    assert "NOT as promised" not in ended.stdout
    assert contents(url) == {}


def test_a_drill_that_is_killed_takes_its_ranks_along_and_the_next_one_clears_up(url):
    with under_way(url) as command:
        os.kill(command.pid, signal.SIGKILL)
        waits_until(lambda: members(command.pid) == 0)
    assert contents(url) != {}
    report = run_drills(url, [drill(writes)])
    assert len(report.removed) == 1
    assert contents(url) == {}
