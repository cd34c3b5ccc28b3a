"""`drill reshard`: what it can build, what it shows, and what it enters into a matrix."""

from __future__ import annotations

import pytest

from ckptstore.cli.resharding import drill_of
from ckptstore.drills.degrees import Degrees, degrees_in
from ckptstore.drills.evidence import Evidence, as_yaml, check_open, with_evidence
from ckptstore.drills.place import NotApplicable
from ckptstore.drills.runner import Conduct, run_drills
from ckptstore.drills.scenarios.reshard import Change
from ckptstore.errors import InvalidInputError
from ckptstore.training.compat import Matrix
from ckptstore.wholefile import write_whole

CHANGE = Change({"dp": 2, "tp": 2}, {"dp": 4})
BLOCKED = {"from": {"dp": 2, "tp": 2}, "to": {"dp": 4, "tp": 1}, "status": "blocked_until_drill_passes"}
EVIDENCE = Evidence(CHANGE, "72 tensors are the same", "2026-05-04", {"torch": "2.13.0"})


def matrix_file(tmp_path, *entries):
    path = tmp_path / "matrix.yaml"
    write_whole(path, as_yaml(Matrix.read(list(entries))).encode())
    return path


def changed(text):
    saved, now = text.split(" > ")
    return Change(degrees_in(saved, "--from"), degrees_in(now, "--to"))


@pytest.mark.parametrize("text", ["dp=2,tp=2 > dp=3", "dp=2,zero=3 > dp=1,pp=2"])
def test_a_run_goes_on_in_another_topology(tmp_path, text):
    report = run_drills(str(tmp_path / "run"), [drill_of(changed(text))])
    verdict = report.verdicts["reshard"]
    assert verdict.status == "passed", verdict.seen
    assert "72 tensors" in verdict.seen
    assert report.left_behind == ()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "text",
    [
        "dp=8,tp=1 > dp=6,tp=1",
        "dp=8,zero=3 > dp=6,zero=3",
        "dp=4,zero=3 > dp=2,tp=2,zero=3",
        "dp=2,tp=2,pp=2 > dp=3,zero=2",
        "dp=4,zero=3,fsdp=2 > dp=1,pp=4",
        "dp=2,tp=2,pp=2,zero=3 > dp=2,tp=3",
    ],
)
def test_a_run_goes_on_in_any_topology_that_can_be_built(tmp_path, text):
    conduct = Conduct(timeout_seconds=600)
    verdict = run_drills(str(tmp_path / "run"), [drill_of(changed(text))], conduct=conduct).verdicts["reshard"]
    assert verdict.status == "passed", verdict.seen


@pytest.mark.parametrize(
    ("sabotage", "seen"), [("moments_mixed_up", "tensors differ"), ("other_samples", "Losses after it are")]
)
def test_a_product_that_mixes_something_up_fails(tmp_path, sabotage, seen):
    conduct = Conduct(prepare=f"sabotage:{sabotage}")
    verdict = run_drills(str(tmp_path / "run"), [drill_of(changed("dp=2 > dp=1"))], conduct=conduct).verdicts["reshard"]
    assert verdict.status == "failed"
    assert seen in verdict.seen


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("dp=2,ep=2", "ep: this drill builds"),
        ("dp=2,zero=1", "ZeRO 1"),
        ("dp=4,fsdp=3,zero=3", "does not divide dp"),
        ("dp=2,fsdp=2", "zero 0 shards nothing"),
        ("tp=5", "tp 5 does not divide"),
        ("pp=5", "more than the 4 blocks"),
        ("dp=49", "more than the 48 samples"),
        ("dp=16,tp=8", "128 ranks are more"),
    ],
)
def test_what_cannot_be_built_is_not_applicable_with_its_reason(given, reason):
    with pytest.raises(NotApplicable, match=reason):
        Degrees.read(degrees_in(given, "--from"))


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=x", "dp=2,dp=3", "=2", "dp=-1", "dp=1.5"])
def test_what_is_no_degree_is_refused(text):
    with pytest.raises(InvalidInputError, match="--from has"):
        degrees_in(text, "--from")


def test_a_blocked_entry_is_verified_where_it_stood_and_opens_the_way(tmp_path):
    other = {"from": {"dp": 1}, "to": {"tp": 8}, "status": "forbidden"}
    path = matrix_file(tmp_path, BLOCKED, other)
    assert not Matrix.read(path).judge(CHANGE.saved, CHANGE.now).is_open
    write_whole(path, as_yaml(with_evidence(check_open(path, CHANGE), EVIDENCE)).encode())
    written = Matrix.read(path)
    assert [entry.status for entry in written.entries] == ["verified", "forbidden"]
    decision = written.judge(CHANGE.saved, CHANGE.now)
    assert decision.is_open
    for told in ("2026-05-04", "dp=2,tp=2,pp=1,zero=0,fsdp=1 to dp=4", "torch 2.13.0", "72 tensors are the same"):
        assert told in decision.evidence
    assert [each.name for each in tmp_path.iterdir()] == ["matrix.yaml"]


def test_a_change_that_no_entry_names_is_added(tmp_path):
    path = tmp_path / "new.yaml"
    write_whole(path, as_yaml(with_evidence(check_open(path, CHANGE), EVIDENCE)).encode())
    assert Matrix.read(path).judge(CHANGE.saved, CHANGE.now).is_open
    assert Matrix.read(as_yaml(Matrix.read(path))) == Matrix.read(path)


def test_what_is_forbidden_is_never_opened(tmp_path):
    path = matrix_file(tmp_path, {**BLOCKED, "status": "forbidden"})
    with pytest.raises(InvalidInputError, match="forbids it"):
        check_open(path, CHANGE)


def test_another_blocked_entry_of_the_same_change_is_named(tmp_path):
    path = matrix_file(tmp_path, {**BLOCKED, "to": {"dp": 4, "fsdp": 1}})
    with pytest.raises(InvalidInputError, match="Another entry") as refused:
        check_open(path, CHANGE)
    assert "--to dp=4,fsdp=1" in refused.value.hint
    check_open(path, Change(CHANGE.saved, {"dp": 4, "fsdp": 1}))
