"""`rollback`, `restore`, `pin`, `unpin`."""

from __future__ import annotations

import pytest

from ckptstore import CheckpointStore
from ckptstore.protocol.claim import Incarnation


@pytest.fixture
def three(run):
    for step in (10, 20, 30):
        run.save(f"step-{step}", step=step)
    return run


def test_a_roll_back_makes_its_target_the_latest_and_the_next_save_goes_on(ckptstore, three):
    ended = ckptstore("rollback", three.url, "step-10", "--yes", "--note", "loss spike")
    assert ended.code == 0
    assert "step-10@1 is the latest; set aside: step-20@2, step-30@3. Nothing" in ended.out
    assert ckptstore("latest", three.url).out == "step-10@1\n"
    assert "loss spike" in ckptstore("log", three.url).lines[-1]
    three.job = Incarnation.new(job="gpt")
    three.save("step-11", step=11)
    assert ckptstore("latest", three.url).out == "step-11@6\n"


def test_a_roll_back_says_in_its_document_what_it_did(ckptstore, three):
    found = ckptstore("rollback", three.url, "step-20@2", "--yes", "--json").json
    assert (found["changed"], found["set_aside"], found["checkpoint"]["seq"]) == (True, [3], 2)
    found = ckptstore("rollback", three.url, "step-20", "--json").json
    assert (found["changed"], found["set_aside"]) == (False, [])


def test_going_back_to_the_latest_changes_nothing_and_asks_nothing(ckptstore, three):
    ended = ckptstore("rollback", three.url, "step-30")
    assert ended.code == 0
    assert "nothing was changed" in ended.out
    assert len(list(CheckpointStore.open(three.url).records())) == 4


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_without_a_person_to_ask_a_roll_back_needs_yes(ckptstore, three, more):
    ended = ckptstore("rollback", three.url, "step-10", *more)
    assert ended.code == 2
    assert "--yes" in ended.out + ended.err
    assert ckptstore("latest", three.url).out == "step-30@3\n"


def test_what_is_set_aside_itself_cannot_be_gone_back_to(ckptstore, three):
    three.catalog.set_aside([2], reason="quarantined")
    ended = ckptstore("rollback", three.url, "step-20@2", "--yes", "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    assert ckptstore("latest", three.url).out == "step-30@3\n"


def test_a_roll_back_is_undone_one_by_one(ckptstore, three):
    ckptstore("rollback", three.url, "step-10", "--yes")
    ended = ckptstore("restore", three.url, "step-30@3")
    assert (ended.code, ended.out) == (0, "step-30@3 may be selected again; it was abandoned.\n")
    assert ckptstore("latest", three.url).out == "step-30@3\n"
    ended = ckptstore("restore", three.url, "step-30@3")
    assert (ended.code, ended.out) == (0, "step-30@3 was not set aside; nothing was changed.\n")
    found = ckptstore("restore", three.url, "step-20@2", "--json").json
    assert (found["changed"], found["checkpoint"]["seq"], found["checkpoint"]["set_aside"]) == (True, 2, None)
    assert ckptstore("restore", three.url, "step-20@2", "--json").json["changed"] is False
    assert len(list(CheckpointStore.open(three.url).records())) == 7


@pytest.mark.parametrize("name", ["step-30", "step-30@2", "step-99@99"])
def test_what_is_restored_is_named_exactly(ckptstore, three, name):
    ckptstore("rollback", three.url, "step-10", "--yes")
    ended = ckptstore("restore", three.url, name, "--json")
    assert (ended.code, ended.json["error"]) == (3, "not_found")
    assert ("step-30@3" in ended.json["message"]) is (name == "step-30")
    assert ckptstore("latest", three.url).out == "step-10@1\n"


def test_pins_come_and_go_and_say_whether_they_are_news(ckptstore, three):
    pin = ["pin", three.url, "step-20", "--holder", "eval", "--reason", "nightly"]
    ended = ckptstore(*pin)
    assert (ended.code, ended.out) == (0, "step-20@2 by eval: is pinned.\n")
    assert "already" in ckptstore(*pin).out
    found = ckptstore(*pin, "--json").json
    assert (found["changed"], found["holder"]) == (False, "eval")
    assert found["checkpoint"]["pins"] == [{"holder": "eval", "reason": "nightly"}]
    assert "pinned by eval" in ckptstore("ls", three.url).out
    unpin = ["unpin", three.url, "step-20", "--holder", "eval"]
    assert ckptstore(*unpin, "--json").json["changed"] is True
    assert "was not pinned" in ckptstore(*unpin).out
    assert "pinned" not in ckptstore("ls", three.url).out


def test_nothing_is_claimed_by_a_tool(ckptstore, three):  # I15
    before = CheckpointStore.open(three.url).reign
    ckptstore("pin", three.url, "step-20", "--holder", "eval")
    ckptstore("rollback", three.url, "step-10", "--yes")
    ckptstore("restore", three.url, "step-30@3")
    assert CheckpointStore.open(three.url).reign == before
    three.save("step-40", step=40)


def test_a_single_writer_is_a_promise_that_is_repeated(ckptstore, three):
    ended = ckptstore("pin", three.url, "step-20", "--holder", "x", "--assume-single-writer")
    assert ended.code == 0
    assert "single writer is promised" in ended.err
    assert "pinned by x" in ckptstore("ls", three.url).out


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_pin_needs_a_holder(ckptstore, three, command):
    ended = ckptstore(command, three.url, "step-20", "--json")
    assert (ended.code, ended.json["error"]) == (2, "usage")


def test_a_holder_that_no_record_can_hold_is_refused(ckptstore, three):
    ended = ckptstore("pin", three.url, "step-20", "--holder", "x" * 20_000, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    assert len(list(CheckpointStore.open(three.url).records())) == 4
