"""Real processes and real signals, at any moment: what is committed is whole, and the next job goes on from it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stoppable import LAST_STEP, Job, Plan, Tiny

from ckptstore import CheckpointStore
from ckptstore.training import Checkpointer

GRACE_SECONDS = 10
LATE_SECONDS = 10
"""How much later than that a process may end here, where cores are shared."""
DRAWN = [
    (signal.SIGTERM,),
    (signal.SIGINT,),
    (signal.SIGUSR1,),
    (signal.SIGTERM, signal.SIGTERM),
    (signal.SIGTERM, signal.SIGINT),
    (signal.SIGINT, signal.SIGTERM, signal.SIGTERM),
    (signal.SIGUSR1, signal.SIGTERM),
]
MOMENTS = [
    pytest.param(ranks, seed, marks=[pytest.mark.slow] if seed >= few else [])
    for ranks, few in ((1, 8), (2, 5))
    for seed in range(15)
]
"""Thirty, of which each run of the tests does some."""


def steps(root):
    """Return at which steps there are checkpoints, each verified byte by byte."""
    store = CheckpointStore.open(root)
    assert [verdict for verdict in store.verify_kept(level="full") if not verdict.ok] == []
    return [each.global_step for each in store.checkpoints()]


def check_next_job_ends_as_if_nothing_had_been(plan, *, ranks):
    """Resume with other weights; the last step's are those of a run that was never stopped."""
    before = steps(plan.url)
    job = Job(Plan(plan.url), ranks=ranks)
    assert job.end() == [0] * ranks
    heard = job.heard()
    assert heard["resumed"] == (before[0] if before else None)
    control = Tiny(plan.seed if before else job.seed)
    for _ in range(LAST_STEP):
        control.step()
    assert heard["ended"] == {name: each.tolist() for name, each in control.model.state_dict().items()}
    after = steps(plan.url)
    assert after[len(after) - len(before) :] == before


@pytest.mark.parametrize(("ranks", "seed"), MOMENTS)
def test_a_run_that_is_asked_to_stop_at_any_moment(tmp_path, seed, ranks):
    draw = random.Random(100 * ranks + seed)  # noqa: S311  (moments)
    numbers, whom = draw.choice(DRAWN), draw.choice([(0,), (ranks - 1,), None])
    options = {"stop_seconds": GRACE_SECONDS, "background": draw.random() < 0.5}
    plan = Plan(str(tmp_path), slow=draw.choice([0, 0.01, 0.03]), step_seconds=0.02, options=options)
    job = Job(plan, ranks=ranks)
    for rank in range(ranks):
        job.await_word("resume", rank=rank)
    time.sleep(draw.uniform(0, 1))
    began = time.monotonic()
    for number in numbers:
        job.send(number, ranks=whom)
        time.sleep(draw.choice([0, 0.01, 0.1]))
    codes = job.end(seconds=GRACE_SECONDS + LATE_SECONDS)
    assert time.monotonic() - began < GRACE_SECONDS + LATE_SECONDS
    heard = [job.heard(rank) for rank in range(ranks)]
    if all("ended" in each for each in heard):
        assert all(code in (0, *(-number for number in numbers)) for code in codes)  # it came after everything
    else:
        assert set(codes) in [{128 + number} for number in numbers]  # two at once may come in any order
        stops = [each["stopping"] for each in heard]
        assert len({(stop.reason, stop.global_step, stop.saved) for stop in stops}) == 1
        assert stops[0].newest_seq == (CheckpointStore.open(tmp_path).latest().seq if steps(tmp_path) else None)
        assert stops[0].saved == (stops[0].global_step in steps(tmp_path)[:1])
        assert stops[0].saved or stops[0].global_step in (0, LAST_STEP)  # before the first step, or after the loop
    check_next_job_ends_as_if_nothing_had_been(plan, ranks=ranks)


def saved_runs(root, *, ranks=1, **options):
    """Train to the last step, saving at each fourth; return the options."""
    options = {"every_steps": 4, **options}
    if ranks > 1:
        assert Job(Plan(root, step_seconds=0, options=options), ranks=ranks).end() == [0] * ranks
    else:
        tiny = Tiny()
        with Checkpointer(root, tiny.state, **options) as checkpointer:
            tiny.run(checkpointer, LAST_STEP)
    return options


