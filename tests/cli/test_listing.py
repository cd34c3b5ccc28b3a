"""`ls`, `latest`, `log`."""

from __future__ import annotations

import pytest

from ckptstore.format.layout import LATEST_KEY, slot_key
from ckptstore.format.records import Pin
from ckptstore.protocol.claim import Incarnation


def row(ended, name):
    """Return the one line of a table that names a checkpoint."""
    (line,) = [line for line in ended.lines if name in line.split()]
    return line


@pytest.mark.parametrize("command", [["ls"], ["ls", "--all"], ["log"]])
def test_an_absent_run_is_told_and_is_fine(ckptstore, tmp_path, command):
    ended = ckptstore(*command, tmp_path / "absent")
    assert ended.code == 0
    assert "Nothing is committed" in ended.out or "no records" in ended.out
    assert list(tmp_path.iterdir()) == []
    assert ("Check the URL" in ended.err) == (command[0] == "ls")


def test_an_absent_run_has_a_document_too(ckptstore, tmp_path):
    ended = ckptstore("ls", tmp_path / "absent", "--json")
    assert ended.code == 0
    assert ended.json == {
        "url": f"file://{tmp_path}/absent",
        "run": None,
        "lost_tail": None,
        "latest": None,
        "reign": None,
        "committed": [],
        "set_aside": [],
        "uncommitted": [],
        "ignored": [],
    }


def test_what_is_committed_is_listed_newest_first_in_columns(ckptstore, run):
    run.save("step-5", step=5, world_size=4)
    run.save("step-10", step=10)
    ended = ckptstore("ls", run.url)
    assert ended.code == 0
    header, newest, older = ended.lines[2:5]
    assert header.split() == ["SEQ", "STEP", "RANKS", "SIZE", "COMMITTED", "(UTC)", "NAME", "NOTES"]
    assert newest.split()[:3] == ["2", "10", "3"]
    assert newest.split()[-2:] == ["step-10", "latest"]
    assert older.split()[:3] == ["1", "5", "4"]
    assert older.split()[-1] == "step-5"
    assert "Not shown" not in ended.out


def test_the_document_of_ls_holds_everything(ckptstore, run):
    run.abandon("dead")
    seqs = [run.save(name, step=step).seq for name, step in (("a", 1), ("b", 2), ("c", 3))]
    run.catalog.rollback(seqs[1], note="why")
    run.catalog.pin(seqs[0], holder="eval", reason="nightly")
    run.catalog.set_aside([seqs[0]], reason="quarantined")
    run.abandon("young", ranks=1)
    for command in (["ls", run.url, "--json"], ["ls", run.url, "--all", "--json"]):
        found = ckptstore(*command).json
        assert found["run"] == run.log.run
        assert found["latest"] == seqs[1]
        assert [each["checkpoint_id"] for each in found["committed"]] == ["b"]
        assert [(each["checkpoint_id"], each["set_aside"]) for each in found["set_aside"]] == [
            ("c", "abandoned"),
            ("a", "quarantined"),
        ]
        assert found["set_aside"][1]["pins"] == [{"holder": "eval", "reason": "nightly"}]
        assert [(each["checkpoint_id"], each["state"], each["objects"]) for each in found["uncommitted"]] == [
            ("dead", "dead", 2),
            ("young", "in progress", 1),
        ]
        assert all(each["bytes"] > 0 and each["last_write"] for each in found["uncommitted"])
        assert found["reign"]["job"] == "gpt"
        assert found["reign"]["committed_since"] is True


def test_by_default_the_rest_is_one_line_and_with_all_it_is_told_why(ckptstore, run):
    run.abandon("dead-one")
    run.save("a")
    run.save("b")
    run.catalog.rollback(1)
    run.abandon("young-one", ranks=1)
    brief = ckptstore("ls", run.url)
    (rest,) = [line for line in brief.lines if "Not shown" in line]
    assert "1 set aside; 1 dead, 1 in progress (3 objects, " in rest
    assert not {"dead-one", "young-one", "b"} & set(brief.out.split())
    whole = ckptstore("ls", run.url, "--all")
    assert "Not shown" not in whole.out
    assert row(whole, "b").endswith("abandoned")
    dead = whole.out.index("it can never commit")
    assert whole.out.index("its commit may still come") < whole.out.index("young-one") < dead
    assert dead < whole.out.index("dead-one")


def test_everything_fits_in_a_hundred_columns_where_names_are_usual(ckptstore, run):
    run.abandon("step-11000")
    run.save("step-12000", step=12000)
    run.save("step-12500", step=12500)
    run.catalog.rollback(1, note="loss spike")
    run.catalog.pin(1, holder="evaluation", reason="nightly")
    run.append_foreign(kind=Pin.KIND, target=77, holder="x", reason="")
    run.abandon("step-13000")
    commands = (["ls", "--all"], ["ls"], ["log"], ["show", "--keys"], ["tree"], ["verify", "--level", "full"])
    for command, *more in commands:
        lines = [line for line in ckptstore(command, run.url, *more).lines if "file://" not in line]
        assert [line for line in lines if len(line) > 100] == []


def test_a_claim_without_a_commit_since_is_told(ckptstore, run):
    run.save("a")
    assert "no commit since" not in ckptstore("ls", run.url).out
    run.job = Incarnation.new(job="next", host="node-7")
    run.abandon("b")
    ended = ckptstore("ls", run.url)
    assert "Last claimed by job next on node-7 (term 2) at " in ended.out
    assert " UTC; no commit since." in ended.out
    assert ckptstore("ls", run.url, "--json").json["reign"]["committed_since"] is False


