"""Ranks take one decision, add up numbers, and say alike what is alike."""

import datetime as dt
import math
import time

import pytest
from torch import distributed as dist

from ckptstore.errors import DisagreementError, InvalidInputError
from ckptstore.training.meeting import Meeting, digest_of


def add_up():
    rank = dist.get_rank()
    meeting = Meeting()
    alone = Meeting(one_rank=True).sums([1.0, math.inf], [2**63])
    floats, integers = meeting.sums([0.1 * (rank + 1), math.nan if rank else 1.0], [2**63 - 1, 2**32 - 1, rank])
    return floats[0], math.isnan(floats[1]), integers, alone, meeting.sums([]), Meeting().group is meeting.group


@pytest.mark.parametrize("ranks", [2, 3])
def test_numbers_are_added_up_over_the_ranks_in_one_group(gang, ranks):
    expected = [ranks * (2**63 - 1) % 2**64, ranks * (2**32 - 1), sum(range(ranks))]
    for total, is_nan, integers, alone, nothing, is_one_group in gang.values(ranks, add_up):
        assert total == pytest.approx(0.1 * ranks * (ranks + 1) / 2)
        assert (is_nan, integers, nothing, is_one_group) == (True, expected, ([], []), True)
        assert alone == ([1.0, math.inf], [2**63])


def add_up_in_halves():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    meeting = Meeting(halves[dist.get_rank() // 2])
    return meeting.rank, meeting.world_size, meeting.sums([float(dist.get_rank())])[0]


def test_each_group_adds_up_its_own(gang):
    assert gang.values(4, add_up_in_halves) == [(0, 2, [1.0]), (1, 2, [1.0]), (0, 2, [5.0]), (1, 2, [5.0])]


def wait_for_who_is_gone():
    meeting = Meeting()
    meeting.sums([1.0])
    if dist.get_rank() == 1:
        raise SystemExit
    began = time.monotonic()
    with pytest.raises(DisagreementError, match="lost them") as lost:
        meeting.sums([1.0])
    return time.monotonic() - began, lost.value.facts["rank"]


def test_a_rank_that_is_gone_is_an_error_that_says_so(gang):
    first, second = gang.run(2, wait_for_who_is_gone)
    assert isinstance(second.error, SystemExit)
    assert first.value[0] < 30
    assert first.value[1] == 0


def wait_for_who_does_not_come():
    dist.distributed_c10d._get_default_store().set_timeout(dt.timedelta(seconds=1))
    meeting = Meeting()
    meeting.sums([1.0])
    if dist.get_rank() == 1:
        time.sleep(3)
        return None
    began = time.monotonic()
    with pytest.raises(DisagreementError):
        meeting.sums([1.0])
    return time.monotonic() - began


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_launch_says(gang):
    waited, _ = gang.values(2, wait_for_who_does_not_come)
    assert 0.5 < waited < 3


def call_apart(other):
    """Make one call on rank 0 and another on rank 1; return what was raised, and whether ranks can go on."""
    meeting = Meeting()
    here = {"what": "observe", "at": 5}
    said = ([1.0] * 8, [1, 2], here)
    if dist.get_rank() == 1:
        said = {"call": ([1.0, 2.0], [], {}), "step": (*said[:2], here | {"at": 6}), "lengths": ([1.0], [1], here)}[
            other
        ]
    with pytest.raises(DisagreementError, match="different calls") as apart:
        meeting.sums(said[0], said[1], **said[2])
    return apart.value.facts["calls"], meeting.sums([1.0], [3])


@pytest.mark.parametrize(
    ("other", "says"), [("call", "due, save"), ("step", "at 6"), ("lengths", "observe (1 + 1 numbers")]
)
def test_ranks_in_different_calls_are_an_error_that_names_them_on_all(gang, other, says):
    for calls, after in gang.values(2, call_apart, other):
        assert calls["0"] == "observe (8 + 2 numbers, at 5)"
        assert says in calls["1"]
        assert after == ([2.0], [6])


def test_more_numbers_than_a_message_holds_are_a_mistake_of_the_caller(gang):
    assert gang.values(2, add_up_too_many) == [True, True]


def add_up_too_many():
    with pytest.raises(InvalidInputError, match="33 slots"):
        Meeting().sums([1.0] * 31, [1])
    return True


def wait_for_one(ask):
    """Ask on rank 0 only; return how long it waited, and for whom."""
    meeting = Meeting(seconds=0.3)
    if dist.get_rank() == 1:
        return None
    began = time.monotonic()
    with pytest.raises(DisagreementError, match="did not come") as missing:
        getattr(meeting, ask)("something", lambda: None)
    return time.monotonic() - began, missing.value.facts["missing"]


@pytest.mark.parametrize("ask", ["led", "all_do"])
def test_who_is_missing_is_named_soon_where_the_work_may_take_long(gang, ask):
    (waited, missing), _ = gang.values(2, wait_for_one, ask)
    assert missing == [1]
    assert waited < 3


def work_long():
    meeting = Meeting(seconds=0.2)
    led = meeting.led("led", lambda: time.sleep(1) or "done")
    return led, meeting.all_do("all", lambda: time.sleep(0.7 * dist.get_rank()) or dist.get_rank())


def test_who_works_longer_than_a_missing_rank_is_waited_for_is_not_missing(gang):
    assert gang.values(2, work_long) == [("done", 0), ("done", 1)]


def gather():
    rank = dist.get_rank()
    meeting = Meeting()

    def gathered(said):
        return meeting.gathered("facts", said, digest=digest_of(said))

    alike = gathered({"a": {"b": [1, 2]}})
    parts = gathered({"all": 1, "models": {f"layer.{rank}": [rank]}})
    with pytest.raises(DisagreementError, match="x is 1 there, and 0") as differ:
        gathered({"models": {"x": rank}})
    return alike, parts, differ.value.message


def test_what_ranks_say_is_put_together_unless_it_contradicts(gang):
    first, second = gang.values(2, gather)
    assert first[:2] == ({"a": {"b": [1, 2]}}, {"all": 1, "models": {"layer.0": [0], "layer.1": [1]}})
    assert second[:2] == (None, None)
    assert first[2] == second[2]
    assert "facts on rank 1: models" in first[2]


def decide():
    rank = dist.get_rank()
    meeting = Meeting()
    said = meeting.decide("who", lambda: rank * 10, lambda parts: [*parts, "judged"])
    led = meeting.led("led", lambda: f"by {rank}")
    done = meeting.all_do("all", lambda: f"here {rank}")

    def fails_on_1():
        if rank == 1:
            raise InvalidInputError("Not so.")

    with pytest.raises(InvalidInputError, match=r"Rank 1: Not so\."):
        meeting.all_do("all", fails_on_1)
    return said, led, done


def test_rank_0_judges_and_all_hear_the_same(gang):
    assert gang.values(2, decide) == [([0, 10, "judged"], "by 0", "here 0"), ([0, 10, "judged"], "by 0", "here 1")]
