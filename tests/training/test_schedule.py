"""When a save is due: the same on all ranks, never twice at one step, never between micro-steps by itself."""

import itertools

import pytest
from stoppable import Tiny
from torch import distributed as dist

from ckptstore import CheckpointStore
from ckptstore.errors import InvalidInputError
from ckptstore.testing.simulated import ManualClock
from ckptstore.training import Checkpointer, Keep

_runs = itertools.count()


def due_at(tiny, checkpointer, moves):
    """Return at which steps a save was due, saving then; `moves` lets things happen, and steps be taken, in between."""
    due = []
    for move in moves:
        move()
        while checkpointer.due():
            due.append(tiny.progress.global_step)
            checkpointer.save()
    return due


@pytest.fixture
def tiny():
    return Tiny()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def kept(tiny, clock):
    """Makes a checkpointer of a run in memory."""

    def make(**options):
        url = f"memory://schedule-{next(_runs)}"
        return Checkpointer(url, tiny.state, clock=clock, background=False, proof_steps=0, **options)

    return make


def test_saves_are_due_at_multiples_of_steps(tiny, kept):
    assert due_at(tiny, kept(every_steps=3), [tiny.step] * 10) == [3, 6, 9]


def test_a_multiple_that_was_passed_between_two_questions_counts(tiny, kept):
    def three_steps():
        tiny.progress.global_step += 3

    assert due_at(tiny, kept(every_steps=4), [three_steps] * 5) == [6, 9, 12]  # 4, 8 and 12 were passed; 15 passed none


def test_a_loop_that_is_asked_again_at_one_step_saves_once(tiny, kept):
    again = lambda: None  # noqa: E731
    assert due_at(tiny, kept(every_steps=2), [tiny.step, tiny.step, again, again, tiny.step, again]) == [2]


def test_saves_are_due_by_seconds_since_the_save_before(tiny, kept, clock):
    def wait(seconds):
        return lambda: (clock.sleep(seconds), tiny.step())

    moves = [wait(6), wait(6), wait(6), wait(2), wait(2)]
    assert due_at(tiny, kept(every_seconds=10), moves) == [2, 5]


def test_the_seconds_of_a_resume_do_not_count(tiny, kept, clock):
    checkpointer = kept(every_seconds=10)
    clock.sleep(100)
    checkpointer.resume()
    tiny.step()
    assert not checkpointer.due()


def test_seconds_without_a_step_make_no_save_due(tiny, kept, clock):
    wait = lambda: clock.sleep(5)  # noqa: E731
    assert due_at(tiny, kept(every_seconds=1), [wait, tiny.step, wait, wait]) == [1]


def test_saves_are_due_when_epochs_have_ended(tiny, kept):
    def epoch():
        tiny.step()
        tiny.progress.epoch += 1

    moves = [tiny.step, epoch, tiny.step, epoch, tiny.step, epoch, epoch]
    assert due_at(tiny, kept(every_epochs=2), moves) == [4, 7]


def test_whichever_comes_first_makes_a_save_due_and_no_step_is_saved_twice(tiny, kept, clock):
    def epoch():
        clock.sleep(100)
        tiny.step()
        tiny.progress.epoch += 1

    checkpointer = kept(every_steps=4, every_seconds=50, every_epochs=1)
    assert due_at(tiny, checkpointer, [tiny.step] * 3 + [epoch] + [tiny.step] * 4) == [4, 8]


def test_nothing_is_due_between_micro_steps(tiny, kept, clock):
    def micro_step():
        clock.sleep(100)
        tiny.progress.micro_step += 1

    def step():
        tiny.progress.micro_step = 0
        tiny.step()

    checkpointer = kept(every_steps=1, every_seconds=1, every_epochs=1)
    assert due_at(tiny, checkpointer, [micro_step, micro_step, step] * 2) == [1, 2]


def test_without_any_of_them_nothing_is_due(tiny, kept, clock):
    assert due_at(tiny, kept(), [lambda: clock.sleep(1e6), tiny.step] * 5) == []


def test_a_run_that_was_resumed_waits_for_the_next_multiple(tiny, kept, tmp_path):
    with Checkpointer(tmp_path, tiny.state, every_steps=4) as checkpointer:
        assert due_at(tiny, checkpointer, [tiny.step] * 5) == [4]
    other = Tiny(seed=9)
    with Checkpointer(tmp_path, other.state, every_steps=4) as checkpointer:
        assert checkpointer.resume().global_step == 4
        assert due_at(other, checkpointer, [other.step] * 5) == [8]


def by_one_ranks_clock(root):
    """Ask with clocks that differ; return when a save was due here."""
    tiny, clock = Tiny(), ManualClock()
    checkpointer = Checkpointer(root, tiny.state, clock=clock, every_seconds=10, background=False, proof_steps=0)
    due = []
    for _ in range(6):
        clock.sleep(4 if dist.get_rank() == 0 else 1000)
        tiny.step()
        due.append(checkpointer.due())
        if due[-1]:
            checkpointer.save()
    checkpointer.close()
    return due


def test_rank_0s_clock_decides_on_all_ranks(gang, tmp_path):
    expected = [False, False, True, False, False, True]
    assert gang.values(2, by_one_ranks_clock, str(tmp_path)) == [expected, expected]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"], ids=repr)
@pytest.mark.parametrize("option", ["every_steps", "every_epochs"])
def test_a_number_of_times_must_be_one(kept, option, value):
    with pytest.raises(InvalidInputError, match=option):
        kept(**{option: value})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "3"], ids=repr)
def test_a_number_of_seconds_must_pass(kept, value):
    with pytest.raises(InvalidInputError, match="every_seconds"):
        kept(every_seconds=value)
    with pytest.raises(InvalidInputError, match="stop_seconds"):
        kept(stop_seconds=value)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"last": 0},
        {"last": True},
        {"every": -5},
        {"best": ("loss", "least", 1)},
        {"best": ("", "min", 1)},
        {"best": ("loss", "min", 0)},
        {"best": ("loss", "min")},
        {"best": "loss"},
        {"hourly": 0},
        {"daily": 1.5},
        {"tags": ()},
        {"tags": ("",)},
        {"tags": {"a": 1}},
    ],
    ids=repr,
)
def test_a_rule_of_what_to_keep_that_says_nothing_is_refused(parts):
    with pytest.raises(InvalidInputError):
        Keep(**parts)


def test_what_to_keep_is_recorded_with_each_save(tiny, tmp_path):
    keep = Keep(last=3, best=("val_loss", "min", 2), every=100, hourly=1, tags=["b", "a"])
    with Checkpointer(tmp_path, tiny.state, keep=keep) as checkpointer:
        for _ in range(3):
            tiny.step()
            checkpointer.save(metrics={"val_loss": 2.5}, tags=("nightly",))
    found = CheckpointStore.open(tmp_path).checkpoints()
    assert [each.global_step for each in found] == [3, 2, 1]
    assert {each.checkpoint_id: dict(each.metrics) for each in found}["step-2"] == {"val_loss": 2.5}
    said = [each.commit.training_state["keep"] for each in found]
    assert said == [{"last": 3, "best": ["val_loss", "min", 2], "every": 100, "hourly": 1, "tags": ["a", "b"]}] * 3


@pytest.mark.parametrize("option", ["keep", "matrix", "tolerances", "state"])
def test_an_option_of_another_kind_is_refused_when_it_is_given(tiny, tmp_path, option):
    given = {"state": tiny.state, option: {"last": 3}}
    with pytest.raises(InvalidInputError, match=option):
        Checkpointer(tmp_path, **given)
