"""The order of an epoch is a permutation, is as random as a shuffle should be, and is the same for ever."""

import math
from collections import Counter

import numpy as np
import pytest
from blake3 import blake3

from ckptstore.training.order import MAX_LENGTH, NAME, EpochOrder

WRAP = 2**64


def by_the_book(length, seed, epoch):
    """Return the order as its description says, in Python's own whole numbers."""
    stream = blake3(f"{NAME} {length} {seed} {epoch}".encode()).digest(length=64 * 16)
    numbers = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, len(stream), 8)]

    def sample_at(x):
        for pivot, key in zip(numbers[::2], numbers[1::2], strict=True):
            partner = (pivot % length - x) % length
            bits = max(x, partner) ^ key
            bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % WRAP
            bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % WRAP
            x = partner if (bits ^ bits >> 31) >> 63 else x
        return x

    return [sample_at(x) for x in range(length)]


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "first"),
    [
        (10, 0, 0, [1, 5, 8, 2, 7, 6, 4, 0, 9, 3]),
        (10, 0, 1, [6, 9, 3, 5, 1, 7, 4, 8, 2, 0]),
        (10, 1, 0, [3, 2, 6, 1, 7, 0, 5, 8, 9, 4]),
        (1000, 7, 0, [82, 598, 441, 268, 625, 231, 260, 79, 180, 8]),
        (10_007, 0, 1, [2358, 6207, 3293, 7182, 1460, 6070]),
        (10**9, 2**64 - 1, 3, [812877813, 357299706, 222836767]),
        (2**62, 1, 2, [17989895282244151, 4491992050386819192]),
    ],
)
def test_the_order_is_the_same_for_ever(length, seed, epoch, first):
    assert EpochOrder(length=length, seed=seed, epoch=epoch).at(0, len(first)).tolist() == first


@pytest.mark.parametrize("length", [1, 2, 3, 10, 64, 257])
def test_the_order_is_what_its_description_says(length):
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (2**64 - 1, 2**40)):
        assert EpochOrder(length=length, seed=seed, epoch=epoch).at(0, length).tolist() == by_the_book(
            length, seed, epoch
        )


@pytest.mark.parametrize("length", [*range(1, 40), 1000, 10_007, 65_536])
def test_every_sample_has_one_place(length):
    assert np.array_equal(np.sort(EpochOrder(length=length, seed=3, epoch=1).at(0, length)), np.arange(length))


def test_any_part_of_an_order_is_the_same_as_in_the_whole():
    order = EpochOrder(length=1000, seed=5, epoch=2)
    whole = order.at(0, 1000)
    assert np.array_equal(order.at(313, 777), whole[313:777])
    assert np.array_equal(order.of(np.array([999, 0, 500])), whole[[999, 0, 500]])
    assert order.at(7, 7).tolist() == []


@pytest.mark.parametrize("length", [10**8, 10**12, MAX_LENGTH])
def test_the_longest_orders_need_no_more_than_the_places_asked_for(length):
    order = EpochOrder(length=length, seed=0, epoch=0)
    ends = np.concatenate([order.at(0, 500), order.at(length - 500, length)])
    assert len(np.unique(ends)) == 1000
    assert ends.min() >= 0
    assert ends.max() < length
    assert ends.mean() / length == pytest.approx(0.5, abs=0.05)


def test_every_order_of_four_samples_comes_as_often_as_any_other():
    counts = Counter(tuple(EpochOrder(length=4, seed=0, epoch=epoch).at(0, 4).tolist()) for epoch in range(1200))
    expected = 1200 / math.factorial(4)
    assert len(counts) == 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 49.7  # 0.1 % of shuffles exceed it


def test_place_neighbour_epoch_and_seed_say_nothing_about_a_sample():
    places = np.arange(10_007)
    one, later, other = (
        EpochOrder(length=10_007, seed=seed, epoch=epoch).at(0, 10_007) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )
    for left, right in ((places, one), (one[1:], one[:-1]), (one, later), (one, other)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.033  # 3.3 standard deviations
    assert [int((one == right).sum()) for right in (places, later, other)] < [8, 8, 8]