def test_a_record_that_is_passed_over_is_told_with_the_reason(ckptstore, run):
    run.save("a")
    slot = run.append_foreign(kind=Pin.KIND, target=77, holder="x", reason="")
    brief, whole = ckptstore("ls", run.url), ckptstore("ls", run.url, "--all")
    assert "1 ignored record" in brief.out
    (line,) = [line for line in whole.lines if "not kept checkpoints" in line]
    assert line.split()[:2] == [str(slot), "PIN"]
    (ignored,) = ckptstore("ls", run.url, "--json").json["ignored"]
    assert (ignored["seq"], ignored["kind"]) == (slot, "PIN")
    assert "IGNORED" in ckptstore("log", run.url).lines[-1]
    assert ckptstore("log", run.url, "--json").json["records"][-1]["ignored"] == ignored["reason"]


@pytest.mark.parametrize("command", ["ls", "latest", "log", "show", "tree", "verify"])
def test_a_lost_tail_is_told_loudly_by_every_command(ckptstore, run, command):
    run.save("a")
    run.store.delete(slot_key(run.save("b").seq))
    ended = ckptstore(command, run.url)
    assert ended.code == (1 if command == "verify" else 0)
    assert "TAIL WAS LOST" in ended.err
    assert "slot 2" in ended.err
    assert ckptstore(command, run.url, "--json").json["lost_tail"] == 2


def test_the_latest_is_printed_so_that_it_can_be_given_to_another_command(ckptstore, run):
    run.save("step-10", step=10)
    run.save("step-5", step=5)
    ended = ckptstore("latest", run.url)
    assert (ended.code, ended.out, ended.err) == (0, "step-5@2\n", "")  # I11
    found = ckptstore("latest", run.url, "--json").json["checkpoint"]
    assert (found["checkpoint_id"], found["seq"], found["global_step"]) == ("step-5", 2, 5)


def test_without_a_commit_there_is_no_latest(ckptstore, run):
    run.abandon("a")
    ended = ckptstore("latest", run.url)
    assert (ended.code, ended.out) == (1, "")
    assert "Nothing is committed" in ended.err
    ended = ckptstore("latest", run.url, "--json")
    assert (ended.code, ended.json["checkpoint"]) == (1, None)


def test_if_everything_is_set_aside_there_is_no_latest_and_the_reasons_are_told(ckptstore, run):
    run.catalog.set_aside([run.save("a").seq], reason="quarantined")
    ended = ckptstore("latest", run.url, "--json")
    assert (ended.code, ended.json["error"]) == (1, "resume")
    assert "a@1 (quarantined)" in ended.json["message"]
    assert "quarantined" in ckptstore("ls", run.url, "--all").out


def test_the_log_is_every_record_in_order(ckptstore, run):
    run.save("a", step=7)
    run.catalog.pin(1, holder="eval", reason="nightly")
    ended = ckptstore("log", run.url)
    assert [line.split()[0] for line in ended.lines] == ["SEQ", "0", "1", "2"]
    assert "job gpt on node-1" in ended.lines[1]
    assert "a, step 7, 3 shards" in ended.lines[2]
    assert ended.lines[3].endswith("holder eval, reason nightly, target 1")
    records = ckptstore("log", run.url, "--json").json["records"]
    assert [each["record"]["kind"] for each in records] == ["CLAIM", "COMMIT", "PIN"]
    assert records[1]["record"]["prev"] == records[0]["blake3"]
    assert {each["ignored"] for each in records} == {None}


def test_hints_change_no_answer(ckptstore, run):  # I10
    for name in ("a", "b"):
        run.save(name)
    for count in range(64):
        run.catalog.pin(1, holder="x", reason=str(count))
    before = ckptstore("ls", run.url, "--json").json
    assert run.store.head("state/000000000064.json").size > 0
    for key in (LATEST_KEY, "state/000000000064.json"):
        for body in (b"", b"{", b'{"seq":0}', b"\xff" * 100, b"x" * 100_000):
            run.store.put(key, body)
            assert ckptstore("ls", run.url, "--json").json == before
            assert ckptstore("latest", run.url).out == "b@2\n"
        run.store.delete(key)
        assert ckptstore("ls", run.url, "--json").json == before


def test_one_thing_is_told_as_one(ckptstore, run):
    run.save("a", world_size=1)
    run.save("b", world_size=2)
    told = ckptstore("log", run.url).out
    assert " 1 shard, " in told
    assert " 2 shards, " in told
    run.abandon("c", ranks=1)
    assert "(1 object, " in ckptstore("ls", run.url).out


def test_a_checkpoint_from_which_a_resume_was_proved_is_called_so(ckptstore, run):
    run.save("a")
    run.catalog.prove(run.save("b").seq, verdict="5 steps the same")
    found = ckptstore("ls", run.url)
    assert row(found, "b").endswith("latest; proved")
    assert "proved" not in row(found, "a")
    assert "5 steps the same" in ckptstore("show", run.url, "b").out
    assert ckptstore("ls", run.url, "--json").json["committed"][0]["proved"] == "5 steps the same"


def test_of_many_holders_a_few_are_shown(ckptstore, run):
    for holder in range(20):
        run.catalog.pin(run.save("a").seq if not holder else 1, holder=f"job-{holder:02d}", reason="")
    assert "pinned by job-00, " in (out := ckptstore("ls", run.url).out)
    assert "job-07 and 12 more" in out
    assert "job-19" not in out
