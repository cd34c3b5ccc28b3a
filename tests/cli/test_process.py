"""The program as a process: its entry points, terminals and pipes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.objectstore.urls import open_store

COMMAND = [sys.executable, "-m", "ckptstore.cli"]
LIMIT_SECONDS = 60


def run_command(*arguments, **more):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, **more
    )


@contextlib.contextmanager
def terminal():
    """Yield both ends of a terminal of 80 columns: what we hold, and what a process gets."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        for each in (ours, theirs):
            with contextlib.suppress(OSError):
                os.close(each)


def read_until(descriptor, wanted):
    """Return what comes until `wanted` is in it, or until the other end closes."""
    deadline, text = time.monotonic() + LIMIT_SECONDS, b""
    while wanted not in text:
        assert time.monotonic() < deadline, text
        if select.select([descriptor], [], [], 1)[0]:
            try:
                piece = os.read(descriptor, 4096)
            except OSError:  # the other end is closed
                return text
            if not piece:
                return text
            text += piece
    return text


def test_the_module_runs_and_its_exit_codes_arrive(run, tmp_path):
    run.save("a")
    ended = run_command("ls", run.url)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "a" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert run_command("latest", str(tmp_path / "absent")).returncode == 1
    ended = run_command("show", run.url, "nobody", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["error"], ended.stderr) == (3, "not_found", "")


def test_no_colours_come_through_a_pipe_even_if_the_environment_wants_them(run):
    run.save("a")
    ended = run_command("ls", run.url, env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "20"})
    assert "\x1b" not in ended.stdout
    assert len([line for line in ended.stdout.splitlines() if line.startswith("SEQ")]) == 1
    assert "NOTES" in ended.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_extra_it_says_how_to_install_it(package):
    script = f"import sys; sys.modules[{package!r}] = None; from ckptstore.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert ended.returncode == 2
    assert "pip install 'ckptstore[cli]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_looking_loads_neither_torch_nor_a_cloud_client(run):
    run.save("a")
    script = (
        "import sys\nfrom ckptstore.cli.app import app\n"
        f"app(['verify', {run.url!r}, '--level', 'full'], standalone_mode=False)\n"
        "print(sorted({'torch', 'obstore', 'aiobotocore', 'botocore', 'fsspec'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def test_a_terminal_without_unicode_is_no_reason_to_fail(run):
    run.save("ñandú")
    ended = run_command("ls", run.url, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0
    assert "\\xf1and\\xfa" in ended.stdout


def test_a_reader_that_has_enough_ends_the_command_quietly(run):
    for count in range(40):
        run.save("n" * 100, step=count)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [*COMMAND, "ls", run.url], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_on_a_narrow_terminal_a_long_name_is_folded_and_never_cut(run):
    name = "n" * 100
    run.save(name)
    with terminal() as (ours, theirs):
        subprocess.run(
            [*COMMAND, "ls", run.url], stdout=theirs, env={**os.environ, "COLUMNS": "80"}, timeout=60, check=True
        )
        os.close(theirs)
        shown = read_until(ours, b"never printed").decode()
    lines = [line for line in shown.splitlines() if "nnnn" in line]
    assert sum(line.count("n") for line in lines) == len(name)
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:4] == ["1", "0", "3", "888"]


def test_a_full_verification_shows_a_bar_on_a_terminal_and_none_otherwise(run):
    run.save("a")
    command = ["verify", run.url, "--level", "full"]
    assert run_command(*command).stderr == ""
    with terminal() as (ours, theirs):
        ended = subprocess.run(
            [*COMMAND, *command], stdout=subprocess.PIPE, stderr=theirs, timeout=LIMIT_SECONDS, check=False
        )
        os.close(theirs)
        shown = read_until(ours, b"never printed")
    assert ended.returncode == 0
    assert b"verifying, level full" in shown
    assert b"\x1b" not in ended.stdout


def test_a_bar_does_not_spoil_a_document(run):
    run.save("a")
    with terminal() as (ours, theirs):
        ended = subprocess.run(
            [*COMMAND, "verify", run.url, "--level", "full", "--json"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        os.close(theirs)
        assert read_until(ours, b"never printed") == b""
    assert json.loads(ended.stdout)["ok"] is True


@pytest.mark.parametrize(("answer", "code", "latest"), [("y", 0, "a@1"), ("n", 130, "b@2"), ("", 130, "b@2")])
def test_a_person_is_asked_before_a_roll_back(run, answer, code, latest):
    run.save("a")
    run.save("b")
    with (
        terminal() as (ours, theirs),
        subprocess.Popen(
            [*COMMAND, "rollback", run.url, "a"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout.readline() == "would be set aside: b@2\n"
        os.write(ours, f"{answer}\n".encode())
        process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == code
    assert run_command("latest", run.url).stdout == f"{latest}\n"


def test_an_interrupt_while_asking_changes_nothing(run):
    run.save("a")
    run.save("b")
    slots = len(list(open_store(run.url).list("log/")))
    with (
        terminal() as (ours, theirs),
        subprocess.Popen(
            [*COMMAND, "rollback", run.url, "a"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=LIMIT_SECONDS)
        assert ours
    assert process.returncode == 130
    assert "Traceback" not in told
    assert len(list(open_store(run.url).list("log/"))) == slots


def test_an_examination_that_is_interrupted_deletes_what_it_wrote(tmp_path):
    place = tmp_path / "run"

    def written():
        return [path for path in place.rglob("*") if path.is_file()] if place.exists() else []

    with subprocess.Popen(
        [*COMMAND, "doctor", str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any("speed" in str(path) for path in written()):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out, "error: Stopped." in err) == (130, "", True)
    assert written() == []


def test_on_a_terminal_an_examination_says_what_it_is_doing(tmp_path):
    with (
        terminal() as (ours, theirs),
        subprocess.Popen([*COMMAND, "doctor", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=theirs) as process,
    ):
        assert b"network: up" in read_until(ours, b"network: up")
        process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0


@pytest.mark.parametrize("command", [["ls"], ["verify", "--json"], ["gc"], ["gc", "--json"]], ids=" ".join)
def test_an_answer_that_has_no_room_is_no_fault_and_no_damage(run, command):
    run.save("a")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            [*COMMAND, command[0], run.url, *command[1:]],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    assert ended.returncode == 141
    assert ended.stderr.startswith("error: The answer cannot be written: No space left on device.")
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "-", *COMMAND, command[0], run.url, *command[1:]],
        stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert (closed.returncode, closed.stderr) == (141, "")
