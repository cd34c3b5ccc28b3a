"""`retire` and `gc`: nothing goes that was not shown."""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys

import pytest

from ckptstore import CheckpointStore
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation, claim


@pytest.fixture
def six(run):
    for step in range(10, 70, 10):
        run.save_described(f"step-{step}", global_step=step, metrics={"val_loss": abs(step - 30)}, tags=[f"t{step}"])
    return run


def kept(run):
    return sorted(each.global_step for each in CheckpointStore.open(run.url).checkpoints())


def names(run):
    return {info.key.split("/")[2].split(".t0")[0] for info in run.store.list("data/")}


def planned(ckptstore, run, *more):
    ended = ckptstore("gc", run.url, "--json", *more)
    assert ended.code == 0, ended.out
    return ended.json


def test_a_plan_is_shown_and_changes_nothing(ckptstore, six):
    before = [(info.key, info.etag) for info in six.store.list("")]
    ended = ckptstore("gc", six.url, "--keep-last", 2, "--keep-best", "val_loss:min:1", "--grace", 0)
    assert ended.code == 0
    assert [line.split()[0] for line in ended.lines if line.startswith(("retire", "delete"))] == ["retire"] * 3 + [
        "delete"
    ] * 3
    digest = next(line.split()[1] for line in ended.lines if line.startswith("digest"))
    assert len(digest) == 64
    assert f"Nothing was changed. Add --apply {digest} to do it." in ended.out
    assert [(info.key, info.etag) for info in six.store.list("")] == before
    same = ["--keep-last", 2, "--keep-best", "val_loss:min:1", "--grace", 0]
    assert planned(ckptstore, six, "--dry-run", *same)["digest"] == digest


def test_the_plan_that_was_shown_is_applied_with_a_line_for_each_deletion(ckptstore, six, tmp_path):
    policy = ["--keep-last", 2, "--keep-every", 40, "--keep-tag", "t10", "--grace", 0]
    plan = planned(ckptstore, six, *policy)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", f"{six.url}/latest.json", ""):
        assert ckptstore("gc", six.url, *policy, "--apply", plan["digest"], "--audit", path).code == 2
    audit = tmp_path / "audit.jsonl"
    ended = ckptstore("gc", six.url, *policy, "--apply", plan["digest"], "--audit", audit, "--reason", "full")
    assert ended.code == 0
    assert kept(six) == [10, 40, 50, 60]
    assert names(six) == {"step-10", "step-40", "step-50", "step-60"}
    keys = [each["key"] for each in plan["delete"]]
    assert [line.split()[1] for line in ended.lines if line.startswith("delete ")] == keys
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["key"] for line in lines] == keys
    assert lines[0].keys() == {"at", "key", "bytes", "why"}
    assert "2 checkpoints retired; 6 objects" in ended.lines[-1]
    assert "full" in ckptstore("log", six.url).out
    assert "There is nothing to do." in ckptstore("gc", six.url).out


def test_a_document_says_what_was_planned_and_what_was_done(ckptstore, six):
    plan = planned(ckptstore, six, "--keep-hourly", 1, "--grace", 0)
    assert (plan["retire"], plan["applied"]) == ([1, 2, 3, 4], False)
    done = planned(ckptstore, six, "--keep-hourly", 1, "--grace", 0, "--apply", plan["digest"])
    assert (done["applied"], done["retired"], done["collected"], done["failed"]) == (
        True,
        [1, 2, 3, 4],
        [1, 2, 3, 4],
        {},
    )
    assert done["deleted"] == plan["delete"]
    assert done["url"] == f"file://{six.url}"


