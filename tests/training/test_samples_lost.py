"""How many samples a resume trains again, as far as that was written down; and who hears of it."""

import pytest
from trainings import Training

from ckptstore.events import RestoreFailed, Resumed, Stepped
from ckptstore.training import Checkpointer, resume

BATCH = 12


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "run")


def trained(url, until, *, every=2, proof_steps=0, **options):
    """Train to a step; the last steps are after the last save."""
    training = Training(**options)
    with Checkpointer(
        url, training.state, every_steps=every, background=False, proof_steps=proof_steps
    ) as checkpointer:
        training.train(until, checkpointer)


def resumed(url, *, proof_steps=0, **asked):
    training, heard = Training(seed=2), []
    checkpointer = Checkpointer(url, training.state, proof_steps=proof_steps, observer=heard.append)
    with checkpointer:
        report = checkpointer.resume(**asked)
    return report, [event for event in heard if isinstance(event, Resumed)]


def test_the_newest_checkpoint_loses_nothing_that_is_known(url):
    trained(url, 5)
    report, (told,) = resumed(url)
    assert (report.global_step, report.samples_lost, told.samples_lost) == (4, 0, 0)
    assert told.committed_at == report.committed_at


def test_steps_that_were_recorded_after_the_newest_checkpoint_are_trained_again(url):
    trained(url, 7, every=4, proof_steps=2)
    report, (told,) = resumed(url, proof_steps=2)
    assert (report.global_step, told.samples_lost) == (4, 2 * BATCH)


def test_going_back_trains_what_newer_checkpoints_count_again(url):
    trained(url, 7, proof_steps=1)
    report, (told,) = resumed(url, step=2)
    assert (report.global_step, report.steps_lost, told.samples_lost) == (2, 0, 4 * BATCH)
    again, _ = resumed(url, step=2)
    assert again.samples_lost == 0  # they are set aside, and what was trained since nobody wrote down


def test_another_runs_checkpoint_is_not_trained_again_and_is_not_the_runs_own(url, tmp_path):
    trained(url, 5)
    report, (told,) = resumed(str(tmp_path / "other"), source=url, step=2)
    assert (report.global_step, told.samples_lost, told.committed_at) == (2, 0, None)


def test_who_counts_no_samples_is_told_that_nothing_is_known(url):
    training = Training()
    with Checkpointer(url, training.state, background=False, proof_steps=0) as checkpointer:
        for _ in range(2):
            training.progress.global_step += 1
            checkpointer.save()
    report, (told,) = resumed(url, step=1)
    assert (report.samples_lost, told.samples_lost) == (None, None)


def test_a_resume_is_told_once_by_whichever_call(url):
    trained(url, 3)
    heard = []
    resume(Training(seed=2).state, url, observer=heard.append)
    assert [type(event) for event in heard] == [Resumed]
    heard.clear()
    with pytest.raises(Exception, match="9"):
        resume(Training(seed=2).state, url, seq=9, observer=heard.append)
    assert heard == [RestoreFailed(None, "not_found")]


def test_each_step_is_told_where_it_is_asked_whether_to_save(url):
    heard, training = [], Training()
    with Checkpointer(url, training.state, background=False, observer=heard.append) as checkpointer:
        training.train(3, checkpointer)
    assert [event.global_step for event in heard if isinstance(event, Stepped)] == [1, 2, 3]
