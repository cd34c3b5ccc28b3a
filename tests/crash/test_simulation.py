"""Drawn histories of the real code: no invariant breaks, weakened protocols break one, and a seed is a history."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckptstore.testing.simulation import play
from ckptstore.testing.weakened import WEAKENED

SEEDS = [*range(150), 1170, 7901]
"""The last two: a checkpoint that is retired while it is verified has no verdict; a RETIRE that was sent before a
collection lands during it."""
BATCHES = 10


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_drawn_history_breaks_an_invariant(batch):
    """I1 to I17 without I9: see `ckptstore.testing.reference`."""
    for seed in SEEDS[batch::BATCHES]:
        assert play(seed).complaints == [], f"python -m ckptstore.testing.simulation --seed {seed} --history"


@pytest.mark.parametrize("weakened", [each for each in WEAKENED if not each.enumeration], ids=lambda each: each.name)
def test_drawn_histories_catch_each_weakened_protocol(weakened):
    """By the invariant that it breaks, within a few seeds."""
    found = weakened.caught()
    assert found is not None
    print(found)  # noqa: T201  (which seed)


def test_a_seed_is_a_history_in_this_process_and_in_another_with_other_hashes():
    """I16."""
    printed = "from ckptstore.testing.simulation import play; print([play(seed).digest for seed in (3, 4, 5)])"
    digests = [play(seed).digest for seed in (3, 4, 5)]
    assert len(set(digests)) == len(digests)
    for hashes in ("1", "2"):
        command = [sys.executable, "-c", printed]
        told = subprocess.run(
            command, env={"PYTHONPATH": ".", "PYTHONHASHSEED": hashes}, capture_output=True, check=True
        )
        assert told.stdout.decode().strip() == str(digests)