def test_another_digest_is_refused_with_both_and_nothing_is_changed(ckptstore, six):  # I17
    plan = planned(ckptstore, six, "--keep-last", 3, "--grace", 0)
    six.save("step-70", step=70)
    ended = ckptstore("gc", six.url, "--keep-last", 3, "--grace", 0, "--apply", plan["digest"], "--json")
    assert (ended.code, ended.json["error"]) == (5, "conflict")
    assert ended.json["facts"]["quoted"] == plan["digest"]
    assert ended.json["facts"]["planned"] == planned(ckptstore, six, "--keep-last", 3, "--grace", 0)["digest"]
    assert f"`ckptstore gc {six.url}` without --apply" in ended.json["hint"]
    assert "--keep-... rules and --grace must be the same" in ended.json["hint"]
    assert len(kept(six)) == 7


def test_of_what_is_to_be_retired_the_copy_of_its_commit_goes_at_once_and_is_called_so(ckptstore, six):
    found = planned(ckptstore, six, "--keep-last", 5)
    assert [each["why"] for each in found["delete"]] == ["copy of the commit of step-10@1, which is retired"]
    assert [each["why"] for each in found["waiting"]] == [
        "step-10@1 is retired; waits for the grace of 3600 s since its retirement"
    ]


def test_the_digest_of_another_policy_is_another_one(ckptstore, six):
    plan = planned(ckptstore, six, "--keep-last", 3, "--grace", 0)
    assert ckptstore("gc", six.url, "--keep-last", 2, "--grace", 0, "--apply", plan["digest"]).code == 5
    assert len(kept(six)) == 6


def test_what_waits_and_what_stays_is_said(ckptstore, six):
    begun = begin(six.log, six.job, checkpoint_id="lost", world_size=1)
    upload = six.store.open_upload(begun.stem.shard_key(0), size=1)
    six.abandon("torn")
    claim(six.log, Incarnation.new(job="gpt"))
    six.store.put("data/0/mine.bin", b"?")
    ckptstore("retire", six.url, "step-10", "--yes")
    ended = ckptstore("gc", six.url)
    assert {line.split()[0] for line in ended.lines if line.startswith(("wait", "leave", "delete"))} == {
        "wait",
        "leave",
    }
    assert "foreign" in ended.out
    assert "it can never commit; waits for the grace of 3600 s since its newest object was stored" in ended.out
    assert "step-10@1 is retired; waits for the grace of 3600 s since its retirement" in ended.out
    assert ended.lines[-1] == "There is nothing to do yet."
    found = planned(ckptstore, six, "--grace", "1h")
    assert [each["prefix"].split(".")[0] for each in found["waiting"]] == ["step-10", "torn"]
    found = planned(ckptstore, six, "--grace", 0)
    assert (len(found["abort"]), len(found["delete"])) == (1, 4)
    assert ckptstore("gc", six.url, "--grace", 0, "--apply", found["digest"]).code == 0
    assert list(six.store.list_uploads("")) == []
    assert names(six) == {"mine.bin", *(f"step-{step}" for step in (20, 30, 40, 50, 60))}
    del upload


def test_checkpoints_are_retired_by_name_for_ever(ckptstore, six):
    ended = ckptstore("retire", six.url, "step-10", "step-20@2", "--yes", "--reason", "too old")
    assert (ended.code, ended.lines[0]) == (0, "Retired: step-10@1, step-20@2.")
    assert f"`ckptstore gc {six.url}`" in ended.out
    assert kept(six) == [30, 40, 50, 60]
    assert "too old" in ckptstore("log", six.url).out
    assert names(six) == {f"step-{step}" for step in range(10, 70, 10)}
    again = ckptstore("retire", six.url, "step-10", "--yes", "--json")
    assert (again.code, again.json["error"]) == (3, "not_found")


def test_a_name_that_several_have_retires_none_of_them(ckptstore, six):
    seqs = [six.save("dup").seq for _ in range(3)]
    six.save("newest")
    for _ in range(2):
        ended = ckptstore("retire", six.url, "dup", "--yes", "--json")
        assert (ended.code, ended.json["error"], ended.json["facts"]["seqs"]) == (2, "invalid_input", seqs[::-1])
    assert ckptstore("retire", six.url, f"dup@{seqs[0]}", "--yes", "--json").json["retired"] == [seqs[0]]


