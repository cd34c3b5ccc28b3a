"""Another process saves: with few descriptors, killed in the middle, or unable to read what it is sent."""

import json
import socket

import pytest
from async_programs import WAYS, start

BY_PROCESS = WAYS[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def heard(name, root, word):
    """Run a program of two ranks, which must end well, and return what each heard."""
    ended = start(name, root, BY_PROCESS, word, ranks=2, port=free_port())
    assert [code for code, _, _ in ended] == [0, 0], [err[-3000:] for _, _, err in ended]
    return [json.loads(out) for _, out, _ in ended]


def test_twenty_saves_of_up_to_5000_tensors_need_few_descriptors_and_leak_none(tmp_path):
    for here in heard("save_many_tensors", str(tmp_path / "run"), "20"):
        assert here["kept"] == [f"step-{step}" for step in reversed(range(20))]
        for parent_or_worker in zip(*here["open files"], strict=True):
            assert max(parent_or_worker) < 100
            assert max(parent_or_worker[5:]) == min(parent_or_worker[5:])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_worker_killed_in_an_upload_fails_the_save_on_all_ranks_in_time_and_the_next_works(tmp_path, rank):
    ranks = heard("lose_the_worker", str(tmp_path / "run"), rank)
    assert ranks[0]["error"] == ranks[1]["error"]
    kind, text = ranks[0]["error"]
    assert kind == "CommitUnknownError"
    assert "ckptstore log" in text
    for here in ranks:
        assert here["seconds"] < 40
        assert here["kept"] == ["after", "good"]


def test_a_class_that_the_worker_cannot_import_ends_in_an_error_and_the_next_save_works(tmp_path):
    ranks = heard("send_what_cannot_be_imported", str(tmp_path / "run"), "")
    assert ranks[0]["error"] == ranks[1]["error"]
    for here in ranks:
        assert here["error"] is not None
        assert here["seconds"] < 60
        assert here["kept"] == ["after"]


def test_a_typed_value_goes_through_the_worker_as_it_is(tmp_path):
    assert heard("save_typed_values", str(tmp_path / "run"), "") == [[[0], [1], {}]] * 2
