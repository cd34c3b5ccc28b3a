"""A process that is killed leaves what another one, started with other seeds, goes on from bit by bit."""

import functools
import random

import pytest
from killed import EVERY, Job

from ckptstore import CheckpointStore

LONGEST, FURTHER = 60, 50


@functools.cache
def uninterrupted(optimizer):
    """Return the digest of each step of a run that nothing disturbs, and that saves nothing."""
    with Job(None, seed=1, optimizer=optimizer, steps=LONGEST + FURTHER) as job:
        _, steps, _ = job.all()
    assert len(set(steps.values())) == LONGEST + FURTHER
    return steps


def assert_the_next_process_does_what_the_run_would_have_done(url, optimizer):
    at = CheckpointStore.open(url).latest().global_step
    with Job(url, seed=99, optimizer=optimizer, steps=FURTHER) as job:
        begun, steps, verdict = job.all()
        job.process.join(30)
        assert job.process.exitcode == 0
    assert begun == at
    control = uninterrupted(optimizer)
    assert steps == {step: control[step] for step in range(at + 1, at + FURTHER + 1)}
    assert verdict in ("proved", "no_trace")


@pytest.mark.parametrize(("optimizer", "draw"), [("adamw", 1), ("adamw", 2), ("sgd", 3), ("sgd", 4)])
def test_killed_at_a_random_step_and_resumed_the_weights_are_those_of_the_uninterrupted_run(tmp_path, optimizer, draw):
    step = random.Random(draw).randrange(3 * EVERY, LONGEST)  # noqa: S311  (which step is drawn again each time)
    with Job(tmp_path, seed=1, optimizer=optimizer, steps=LONGEST, waits=True) as job:
        job.until(step)
        job.kill()
        assert job.process.exitcode == -9
    assert_the_next_process_does_what_the_run_would_have_done(tmp_path, optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_killed_while_a_background_save_is_under_way_it_goes_on_from_the_one_before(tmp_path, optimizer):
    with Job(tmp_path, seed=1, optimizer=optimizer, steps=LONGEST, hangs_at=4 * EVERY) as job:
        job.until("stored")
        job.kill()
        assert job.process.exitcode == -9
    store = CheckpointStore.open(tmp_path)
    assert store.latest().global_step == 3 * EVERY
    assert [each.stem.name for each in store.uncommitted()] == [f"step-{4 * EVERY}"]
    assert_the_next_process_does_what_the_run_would_have_done(tmp_path, optimizer)