def test_checkpoints_are_retired_by_a_policy(ckptstore, six):
    assert ckptstore("retire", six.url, "--keep-daily", 1, "--yes", "--json").json["retired"] == [1, 2, 3, 4]
    ended = ckptstore("retire", six.url, "--keep-daily", 1, "--yes", "--json")
    assert (ended.code, ended.json["changed"], ended.json["retired"]) == (0, False, [])
    assert "nothing was changed" in ckptstore("retire", six.url, "--keep-daily", 1).out


def test_a_commit_while_a_person_thinks_lets_nothing_go_that_was_not_shown(six):  # I17
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ckptstore.cli", "retire", six.url, "--keep-last", "3"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        os.close(theirs)
        assert asked.stderr.read(len("Retire them")) == b"Retire them"
        six.save("step-70", step=70)
        os.write(ours, b"y\n")
        lines = asked.communicate(timeout=60)[0].decode().splitlines()
        lines = [line.strip() for line in lines]  # after the question's own line
    os.close(ours)
    assert asked.returncode == 0
    shown = [line.split()[-1] for line in lines if line.startswith("would be retired")]
    assert shown == ["step-10@1", "step-20@2", "step-30@3"]
    assert "Retired: step-10@1, step-20@2, step-30@3." in lines
    assert kept(six) == [40, 50, 60, 70]


@pytest.mark.parametrize("more", [["step-10"], ["--keep-last", 2], ["--keep-last", 2, "--json"]])
def test_without_a_person_to_ask_it_needs_yes(ckptstore, six, more):
    ended = ckptstore("retire", six.url, *more)
    assert ended.code == 2
    assert "--yes" in ended.out + ended.err
    assert len(kept(six)) == 6
    shown = [f"step-{step}@{step // 10}" for step in ((10,) if "step-10" in more else (10, 20, 30, 40))]
    if "--json" in more:
        assert ended.json["facts"] == {"seqs": [1, 2, 3, 4], "names": shown}
    else:
        assert ended.lines == [f"would be retired: {name}" for name in shown]


@pytest.mark.parametrize("more", [["--yes"], []], ids=["agreed", "not asked yet"])
@pytest.mark.parametrize(
    ("name", "why", "next_command"),
    [
        ("step-60", "step-60@6 cannot be retired: it is the newest checkpoint.", "ls {} --all"),
        ("step-40", "step-40@4 cannot be retired: it is pinned by the team.", "unpin {} step-40@4 --holder 'the team'"),
    ],
)
def test_what_somebody_relies_on_is_refused_before_anybody_is_asked(ckptstore, six, more, name, why, next_command):
    ckptstore("pin", six.url, "step-40", "--holder", "the team")
    ended = ckptstore("retire", six.url, "step-10", name, *more, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    assert ended.json["message"] == f"{why} Nothing was retired."
    assert f"`ckptstore {next_command.format(six.url)}`" in ended.json["hint"]
    assert len(kept(six)) == 6


def test_two_stay_and_the_newest_of_what_was_named_is_said_to_be_one_of_them(ckptstore, six):
    names = [f"step-{step}" for step in range(10, 60, 10)]
    ended = ckptstore("retire", six.url, *names, "--yes", "--json")
    assert (ended.code, ended.json["facts"]) == (2, {"seqs": [5]})
    assert ended.json["message"].startswith("step-50@5 cannot be retired: fewer than 2 would be left.")
    assert ckptstore("retire", six.url, *names[:-1], "--yes").code == 0


def test_a_checkpoint_that_is_named_twice_is_retired_once(ckptstore, six):
    ended = ckptstore("retire", six.url, "step-10", "step-10@1")
    assert ended.lines == ["would be retired: step-10@1"]
    assert ckptstore("retire", six.url, "step-10", "step-10@1", "--yes", "--json").json["retired"] == [1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["retire"],
        ["retire", "step-10", "--keep-last", "2"],
        ["retire", "--keep-last", "0", "--yes"],
        ["retire", "--keep-best", "val_loss", "--yes"],
        ["retire", "--keep-best", "val_loss:least:1", "--yes"],
        ["retire", "--keep-best", "val_loss:min:0", "--yes"],
        ["retire", "--keep-best", ":min:1", "--yes"],
        ["retire", "--keep-best", "val_loss:min:²", "--yes"],
        ["retire", "--keep-tag", "", "--yes"],
        ["gc", "--grace", "soon"],
        ["gc", "--grace", "-1"],
        ["gc", "--grace", "9999d"],
        ["gc", "--dry-run", "--apply", "x"],
        ["gc", "--apply", "x", "--audit", "/nowhere/at/all"],
    ],
    ids=" ".join,
)
def test_what_says_nothing_is_refused_and_nothing_is_changed(ckptstore, six, arguments):
    before = [info.key for info in six.store.list("")]
    ended = ckptstore(arguments[0], six.url, *arguments[1:], "--json")
    assert ended.code == 2, ended.out
    assert [info.key for info in six.store.list("")] == before


