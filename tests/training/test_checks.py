"""What must be the same right after a resume, before a step is taken."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from ckptstore.errors import IntegrityError
from ckptstore.training.checks import Moments, Standing, Summed, checks_table, failed, static_checks

MOMENTS = Moments(tensors=4, elements=64, nonzero=60, blake3="ab" * 32)
SAVED = Standing(
    global_step=100,
    epoch=1,
    micro_step=1,
    consumed_samples=6000,
    world_size=4,
    lr={"": (1e-3, 1e-4)},
    scale={"": 1024.0},
    moments={"": MOMENTS},
    cursors={"train": 480, "eval": 0},
)


def changed(**fields):
    return dataclasses.replace(SAVED, **fields)


def test_a_run_that_stands_where_it_stood_passes_every_check():
    checks = static_checks(SAVED, SAVED)
    assert [check.name for check in checks] == [
        *(
            "global_step",
            "epoch",
            "micro_step",
            "consumed_samples",
            "scale",
            "lr",
            "moments",
            "cursor eval",
            "cursor train",
        )
    ]
    assert {check.ok for check in checks} == {True}
    assert failed(checks) == []


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        ({"global_step": 99}, "global_step", "step was not restored"),
        ({"epoch": 0}, "epoch", "not restored"),
        ({"micro_step": 0}, "micro_step", "gradients would be lost"),
        ({"consumed_samples": 0}, "consumed_samples", "not restored"),
        ({"scale": {"": 65536.0}}, "scale", "scaler was not restored"),
        ({"scale": {}}, "scale", "was saved, and is not here"),
        ({"lr": {"": (1e-3, 2e-4)}}, "lr", "scheduler or the optimizer"),
        ({"lr": {"": (1e-3,)}}, "lr", "were 2 parameter groups, and are 1"),
        ({"lr": {}}, "lr", "is not here"),
        ({"lr": {**SAVED.lr, "second": (1.0,)}}, "lr second", "was not saved"),
        ({"moments": {"": Moments(4, 64, 0, "cd" * 32)}}, "moments", "dropped: all are zero"),
        ({"moments": {"": Moments(0, 0, 0)}}, "moments", "missing"),
        ({"moments": {"": Moments(4, 64, 60, "cd" * 32)}}, "moments", "blake3"),
        ({"moments": {"": Moments(4, 64, 59, "ab" * 32)}}, "moments", "nonzero"),
        ({"moments": {}}, "moments", "is not here"),
        ({"cursors": {"train": 0, "eval": 0}}, "cursor train", "beginning of the epoch"),
        ({"cursors": {"train": 540, "eval": 0}}, "cursor train", "left out, or come twice"),
        ({"cursors": {"train": 480, "eval": 60}}, "cursor eval", "left out, or come twice"),
        ({"cursors": {"train": 480}}, "cursor eval", "is not here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_not_restored_is_named_with_both_values(fault, name, message):
    (check,) = failed(static_checks(SAVED, changed(**fault)))
    assert (check.name, check.saved != check.now) == (name, True)
    assert message in check.message
    assert message in str(check)


def test_on_another_world_size_ranks_hold_other_pieces_of_the_moments():
    other = changed(world_size=3, moments={"": Moments(2, 90, 0, "cd" * 32)})
    assert failed(static_checks(SAVED, other, summed={"": Summed()})) == []
    (unknown,) = [check for check in static_checks(SAVED, other) if check.ok is None]
    assert unknown.name == "moments"


@pytest.mark.parametrize(
    ("summed", "message"),
    [
        (Summed(missing=("weight.exp_avg",)), "missing: weight.exp_avg"),
        (Summed(more=("weight.exp_avg",)), "more moments than were saved: weight.exp_avg"),
        (Summed(dropped=True), "dropped: all are zero"),
    ],
    ids=["missing", "more", "dropped"],
)
def test_what_all_ranks_together_lost_is_named(summed, message):
    (check,) = failed(static_checks(SAVED, changed(world_size=3), summed={"": summed}))
    assert check.name == "moments"
    assert message in check.message


def test_a_cursor_at_the_beginning_of_an_epoch_is_right_if_it_was_there():
    start = changed(cursors={"train": 0})
    assert failed(static_checks(start, start)) == []


def test_a_loader_that_cannot_say_where_it_is_is_unknown_and_not_fine():
    vague = changed(cursors={"train": None})
    (check,) = [check for check in static_checks(vague, vague) if check.ok is None]
    assert check.name == "cursor train"
    assert "unknown" in checks_table([check])


def test_moments_whose_digest_is_not_known_are_counted():
    assert failed(static_checks(SAVED, changed(moments={"": Moments(4, 64, 60)}))) == []


def test_a_scale_that_is_no_number_is_equal_to_itself():
    assert failed(static_checks(changed(scale={"": math.nan}), changed(scale={"": math.nan}))) == []


def test_where_a_run_stands_comes_back_from_json():
    assert Standing.from_json(json.loads(json.dumps(SAVED.as_json()))) == SAVED
    for harm in ({"global_step": -1}, {"lr": {"": "x"}}, {"moments": {"": {}}}, {"cursors": None}):
        with pytest.raises(IntegrityError):
            Standing.from_json({**SAVED.as_json(), **harm})


def test_checks_are_a_table_for_people_and_json_for_programs():
    checks = static_checks(SAVED, changed(scale={"": 2.0}))
    lines = checks_table(checks).splitlines()
    assert len(lines) == 1 + len(checks)
    (wrong,) = [line for line in lines if "WRONG" in line]
    assert wrong.split()[:4] == ["scale", "1024.0", "2.0", "WRONG"]
    assert json.loads(json.dumps([check.as_json() for check in checks]))[4]["ok"] is False
