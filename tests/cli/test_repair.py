"""`repair`."""

from __future__ import annotations

import shutil

import pytest

from ckptstore.cli import repairing
from ckptstore.maintenance.collect import retire
from ckptstore.objectstore.urls import open_store
from ckptstore.testing.tapped import TappedStore


@pytest.fixture
def replica(run, tmp_path):
    """Return a function that copies the run as it is."""

    def copied():
        target = tmp_path / "replica"
        shutil.copytree(run.url, target)
        return str(target)

    return copied


def forget_log(run):
    for info in list(run.store.list("log/")):
        run.store.delete(info.key)


def test_a_run_that_is_well_needs_nothing(ckptstore, run):
    run.save("a")
    ended = ckptstore("repair", run.url)
    looked = f"No data was looked at: `ckptstore verify {run.url} --all --level full` does that."
    assert (ended.code, ended.lines) == (0, ["The hints say what the log says.", looked])
    found = ckptstore("repair", run.url, "--yes", "--json").json
    assert (found["ok"], found["applied"], found["hints"], found["checkpoints"]) == (True, True, [], [])


def test_hints_are_shown_and_written_with_yes(ckptstore, run):
    run.save("a")
    run.store.delete("latest.json")
    ended = ckptstore("repair", run.url)
    assert (ended.code, "would be written: latest.json (missing)" in ended.out) == (0, True)
    assert "latest.json" not in {info.key for info in run.store.list("")}
    assert "written: latest.json" in ckptstore("repair", run.url, "--yes").out
    assert ckptstore("repair", run.url, "--json").json["hints"] == []


def test_damaged_objects_are_shown_then_mended_and_restoring_is_offered_then_done(ckptstore, run, replica):
    run.save("a")
    key = run.save("b").commit.stem.shard_key(1)
    source = replica()
    run.flip(key, 255)
    assert ckptstore("verify", run.url, "--level", "full", "--quarantine").code == 1
    ended = ckptstore("repair", run.url, "--from", source)
    assert ended.code == 1
    assert f"can be mended: {key}" in ended.out
    assert "Add --yes" in ended.out
    assert ckptstore("verify", run.url, "b@2", "--level", "full").code == 1
    ended = ckptstore("repair", run.url, "--from", source, "--yes")
    assert ended.code == 0
    assert f"mended: {key}" in ended.out
    assert f"ckptstore restore {run.url} b@2" in ended.out
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["seq"] == 1
    assert ckptstore("verify", run.url, "b@2", "--level", "full").code == 0
    found = ckptstore("repair", run.url, "b@2", "--from", source, "--yes", "--restore", "--json").json
    assert (found["checkpoints"][0]["restored"], found["checkpoints"][0]["objects"]) == (True, [])
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["seq"] == 2


def test_restore_without_a_replica_reads_what_is_quarantined_and_restores_what_is_whole(ckptstore, run):
    for name in "abcd":
        run.save(name)
    bad, good, gone = (run.catalog.find(name) for name in "bcd")
    run.catalog.rollback(good.seq)
    for each in (bad, good, gone):
        run.catalog.set_aside([each.seq], reason="quarantined", note="x")
    run.flip(bad.commit.stem.shard_key(1), 255)
    shown = ckptstore("repair", run.url, "--restore", "--json").json["checkpoints"]
    assert [(each["checkpoint_id"], each["restorable"], each["restored"]) for each in shown] == [
        ("d", False, False),  # the run went back from it as well
        ("c", True, False),
        ("b", False, False),
    ]
    ended = ckptstore("repair", run.url, "--restore", "--yes", "--json")
    assert ended.code == 1
    assert [each["checkpoint_id"] for each in ended.json["checkpoints"] if each["restored"]] == ["c"]
    (mend,) = ended.json["checkpoints"][2]["objects"]
    assert (mend["outcome"], mend["reason"]) == ("cannot be mended", "No replica was named.")
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["seq"] == good.seq
    assert ckptstore("repair", run.url, "b@2", "--restore").code == 1


def test_a_checkpoint_that_is_retired_meanwhile_does_not_end_the_repair_of_the_others(
    ckptstore, run, replica, monkeypatch
):
    keys = [run.save(name).commit.stem.shard_key(1) for name in "abcd"]
    source = open_store(replica())
    for key in (keys[0], keys[1]):
        run.flip(key, 255)

    def tap(call, act):
        if call.key == keys[1] and run.log.refresh().commits.get(2):
            retire(run.log, [2], reason="old")
        return act()

    monkeypatch.setattr(repairing, "open_store", lambda *_, **__: TappedStore(source, tap))
    ended = ckptstore("repair", run.url, "--from", source.url, "--yes", "--json")
    assert ended.code == 0
    assert [(each["checkpoint_id"], each["retired"], len(each["objects"])) for each in ended.json["checkpoints"]] == [
        ("d", False, 0),
        ("c", False, 0),
        ("b", True, 0),
        ("a", False, 1),
    ]
    assert ended.json["checkpoints"][3]["objects"][0]["outcome"] == "mended"


