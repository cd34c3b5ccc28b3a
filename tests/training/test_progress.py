"""Counters of a run are whole numbers, always, and come back all or not at all."""

import copy
import json
import pickle

import numpy as np
import pytest

from ckptstore.errors import IncompatibleStateError, InvalidInputError
from ckptstore.training.progress import Progress


def test_progress_comes_back_from_json_into_the_same_object():
    saved = json.loads(json.dumps(Progress(global_step=2**40, epoch=3, micro_step=1, consumed_samples=7).as_json()))
    progress = Progress(global_step=9)
    progress.restore(saved)
    assert progress == Progress(global_step=2**40, epoch=3, micro_step=1, consumed_samples=7)


def test_counters_come_in_one_order_whatever_the_process_hashes_by():
    assert list(Progress().as_json()) == ["global_step", "epoch", "micro_step", "consumed_samples"]


def test_a_loop_counts_with_it():
    progress = Progress()
    progress.global_step += 1
    progress.consumed_samples += np.int64(60)
    assert progress.as_json() == {"global_step": 1, "epoch": 0, "micro_step": 0, "consumed_samples": 60}
    assert type(progress.consumed_samples) is int


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, 2**63], ids=repr)
@pytest.mark.parametrize("name", ["global_step", "epoch", "micro_step", "consumed_samples"])
def test_anything_else_is_refused_at_once_and_named(name, value):
    progress = Progress(1, 2, 3, 4)
    with pytest.raises(InvalidInputError, match=name):
        setattr(progress, name, value)
    with pytest.raises(InvalidInputError, match=name):
        Progress(**{name: value})
    with pytest.raises(InvalidInputError, match=name):
        progress.restore({**Progress(5, 6, 7, 8).as_json(), name: value})
    assert progress == Progress(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("saved", "missing", "unknown"),
    [
        ({}, ["consumed_samples", "epoch", "global_step", "micro_step"], []),
        ({**Progress().as_json(), "x": 1}, [], ["x"]),
    ],
    ids=["missing", "unknown"],
)
def test_other_counters_are_refused_and_nothing_is_taken(saved, missing, unknown):
    progress = Progress(1, 2, 3, 4)
    with pytest.raises(IncompatibleStateError) as refused:
        progress.restore(saved)
    assert (refused.value.facts["missing"], refused.value.facts["unknown"]) == (missing, unknown)
    assert progress == Progress(1, 2, 3, 4)


def test_a_counter_that_does_not_exist_cannot_be_set():
    with pytest.raises(AttributeError):
        Progress().step = 1


def test_progress_can_be_copied_and_pickled():
    progress = Progress(1, 2, 3, 4)
    assert copy.deepcopy(progress) == progress
    assert pickle.loads(pickle.dumps(progress)) == progress  # noqa: S301  (our own)
