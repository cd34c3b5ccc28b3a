"""A signal that comes after the loop last asked whether to save is not lost."""

import signal

import pytest
from trainings import Training

from ckptstore import CheckpointStore
from ckptstore.events import Stopping
from ckptstore.training import Checkpointer, StoppedBySignal


def train(url, told, *, steps, number, late=True):
    """Train, saving every four steps, and be asked to stop after the last step, or before the first."""
    training = Training()
    with Checkpointer(url, training.state, every_steps=4, observer=told.append) as checkpointer:
        if not late:
            signal.raise_signal(number)
        training.train(steps, checkpointer)
        signal.raise_signal(number)


def stops(told):
    return [(each.global_step, each.newest_seq, each.saved) for each in told if isinstance(each, Stopping)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_run_that_is_asked_to_stop_after_its_last_step_ends_its_save_and_then_by_the_signals_code(tmp_path, number):
    told = []
    with pytest.raises(StoppedBySignal) as stopped:
        train(tmp_path, told, steps=4, number=number)
    assert stopped.value.code == 128 + number
    assert CheckpointStore.open(tmp_path).latest().global_step == 4
    assert stops(told) == [(4, 1, True)]


def test_what_was_trained_since_the_last_save_is_said_not_to_be_saved(tmp_path):
    told = []
    with pytest.raises(StoppedBySignal):
        train(tmp_path, told, steps=6, number=signal.SIGTERM)
    assert stops(told) == [(6, 1, False)]


def test_it_is_stopped_once(tmp_path):
    told = []
    with pytest.raises(StoppedBySignal):
        train(tmp_path, told, steps=6, number=signal.SIGTERM, late=False)
    assert stops(told) == [(1, 1, True)]
