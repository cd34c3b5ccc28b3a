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
