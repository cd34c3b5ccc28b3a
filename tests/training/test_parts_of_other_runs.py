"""A run may begin from parts of another one: what is named is taken, all else stays, and what cannot be is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptstore import CheckpointStore, IncompatibleStateError, InvalidInputError
from ckptstore.training import Checkpointer

sys.path.insert(0, str(Path(__file__).parent))
from small_language import SAMPLES, TEXTS, Pairs, Program, save_in_the_middle


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the root of a run that was saved between two micro-steps, and the program that a full resume gives."""
    root = tmp_path_factory.mktemp("source") / "run"
    save_in_the_middle(root)
    program = Program(seed=3)
    with Checkpointer(root, program.state) as checkpointer:
        checkpointer.resume()
    return root, program


def weights(program):
    return {name: each.tolist() for name, each in program.model.state_dict().items()}


@pytest.mark.parametrize("only", [("model",), ["model", "optimizer"]], ids=str)
def test_what_is_named_is_taken_and_all_else_is_as_it_was(source, tmp_path, only):
    root, whole = source
    program = Program(seed=7, dataset=Pairs(SAMPLES + 1), texts={**TEXTS, "name": "another"})
    with Checkpointer(tmp_path / "tuned", program.state) as checkpointer:
        report = checkpointer.resume(source=root, only=only)
        assert report.restored == tuple(only)
        assert (report.is_fresh, report.url, report.random) == (False, CheckpointStore.open(root).url, ())
        assert weights(program) == weights(whole)
        assert bool(program.opt.state) is ("optimizer" in only)
        assert all(each.grad is None for each in program.model.parameters())
        assert (program.progress.global_step, program.sampler.position, program.scaler.get_scale()) == (0, 0, 64.0)
        program.train(2, checkpointer)
        assert report.proof.verdict == "no_trace"
        assert "A part of it was taken" in report.proof.table()
        checkpointer.save()
    assert CheckpointStore.open(root).latest().proved is None
    again = Program(seed=8, dataset=Pairs(SAMPLES + 1), texts={**TEXTS, "name": "another"})
    with Checkpointer(tmp_path / "tuned", again.state) as checkpointer:
        report = checkpointer.resume(source=root, only=only)
    assert (report.url, report.global_step) == (CheckpointStore.open(tmp_path / "tuned").url, 2)
    assert weights(again) == weights(program)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"only": ["modle"]}, "modle"),
        ({"only": ["model", "loader"]}, "each rank has its own"),
        ({"only": []}, "takes nothing"),
        ({"only": "model"}, "only must be a list of names, not 'model'"),
        ({"allow": "dataset"}, "allow must be a list of names, not 'dataset'"),
    ],
    ids=str,
)
def test_names_that_cannot_be_meant_are_refused_before_anything_is_changed(source, tmp_path, asked, said):
    program = Program(seed=7)
    before = weights(program)
    with Checkpointer(tmp_path / "run", program.state) as checkpointer, pytest.raises(InvalidInputError, match=said):
        checkpointer.resume(source=source[0], **asked)
    assert weights(program) == before


def test_parts_that_do_not_fit_are_refused(source, tmp_path):
    state, fault = Program(layers=2).state, pytest.raises(IncompatibleStateError, match=r"layers\.1\.weight")
    with Checkpointer(tmp_path / "run", state) as checkpointer, fault:
        checkpointer.resume(source=source[0], only=["model"])