@pytest.mark.parametrize(("ranks", "background"), [(1, False), (2, True)])
def test_a_store_that_is_too_slow_for_a_last_save(tmp_path, ranks, background):
    """The save in flight does not end in time either: it leaves nothing that counts."""
    options = saved_runs(str(tmp_path), ranks=ranks, stop_seconds=1, background=background)
    job = Job(Plan(str(tmp_path), slow=0.25, until=100, step_seconds=0.05, options=options), ranks=ranks)
    job.await_word("save")
    began = time.monotonic()
    job.send(signal.SIGTERM, ranks=(ranks - 1,))
    assert job.end(seconds=1 + LATE_SECONDS) == [128 + signal.SIGTERM] * ranks
    assert time.monotonic() - began < 1 + LATE_SECONDS
    assert job.heard()["stopping"].saved is False
    assert steps(tmp_path) == [12, 8, 4]


def test_a_signal_in_a_resume_ends_the_run_before_its_first_step(tmp_path):
    saved_runs(str(tmp_path))
    job = Job(Plan(str(tmp_path), slow_reads=0.05, until=100))
    job.await_word("resume")
    job.send(signal.SIGTERM)
    assert job.end() == [128 + signal.SIGTERM]
    heard = job.heard()
    assert "resumed" not in heard
    assert (heard["stopping"].global_step, heard["stopping"].saved) == (12, True)
    assert steps(tmp_path) == [12, 8, 4]


def test_a_signal_in_close_waits_for_the_save_in_flight(tmp_path):
    job = Job(Plan(str(tmp_path), slow=0.1, until=3))
    job.await_word("close")
    job.send(signal.SIGUSR1)
    assert job.end() == [128 + signal.SIGUSR1]
    assert "ended" not in job.heard()
    assert steps(tmp_path) == [3]


def test_a_second_ctrl_c_ends_a_run_at_once_and_keeps_what_is_committed(tmp_path):
    options = saved_runs(str(tmp_path))
    job = Job(Plan(str(tmp_path), until=100, step_seconds=5, options=options))
    job.await_word("step")
    job.send(signal.SIGINT)
    time.sleep(0.2)
    job.send(signal.SIGINT)
    assert job.end(seconds=4) == [1]  # as multiprocessing has it
    assert job.heard()["stopping"].reason == "KeyboardInterrupt on rank 0"
    assert steps(tmp_path) == [12, 8, 4]


def test_a_rank_that_was_asked_does_not_outlive_its_time_waiting_for_one_that_hangs(tmp_path):
    job = Job(Plan(str(tmp_path), step_seconds=0.5, options={"stop_seconds": 2}), ranks=2)
    job.await_word("step")
    job.send(signal.SIGTERM, ranks=(0,))
    job.send(signal.SIGSTOP, ranks=(1,))
    assert job.end(seconds=2 + LATE_SECONDS, ranks=(0,)) == [128 + signal.SIGTERM, None]
    assert "does not answer in time" in job.heard()["stopping"].reason
    assert steps(tmp_path) == []


def test_a_rank_that_is_gone_is_an_error_and_no_stop(tmp_path):
    options = saved_runs(str(tmp_path), ranks=2)
    job = Job(Plan(str(tmp_path), until=100, step_seconds=0.2, options=options), ranks=2)
    job.await_word("step")
    job.send(signal.SIGKILL, ranks=(1,))
    assert job.end(seconds=20) == [1, -signal.SIGKILL]
    assert job.heard()["stopping"].reason == "DisagreementError on rank 0"
    assert steps(tmp_path) == [12, 8, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_whole_group_of_processes_is_asked_as_launchers_and_terminals_do(tmp_path, number):
    """Of SIGTERM the workers die at once, which fails nothing; Ctrl-C they leave to their parent."""
    program = Path(__file__).parents[1] / "loading_program.py"
    command = [sys.executable, str(program), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            while not process.stdout.readline().startswith(b"step 7"):
                assert process.poll() is None, process.stderr.read()
            os.killpg(process.pid, number)
            _, said = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 128 + number, said
    assert f"Stopping at step 7, which is saved: {number.name} on rank 0".encode() in said
    assert b"Traceback" not in said
    assert b"Error" not in said
    assert steps(tmp_path / "run") == [7, 5]
