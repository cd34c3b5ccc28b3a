"""The benchmarks run, measure what they say, and compare as they should; here with very little."""

import json
import time

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks import aims, child, report, results, rounds, workloads
from benchmarks.child import Job, JobFailedError
from benchmarks.measure import measured
from benchmarks.peers import PEERS, Ours
from ckptstore.units import MIB

LITTLE = 2 * MIB


def job(root, act="save", peer="raw-file", **more):
    return Job(act, peer, str(root), "dense", LITTLE, **more)


def runs(*values):
    return results.spread(values)


def test_a_save_and_a_load_are_measured_and_written_with_what_they_were_measured_on(tmp_path, capsys):
    for name in ("save", "load"):
        little = ["--store", "file", "--size", "2M", "--rounds", "1", "--peers", "ours", "--results", str(tmp_path)]
        assert entry.main([name, *little]) == 0
        document = json.loads((tmp_path / f"{name}.json").read_text())
        assert document["versions"]["torch"] is not None
        assert document["machine"]["cores"] > 0
        (row,) = document["rows"]
        assert (row["peer"], row["store"], row["act"]) == ("ours", "file", name)
        assert row["wall_seconds"]["median"] > 0
        assert row["cpu_seconds_per_gib"]["runs"] == [row["cpu_seconds_per_gib"]["median"]]
    report.main(["--results", str(tmp_path)])
    written = (tmp_path / report.REPORT).read_text()
    assert "## load" in written
    assert "not measured" in written
    assert capsys.readouterr().out


@pytest.mark.servers
def test_requests_and_bytes_on_the_wire_are_counted(tmp_path):
    from benchmarks.counting import counted  # noqa: PLC0415  (needs a server's package)

    plan = rounds.Plan("save", "dense", LITTLE, ["ours"], 1)
    with rounds.Bucket() as place:
        found = counted(plan, place)["ours"]
    assert found["requests_by_method"]["PUT"] >= 2  # a shard and a commit
    assert plan.size <= found["wire_bytes"] < 1.5 * plan.size  # the save before the clock is not in it


def test_a_measurement_sees_time_cpu_and_memory():
    def work():
        held = torch.ones(16 * MIB)
        until = time.process_time() + 0.2
        while time.process_time() < until:
            held.add_(1)
        time.sleep(0.1)

    cost = measured(work)
    assert cost.cpu_seconds >= 0.2
    assert cost.wall_seconds >= 0.3
    assert 60 * MIB < cost.peak_extra_bytes < 200 * MIB


def test_what_was_loaded_wrongly_is_seen():
    shape = workloads.shape_of("dense", LITTLE)
    state = workloads.make(shape)
    assert workloads.differing(shape, state) == []
    name = next(iter(state))
    workloads.bytes_of(state[name])[100] ^= 1
    assert workloads.differing(shape, state) == [name]
    assert len(workloads.differing(shape, workloads.make(shape, touched_only=True))) == len(state)


def test_an_8b_model_has_the_size_that_mlperf_states():
    assert workloads.shape_of("llama-8b", 1.0).nbytes / 1024**3 == pytest.approx(105, abs=1)


def test_a_process_that_fails_is_told_with_what_it_said(tmp_path):
    with pytest.raises(JobFailedError, match=r"load of raw-file, rank 0, failed[\s\S]*FileNotFoundError"):
        child.run(job(tmp_path / "nothing", "load"))


def test_a_process_that_does_not_end_is_killed(tmp_path):
    began = time.monotonic()
    with pytest.raises(JobFailedError, match="did not end in time"):
        child.run(job(tmp_path), timeout_seconds=0.05)
    assert time.monotonic() - began < 30


def test_a_peer_that_is_not_installed_is_named_and_left_out(monkeypatch, capsys):
    class Absent(Ours):
        name = "absent"
        needs = ("no_such_module.at_all",)

    monkeypatch.setitem(PEERS, "absent", Absent)
    assert rounds.chosen(["absent", "ours"], [], "file") == ["ours"]
    assert "absent is left out: no_such_module.at_all is not installed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="somebody"):
        rounds.chosen(["somebody"], [], "file")


def test_an_aim_compares_round_by_round_and_says_whether_it_is_met():
    rows = [
        {"peer": "ours", "store": "file", "wall_seconds": runs(1.0, 2.0, 3.0)},
        {"peer": "FileSystemWriter", "store": "file", "wall_seconds": runs(2.0, 4.0, 4.0)},
    ]
    found = {aim.what: aim for aim in aims.aims_of({"save": {"rows": rows}, "load": {"rows": rows}})}
    save = found["files in memory, save, hashed: wall ÷ FileSystemWriter"]
    assert (save.found.median, save.found.least, save.found.most, save.found.rounds) == (0.5, 0.5, 0.75, 3)
    assert save.is_met is True
    unmeasured = [aim for aim in found.values() if aim.found is None]
    assert unmeasured
    assert {aim.is_met for aim in unmeasured} == {None}
    assert aims.Aim("x", 0.4, save.found, {}).is_met is False


def test_an_unknown_name_is_refused_with_those_that_are_known(capsys):
    assert entry.main(["saev"]) == 2
    assert "save, load, stall" in capsys.readouterr().err


def test_drills_are_run_by_the_command_and_the_table_says_how_each_ended(tmp_path):
    little = ["drills", "--place", "file", "--drill", "lost-latest", "--results", str(tmp_path)]
    assert entry.main(little) == 0
    (row,) = json.loads((tmp_path / "drills.json").read_text())["rows"]
    assert (row["place"], row["exit_code"]) == ("file", 0)
    assert "| 4 | `lost-latest` | passed" in (tmp_path / "DRILLS.md").read_text()
