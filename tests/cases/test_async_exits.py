"""How a process ends whose background save failed, or did not end, and nobody asked."""

import socket

import pytest
from async_programs import WAYS, start

import storage_writers as sw
from ckptstore import CheckpointStore

THREADS = WAYS[:2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ended(name, root, way, word):
    """Run a program of one process. One that saves in another process needs a group, of one rank."""
    ranks = 1 if way.endswith("by process") else 0
    ((code, out, err),) = start(name, root, way, word, ranks=ranks, port=free_port())
    return code, out, err


def kept(root):
    return [each.checkpoint_id for each in CheckpointStore.open(root).checkpoints()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("word", "said"), [("full", "No space left on device"), ("denied", "403 AccessDenied")])
def test_a_process_that_ends_without_asking_says_what_failed_and_exits_non_zero(tmp_path, way, word, said):
    root = str(tmp_path / "run")
    code, _, err = ended("fail", root, way, word)
    assert code == sw.EXIT_CODE == 74
    assert said in err
    assert "the save of bad failed" in err or way.endswith("by process")
    assert "exit code 74" in err
    assert kept(root) == ["good"]


def test_what_was_told_is_not_said_again(tmp_path):
    code, _, err = ended("fail_and_ask", str(tmp_path / "run"), "sw.async_save", "full")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("name", ["fail_and_exit_with_3", "crash_while_failing"])
def test_a_process_that_exits_with_a_code_or_an_exception_of_its_own_exits_non_zero(tmp_path, name):
    code, _, err = ended(name, str(tmp_path / "run"), "dcp.async_save", "full")
    assert code == 74
    assert "No space left" in err
    assert ("ZeroDivisionError" in err) is (name == "crash_while_failing")


def test_threads_and_handlers_at_the_end_run_once_and_output_is_flushed(tmp_path):
    code, out, _ = ended("fail_beside_other_things", str(tmp_path / "run"), "sw.async_save", "full")
    assert (code, out) == (74, "main thread later handler handler ")


@pytest.mark.parametrize("way", WAYS)
def test_a_save_under_way_at_the_end_is_waited_for_and_committed(tmp_path, way):
    root = str(tmp_path / "run")
    code, _, err = ended("end_while_saving", root, way, "slow")
    assert code == 0, err
    assert kept(root) == ["late"]


@pytest.mark.parametrize("way", THREADS)
def test_a_save_that_hangs_at_the_end_is_given_up_in_time_and_said(tmp_path, way):
    root = str(tmp_path / "run")
    code, _, err = ended("end_while_hanging", root, way, "hangs")
    assert code == 74
    assert "has not ended" in err
    assert kept(root) == []