def test_what_the_replica_does_not_have_stays_damaged_and_is_told(ckptstore, run, replica):
    key = run.save("a").commit.stem.shard_key(1)
    run.flip(key, 255)
    source = replica()
    found = ckptstore("repair", run.url, "--from", source, "--yes", "--json")
    assert found.code == 1
    assert "Add --yes" not in ckptstore("repair", run.url, "--from", source).out
    (mend,) = found.json["checkpoints"][0]["objects"]
    assert (mend["key"], mend["outcome"]) == (key, "cannot be mended")


@pytest.mark.parametrize("more", [["--yes"], []], ids=["done", "shown"])
def test_what_is_no_replica_is_refused_before_anything_is_read(ckptstore, run, make_run, tmp_path, more):
    run.flip(run.save("a").commit.stem.shard_key(1), 255)
    run.store.delete("latest.json")
    other = make_run(str(tmp_path / "other"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("?")
    ours, theirs = run.log.run, other.log.run
    for source, code, told in (
        ("empty", 3, f"There is no run at file://{tmp_path}/empty."),
        ("other", 2, f"is no replica of run {ours}: its run.json is another one, of run {theirs}."),
        ("broken", 2, f"is no replica of run {ours}: its run.json is another one, and cannot be read."),
    ):
        ended = ckptstore("repair", run.url, "--from", tmp_path / source, *more, "--json")
        assert (ended.code, ended.json.get("checkpoints")) == (code, None)
        assert told in ended.json["message"]
        assert "run.json" in ended.json["hint"]
    assert "latest.json" not in {info.key for info in run.store.list("")}


def test_a_log_that_was_lost_is_shown_then_written(ckptstore, run):
    for step, name in enumerate("abc"):
        run.save(name, step=step)
    run.flip(run.catalog.find("b").commit.stem.shard_key(0), 255)
    forget_log(run)
    ended = ckptstore("repair", run.url, "--rebuild-log")
    assert ended.code == 0
    assert ended.out.count("would be committed") == 2
    assert "left out" in ended.err
    assert "no collection takes it" in ended.err
    assert "retired" in ended.out.partition("What stood in the lost log alone is lost")[2]
    assert list(run.store.list("log/")) == []
    found = ckptstore("repair", run.url, "--rebuild-log", "--yes", "--json").json
    assert [(each["checkpoint_id"], each["committed"]) for each in found["found"]] == [("a", True), ("c", True)]
    assert len(found["left_out"]) == 1
    assert [each["checkpoint_id"] for each in ckptstore("ls", run.url, "--json").json["committed"]] == ["c", "a"]
    assert ckptstore("verify", run.url, "--all", "--level", "full").code == 0


def test_what_a_rebuilding_left_out_is_not_told_as_committed_by_the_next_one(ckptstore, run):
    shard = run.save("a", step=1).commit.stem.shard_key(0)
    run.save("b", step=2)
    body = run.store.get(shard, max_bytes=1 << 20)
    run.store.delete(shard)
    forget_log(run)
    assert ckptstore("repair", run.url, "--rebuild-log", "--yes").code == 0
    run.store.put(shard, body)
    ended = ckptstore("repair", run.url, "--rebuild-log", "--yes")
    assert ended.code == 1
    assert [line.split(": ")[0] for line in ended.lines[:3]] == [
        "NOT committed",
        "committed",
        "1 checkpoint committed.",
    ]
    assert "left out by a rebuilding before" in ended.err
    forget_log(run)
    assert ckptstore("repair", run.url, "--rebuild-log", "--yes").code == 0
    assert [each["checkpoint_id"] for each in ckptstore("ls", run.url, "--json").json["committed"]] == ["b", "a"]


def test_where_there_is_no_run_there_is_nothing_to_repair(ckptstore, tmp_path):
    ended = ckptstore("repair", tmp_path / "none", "--yes", "--json")
    assert (ended.code, ended.json["error"]) == (3, "not_found")


def test_a_log_that_is_there_is_never_rebuilt(ckptstore, run):
    run.save("a")
    ended = ckptstore("repair", run.url, "--rebuild-log", "--yes", "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    assert ckptstore("ls", run.url, "--json").json["committed"][0]["checkpoint_id"] == "a"


@pytest.mark.parametrize(
    "more",
    [["a"], ["--rebuild-log", "--restore"], ["--rebuild-log", "--from", "/x"], ["a", "--rebuild-log"]],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(ckptstore, run, more):
    run.save("a")
    ended = ckptstore("repair", run.url, *more, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")


def test_where_no_copy_is_whole_there_is_no_log(ckptstore, run):
    committed = run.save("a")
    run.store.delete(committed.commit.stem.shard_key(0))
    forget_log(run)
    ended = ckptstore("repair", run.url, "--rebuild-log", "--yes", "--json")
    assert ended.code in (1, 2)
    assert list(run.store.list("log/")) == []
