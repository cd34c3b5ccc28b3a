"""`examples/train_plain.py`, as a newcomer uses it: started, stopped by Ctrl-C, started again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import VARIANTS, killed_everywhere
from examples import train_plain

ROOT = Path(__file__).parents[2]


def trained(monkeypatch, capsys, *arguments):
    """Run the example in this process, to its end, and return what it printed."""
    monkeypatch.setattr(sys, "argv", ["train_plain.py", *map(str, arguments)])
    train_plain.main()
    return capsys.readouterr().out


def test_stopped_by_ctrl_c_it_says_what_is_there_and_then_goes_on_to_the_same_weights(tmp_path, monkeypatch, capsys):
    script = [sys.executable, "-u", "-W", "ignore", str(ROOT / "examples/train_plain.py"), str(tmp_path / "run")]
    with subprocess.Popen(
        script,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own: Ctrl-C reaches the loader's workers as well
    ) as process:
        until = [next(process.stdout), next(process.stdout)]
        os.killpg(process.pid, signal.SIGINT)
        said = "".join([*until, *process.stdout])
    assert process.returncode == 128 + signal.SIGINT, said
    assert until[0] == "a fresh start\n"
    seq, step = re.search(r"^latest: seq (\d+), step-(\d+)$", said, re.MULTILINE).groups()
    assert 25 <= int(step) < 400
    assert re.search(r"^best: seq \d+, step-\d+, val_loss ", said, re.MULTILINE)

    final = tmp_path / "final.pt"
    resumed = trained(monkeypatch, capsys, tmp_path / "run", "--seed", 9, "--final", final)
    assert resumed.startswith(f"resumed from seq {seq}, step {step}\n")
    weights = final.read_bytes()
    control = trained(monkeypatch, capsys, tmp_path / "control", "--final", final)
    assert weights == final.read_bytes()
    best = re.compile(r"^best: seq \d+, (step-\d+, val_loss .*)$", re.MULTILINE)
    assert best.search(resumed)[1] == best.search(control)[1]


def test_it_stops_by_itself_when_it_does_not_become_better_and_stays_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_plain, "PATIENCE", 2)
    monkeypatch.setattr(train_plain.functional, "mse_loss", lambda outputs, _: outputs.sum() * 0)
    arguments = (tmp_path / "run", "--steps", 10, "--every", 1, "--workers", 0)
    assert "latest: seq 3, step-3\n" in trained(monkeypatch, capsys, *arguments)
    assert trained(monkeypatch, capsys, *arguments).startswith("resumed from seq 3, step 3\n2 checkpoints in ")


@pytest.mark.timeout(600)
def test_killed_at_six_of_its_file_events_it_goes_on_from_the_newest_commit_to_the_same_weights(tmp_path):
    ended = killed_everywhere(VARIANTS["one process"], tmp_path / "work", points=7)
    assert ended.code == 0, ended.output
    assert ended.control == "PASS"
    assert sorted(point.mode for point in ended.points) == ["before", "before", "before", "term", "term", "torn"]
    assert [point.label for point in ended.points if point.verdict != "PASS" or not point.crashed] == []
    assert {point.newest for point in ended.points} == {0, 1, 2}
    assert all((point.resumed or 0) >= point.newest for point in ended.points)
