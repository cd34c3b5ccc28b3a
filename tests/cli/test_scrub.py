"""`verify` over shares, processes and threads, with `--quarantine` and `--record`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from ckptstore.maintenance.collect import retire
from ckptstore.maintenance.scrub import Scrub


def verified(ckptstore, run, *more, code=0):
    ended = ckptstore("verify", run.url, "--level", "full", "--json", *more)
    assert ended.code == code
    return ended.json


def test_damage_says_what_it_hits_what_is_lost_and_which_older_one_is_whole(ckptstore, run):
    run.save("a", step=100)
    run.save("b", step=300)
    run.flip(run.save("c", step=700).commit.stem.shard_key(1), 255)
    run.flip(run.catalog.find("b").commit.stem.shard_key(1), 255)
    ended = ckptstore("verify", run.url, "--level", "full")
    assert ended.code == 1
    assert "read twice" in ended.out
    assert "hits model.weight" in ended.out
    assert "a@1 is whole: a resume from it loses 600 steps" in ended.out
    found = verified(ckptstore, run, code=1)
    assert [each["seq"] for each in found["checkpoints"]] == [3]
    loss = found["loss"]
    assert (loss["newest"]["seq"], loss["instead"]["seq"], loss["steps"], loss["complete"]) == (3, 1, 600, True)
    assert loss["seconds"] >= 0
    damage = found["checkpoints"][0]["findings"][-1]
    assert (damage["confirmed"], damage["tensors"], damage["tensor_count"]) == (True, ["model.weight"], 1)
    assert verified(ckptstore, run, "a")["loss"] is None


def test_damage_is_quarantined_if_asked_for_and_the_next_is_the_latest(ckptstore, run):
    run.save("a")
    run.flip(run.save("b").commit.stem.shard_key(1), 255)
    assert verified(ckptstore, run, code=1)["checkpoints"][0]["quarantined"] is False
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["seq"] == 2
    found = verified(ckptstore, run, "--all", "--quarantine", code=1)
    assert [(each["seq"], each["quarantined"], each["set_aside"]) for each in found["checkpoints"]] == [
        (2, True, "quarantined"),
        (1, False, None),
    ]
    assert found["loss"]["instead"]["seq"] == 1
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["seq"] == 1
    assert verified(ckptstore, run, "b@2", "--quarantine", code=1)["checkpoints"][0]["quarantined"] is False


def obstruct(path, what):
    """Put something in the place of a file that is no file."""
    path.unlink()
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a link to itself":
            path.symlink_to(path)
        case "a device":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("level", ["exists", "full"])
@pytest.mark.parametrize("what", ["a pipe", "a directory", "a link to itself", "a device"])
@pytest.mark.parametrize("file", ["shard", "part"])
def test_what_is_no_file_is_damage_of_its_checkpoint_and_the_others_are_judged(
    ckptstore, run, tmp_path, file, what, level
):
    run.save("a")
    stem = run.save("b").commit.stem
    key = {"shard": stem.shard_key(1), "part": stem.part_key(0)}[file]
    [path] = [each for each in tmp_path.rglob("*") if str(each).endswith(key)]
    obstruct(path, what)
    ended = ckptstore("verify", run.url, "--all", "--level", level, "--quarantine", "--json")
    assert ended.code == 1
    assert [(each["seq"], each["ok"], each["quarantined"]) for each in ended.json["checkpoints"]] == [
        (2, False, True),
        (1, True, False),
    ]
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["seq"] == 1


def test_what_passed_whole_is_recorded_if_asked_for(ckptstore, run):
    run.save("a")
    run.flip(run.save("b").commit.stem.shard_key(1), 255)
    found = verified(ckptstore, run, "--all", "--record", code=1)
    assert [(each["seq"], each["recorded"]) for each in found["checkpoints"]] == [(2, False), (1, True)]
    assert ckptstore("show", run.url, "a", "--json").json["checkpoint"]["verified"] == "full"
    assert ckptstore("show", run.url, "b", "--json").json["checkpoint"]["verified"] is None


@pytest.mark.parametrize("more", [["--subset", "1/2"], ["--level", "chain"]], ids=" ".join)
def test_a_share_and_a_chain_are_not_recorded(ckptstore, run, more):
    run.save("a")
    ended = ckptstore("verify", run.url, "--record", *more, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")


@pytest.mark.parametrize(
    "more",
    [
        ["--subset", "0/3"],
        ["--subset", "4/3"],
        ["--subset", "half"],
        ["--subset", "1/2/3"],
        ["--memory", "much"],
        ["--memory", "1M"],
        ["--threads", "0"],
        ["--threads", "1000"],
    ],
    ids=" ".join,
)
def test_what_can_not_be_is_refused(ckptstore, run, more):
    run.save("a")
    ended = ckptstore("verify", run.url, *more, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")


def test_subsets_judge_every_object_once_and_one_of_them_finds_the_damage(ckptstore, run):
    run.flip(run.save("a").commit.stem.shard_key(1), 255)
    ended = [ckptstore("verify", run.url, "--level", "full", "--subset", f"{k}/4", "--json") for k in (1, 2, 3, 4)]
    assert sum(each.json["checkpoints"][0]["objects"] for each in ended) == 4  # three shards and a part
    assert Counter(each.code for each in ended) == {0: 3, 1: 1}
    assert sum(each.json["share"]["log"] for each in ended) == 1
    assert not any(each.json["share"]["complete"] for each in ended)
    shown = ckptstore("verify", run.url, "--subset", "2/4")
    assert "only a share" in shown.err
    assert "of this share" in shown.out


def as_rank(url, rank, ranks, *more):
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    words = [sys.executable, "-m", "ckptstore.cli", "verify", url, "--all", "--level", "full", "--json", *more]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_judge_every_object_once_and_each_says_its_own_verdict(ckptstore, run):
    for name in "ab":
        run.save(name)
    run.flip(run.catalog.find("b").commit.stem.shard_key(1), 255)
    alone = verified(ckptstore, run, "--all", code=1)
    started = [as_rank(run.url, rank, 2) for rank in (0, 1)]
    ended = [(*each.communicate(timeout=60), each.returncode) for each in started]
    found = [json.loads(out) for out, _, _ in ended]
    assert [(each["share"]["rank"], each["share"]["ranks"]) for each in found] == [(0, 2), (1, 2)]
    assert sorted(code for _, _, code in ended) == [0, 1]
    for number, checkpoint in enumerate(alone["checkpoints"]):
        shares = [each["checkpoints"][number] for each in found]
        assert {each["seq"] for each in shares} == {checkpoint["seq"]}
        assert sum(each["objects"] for each in shares) == checkpoint["objects"]
        assert sum(each["bytes_read"] for each in shares) == checkpoint["bytes_read"]
        assert [each for share in shares for each in share["findings"]] == checkpoint["findings"]
    assert sum(each["share"]["log"] for each in found) == 1


@pytest.mark.parametrize(
    "said", [{"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}]
)
def test_an_environment_that_contradicts_itself_is_refused(ckptstore, run, monkeypatch, said):
    run.save("a")
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    ended = ckptstore("verify", run.url, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")


def test_a_process_of_several_records_nothing(ckptstore, run, monkeypatch):
    run.save("a")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = ckptstore("verify", run.url, "--record", "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")


def test_what_is_retired_while_it_is_verified_is_not_recorded_and_no_fault(ckptstore, run, monkeypatch):
    for each in "abc":
        run.save(each)
    real = Scrub.record

    def record(self, verdict):
        if verdict.seq == 1:
            retire(run.log, [1], reason="meanwhile")
        return real(self, verdict)

    monkeypatch.setattr(Scrub, "record", record)
    ended = ckptstore("verify", run.url, "--all", "--level", "full", "--record", "--json")
    assert ended.code == 0
    assert {each["seq"]: each["recorded"] for each in ended.json["checkpoints"]} == {1: False, 2: True, 3: True}