def test_a_mode_that_is_none_is_refused_with_both_that_are(ckptstore, six):
    ended = ckptstore("gc", six.url, "--keep-best", "val_loss:low:2", "--json")
    assert "min or max" in ended.json["message"]


def test_a_name_that_no_checkpoint_has_is_said_before_anything_goes(ckptstore, six):
    alone = ckptstore("retire", six.url, "--keep-tag", "tt10", "--yes")
    assert alone.code == 0
    assert "nothing was changed" in alone.out
    assert "No checkpoint has the tag 'tt10'; there are the tags 't10', " in alone.err
    shown = planned(ckptstore, six, "--keep-best", "valloss:min:3", "--keep-last", 3)
    assert shown["retire"] == [1, 2, 3]
    assert shown["notes"] == ["No checkpoint has a finite metric 'valloss'; there are the metrics 'val_loss'."]


def test_an_audit_that_has_no_room_ends_a_collection_before_what_has_no_line(ckptstore, six, tmp_path):
    policy = ["--keep-last", 2, "--grace", 0]
    digest = planned(ckptstore, six, *policy)["digest"]
    before = [info.key for info in six.store.list("data/") if not info.key.endswith("COMMITTED")]
    audit = tmp_path / "audit.jsonl"
    audit.write_bytes(b"\n" * 2**20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))  # no file may grow beyond it
    try:
        ended = ckptstore("gc", six.url, *policy, "--apply", digest, "--audit", audit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.code == 2
    assert "File too large. What has no line there was not deleted; what was retired stays retired" in ended.err
    assert [info.key for info in six.store.list("data/") if not info.key.endswith("COMMITTED")] == before


def test_a_metric_may_have_colons(ckptstore, six):
    six.save_described("best", global_step=1, metrics={"val:loss": 1.0})
    six.save("a")
    six.save("b")
    assert 7 not in planned(ckptstore, six, "--keep-best", "val:loss:max:1")["retire"]


def test_a_log_that_lost_its_tail_deletes_nothing(ckptstore, six):
    six.store.delete("log/000000000006.json")
    ended = ckptstore("gc", six.url, "--json")
    assert (ended.code, ended.json["error"]) == (1, "integrity")


def test_a_run_that_does_not_exist_has_nothing_to_do(ckptstore, tmp_path):
    ended = ckptstore("gc", tmp_path / "none", "--keep-last", 1)
    assert (ended.code, ended.lines[-1]) == (0, "There is nothing to do.")
    assert not (tmp_path / "none").exists()


def test_where_there_is_no_run_a_policy_says_so(ckptstore, tmp_path):
    ended = ckptstore("retire", str(tmp_path / "mistyped"), "--keep-last", "2", "--yes")
    assert (ended.code, ended.out) == (0, f"There is no run at file://{tmp_path}/mistyped; nothing was changed.\n")
