"""`drill`: verdicts as a table, JSON and JUnit, and what it exits with."""

from __future__ import annotations

import os
from xml.etree import ElementTree as ET

import pytest

from ckptstore.cli import drilling
from ckptstore.drills.place import NotAsPromised
from ckptstore.drills.verdict import Drill
from ckptstore.training.compat import Matrix


def drill(name, seen, error=None):
    def run(place):
        place.store().put("x", b"x")
        if error is not None:
            raise error
        return seen

    return Drill(1, name, "Something breaks.", "Nothing is lost.", run)


@pytest.fixture
def drills(monkeypatch):
    """Let `all` be these drills."""

    def drills(*these):
        monkeypatch.setattr(drilling, "named", lambda _: these)

    return drills


def test_what_holds_is_a_table_and_exits_with_0(ckptstore, drills, tmp_path):
    drills(drill("one", "It was whole."))
    ended = ckptstore("drill", "all", tmp_path / "run", "--junit", tmp_path / "report.xml")
    assert ended.code == 0
    assert ended.lines[0].split() == ["NO", "DRILL", "VERDICT", "SECONDS", "WHAT"]
    assert ended.lines[1].split()[:3] == ["1", "one", "passed"]
    assert ended.lines[-1] == "As promised."
    (suite,) = ET.parse(tmp_path / "report.xml").getroot()  # noqa: S314  (our own)
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")


def test_what_does_not_hold_exits_with_1(ckptstore, drills, tmp_path):
    drills(drill("one", "It was whole."), drill("two", "", NotAsPromised("It was torn.")))
    ended = ckptstore("drill", "all", tmp_path / "run")
    assert ended.code == 1
    assert ended.lines[-1] == "NOT as promised: two."
    found = ckptstore("drill", "all", tmp_path / "run", "--json")
    assert found.code == 1
    assert found.json["passed"] is False
    assert [each["seen"] for each in found.json["drills"]] == ["It was whole.", "It was torn."]


def test_what_is_kept_is_named(ckptstore, drills, tmp_path):
    drills(drill("one", "It was whole."))
    ended = ckptstore("drill", "all", tmp_path / "run", "--keep", "--json")
    (left,) = ended.json["left_behind"]
    assert left == ended.json["scratch"]
    assert [path.name for path in (tmp_path / "run" / "drill").glob("*/one/x")] == ["x"]


@pytest.mark.servers
def test_a_store_that_ignores_conditions_exits_with_6(ckptstore, rclone):
    options = [f"--option={name}={value}" for name, value in rclone.options().items()]
    ended = ckptstore("drill", "all", rclone.url("tests/drill/run"), *options, "--engine", "s3fs")
    assert ended.code == 6
    assert "one checkpoint would be lost" in ended.err
    assert {line.split()[2] for line in ended.lines[1:-1]} <= {"refused"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kiled-rank", "run"], "Did you mean killed-rank?"),
        (["all", "run", "--to", "dp=2"], "--to belongs to the drill reshard"),
        (["reshard", "run", "--to", "dp=2"], "reshard needs --from and --to"),
        (["reshard", "run", "--from", "dp=2", "--to", "dp=two"], "which is no degree"),
        (["all", "run", "--timeout", "0"], "timeout must be a number of seconds"),
        (["all", "memory://here"], "the memory of one process"),
    ],
)
def test_what_makes_no_sense_exits_with_2(ckptstore, arguments, said):
    ended = ckptstore("drill", *arguments)
    assert ended.code == 2
    assert said in ended.err


def test_a_reshard_is_entered_into_the_matrix_and_a_forbidden_one_is_not(ckptstore, tmp_path):
    matrix, url = tmp_path / "matrix.yaml", tmp_path / "run"
    ended = ckptstore("drill", "reshard", url, "--from", "dp=2", "--to", "tp=2", "--matrix", matrix)
    assert ended.code == 0, ended.out
    decision = Matrix.read(matrix).judge({"dp": 2}, {"tp": 2})
    assert decision.is_open
    assert "the same bit by bit" in decision.evidence
    matrix.write_text("resume_compatibility: [{from: {dp: 2}, to: {tp: 2}, status: forbidden}]")
    ended = ckptstore("drill", "reshard", url, "--from", "dp=2", "--to", "tp=2", "--matrix", matrix)
    assert ended.code == 2
    assert "forbids it" in ended.err


@pytest.mark.parametrize("option", ["--matrix", "--junit"])
def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_tried(ckptstore, tmp_path, option):
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "nowhere" / "file", "cannot be written"),
        (tmp_path / "run" / "latest.json", "inside the run"),
    ):
        ended = ckptstore("drill", "reshard", tmp_path / "run", "--from", "dp=2", "--to", "tp=2", option, path)
        assert ended.code == 2, ended.out
        assert said in ended.err
    assert not (tmp_path / "run").exists()


def test_a_reshard_that_cannot_be_built_exits_with_6_and_its_reason(ckptstore, tmp_path):
    ended = ckptstore("drill", "reshard", tmp_path / "run", "--from", "dp=2,zero=1", "--to", "dp=2", "--json")
    assert ended.code == 6
    assert ended.json["drills"][0]["status"] == "not applicable"
    assert ended.json["matrix"] is None
