"""Planning, gathering and committing for many ranks: work and memory grow as the items do, and no faster."""

import pytest
from counted import calls_of

from benchmarks.scale import Coordinator


class Counted(Coordinator):
    """Counts the calls of each phase in place of measuring it."""

    def phase(self, name, work):
        found = []
        self.phases[name] = calls_of(lambda: found.append(work()), events=("call",))
        return found[0]


def a_save(ranks, items=30):
    coordinator = Counted(ranks, items=items)
    coordinator.save(with_dcp=False)
    return coordinator


@pytest.fixture(scope="module")
def few_and_many():
    a_save(2)  # what is made once
    return a_save(50), a_save(400)


def test_no_phase_does_more_for_an_item_of_400_ranks_than_for_one_of_50(few_and_many):
    few, many = few_and_many
    assert set(few.phases) == set(many.phases)
    assert len(few.phases) == 7
    for name, calls in many.phases.items():
        assert calls <= 1.15 * 8 * few.phases[name] + 1000, name
    assert sum(many.phases.values()) <= 1.1 * 8 * sum(few.phases.values())


def test_as_many_bytes_travel_for_an_item_of_400_ranks_as_for_one_of_50(few_and_many):
    few, many = few_and_many
    for name, size in many.bytes_sent.items():
        assert size <= 1.1 * 8 * few.bytes_sent[name], name
    assert many.bytes_sent["plans"] / (400 * 30) < 100
    assert many.bytes_sent["results"] / (400 * 30) < 100


def test_two_dimensions_of_cuts_are_no_worse_than_one():
    from ckptstore.protocol.coverage import tiling_fault  # noqa: PLC0415

    def grid(rows, columns):
        boxes = [((row, column), (1, 1)) for row in range(rows) for column in range(columns)]
        return calls_of(lambda: tiling_fault((rows, columns), boxes))

    assert grid(8, 200) <= 1.2 * 4 * grid(8, 50)
