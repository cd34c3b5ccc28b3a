"""Commands where a log was lost, or its tail: nothing is called empty, and nothing takes a lost record's place."""

from __future__ import annotations

import pytest

from ckptstore.format.layout import LATEST_KEY, RUN_KEY, slot_key
from ckptstore.format.records import LatestHint, encode_latest
from ckptstore.protocol.claim import claim

UPLOADS = ["doctor", "--uploads"]
READING = [
    ["ls"],
    ["latest"],
    ["log"],
    ["show"],
    ["show", "a"],
    ["tree", "a@1"],
    ["verify"],
    ["verify", "--all", "--level", "chain"],
    ["verify", "--level", "chain"],
    ["gc"],
    ["gc", "--keep-last", "1"],
    ["retire", "--keep-last", "1", "--yes"],
    ["repair"],
    ["repair", "--yes"],
    UPLOADS,
]
CHANGING = [
    ["verify", "--level", "full", "--record"],
    ["verify", "--all", "--quarantine"],
    ["repair", "--restore", "--yes"],
    ["retire", "a", "--yes"],
    ["retire", "--keep-last", "1"],
    ["gc", "--apply", "0" * 64],
    ["pin", "a", "--holder", "me"],
    ["unpin", "a", "--holder", "me"],
    ["rollback", "a", "--yes"],
    ["restore", "a@1"],
]


def called(ckptstore, url, command):
    return ckptstore(command[0], url, *command[1:])


def objects(run):
    return {info.key: run.store.get(info.key, max_bytes=1 << 20) for info in run.store.list("")}


def lose(run, *gone):
    for key in objects(run):
        if key.startswith(gone):
            run.store.delete(key)


@pytest.mark.parametrize(
    "gone", [("log/", RUN_KEY), ("log/",), ("log/", RUN_KEY, LATEST_KEY), (slot_key(1),)], ids="+".join
)
@pytest.mark.parametrize("command", READING + CHANGING, ids=" ".join)
def test_a_log_that_was_lost_is_damage_to_every_command_and_none_says_that_nothing_is_there(
    ckptstore, run, command, gone
):
    run.save("a")
    lose(run, *gone)
    before = objects(run)
    ended = called(ckptstore, run.url, command)
    assert ended.code == 1
    assert "the log was lost" in ended.err
    assert f"`ckptstore repair {run.url} --rebuild-log`" in ended.err
    assert ("move all objects under log/ elsewhere" in ended.err) == (gone == (slot_key(1),))
    assert called(ckptstore, run.url, [*command, "--json"]).json["error"] == "integrity"
    assert objects(run) == before


@pytest.mark.parametrize("command", [each for each in READING if each is not UPLOADS], ids=" ".join)
def test_a_log_of_a_later_release_is_not_called_lost(ckptstore, run, command):
    claim(run.log, run.job)
    run.append_foreign(kind="COMMIT", format=2)
    run.store.put(LATEST_KEY, encode_latest(LatestHint(1, "a" * 64, "a", 1, "2027-01-01T00:00:00.000Z")))
    ended = called(ckptstore, run.url, command)
    assert "lost" not in ended.err
    assert (ended.code, ended.err.count("holds a record")) == (6, 1)


def test_metrics_are_printed_where_the_log_was_lost_so_that_an_alert_fires(ckptstore, run):
    run.save("a")
    lose(run, "log/", RUN_KEY)
    ended = ckptstore("metrics", run.url, "--json")
    found = {each["name"]: each["value"] for each in ended.json["metrics"]}
    assert (ended.code, found["checkpoint_log_tail_lost"], found["checkpoint_run_exists"]) == (0, 1, 1)


def test_where_nothing_is_the_answers_are_as_before(ckptstore, tmp_path):
    url = tmp_path / "none"
    found = {
        command[0]: called(ckptstore, url, command) for command in (["ls"], ["log"], ["gc"], ["latest"], ["repair"])
    }
    assert {name: ended.code for name, ended in found.items()} == {"ls": 0, "log": 0, "gc": 0, "latest": 1, "repair": 3}
    assert "Nothing is committed here." in found["ls"].out
    assert "The log has no records." in found["log"].out
    assert "Nothing is committed at" in found["latest"].err
    assert "There is no run at" in found["repair"].err


@pytest.fixture
def beheaded(run):
    """A run whose two newest records are gone, and were commits."""
    for name in "abcd":
        run.save(name)
    lose(run, slot_key(3), slot_key(4))
    return run


@pytest.mark.parametrize("command", CHANGING, ids=" ".join)
def test_nothing_is_appended_in_the_place_of_a_lost_record(ckptstore, beheaded, command):
    before = objects(beheaded)
    ended = called(ckptstore, beheaded.url, [*command, "--json"])
    assert (ended.code, ended.json["error"]) == (1, "integrity")
    assert (ended.json["facts"]["slot"], ended.json["facts"]["end"]) == (4, 3)
    assert "names slot 4" in ended.json["message"]
    assert "ends before slot 3" in ended.json["message"]
    assert f"`ckptstore repair {beheaded.url} --rebuild-log`" in ended.json["hint"]
    assert objects(beheaded) == before


@pytest.mark.parametrize("gone", [("log/",), (slot_key(1),)], ids="+".join)
def test_what_the_refusal_of_a_lost_log_says_brings_the_checkpoint_back(ckptstore, run, gone):
    run.save("a")
    lose(run, *gone)
    if "move all objects under log/ elsewhere" in ckptstore("ls", run.url).err:
        lose(run, "log/")
    assert ckptstore("repair", run.url, "--rebuild-log", "--yes").code == 0
    assert ckptstore("latest", run.url, "--json").json["checkpoint"]["checkpoint_id"] == "a"
    assert ckptstore("pin", run.url, "a", "--holder", "me").code == 0


def test_what_the_refusal_says_brings_the_lost_checkpoints_back(ckptstore, beheaded):
    lose(beheaded, "log/")
    rebuilt = ckptstore("repair", beheaded.url, "--rebuild-log", "--yes", "--json")
    assert (rebuilt.code, rebuilt.json["lost_tail"]) == (0, None)
    found = ckptstore("ls", beheaded.url, "--json").json
    assert [each["checkpoint_id"] for each in found["committed"]] == ["d", "c", "b", "a"]
    assert found["lost_tail"] is None
    assert ckptstore("pin", beheaded.url, "d", "--holder", "me").code == 0


def test_a_hint_of_another_run_can_be_deleted_and_then_records_are_appended_again(ckptstore, beheaded):
    beheaded.store.delete(LATEST_KEY)
    assert ckptstore("pin", beheaded.url, "b", "--holder", "me").code == 0


def test_a_hint_below_the_end_of_the_log_hinders_nothing(ckptstore, run):
    run.save("a")
    old = run.store.get(LATEST_KEY, max_bytes=1 << 20)
    run.save("b")
    run.store.put(LATEST_KEY, old)
    assert ckptstore("pin", run.url, "b", "--holder", "me").code == 0
