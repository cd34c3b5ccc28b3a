"""Each fault at each store call of small histories: the protocol stands, and weakened ones are caught."""

from __future__ import annotations

import itertools

import pytest

from ckptstore.objectstore.local import LocalStore
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.testing.enumeration import enumerations
from ckptstore.testing.weakened import WEAKENED


@pytest.mark.parametrize("name", enumerations())
def test_no_fault_at_any_call_breaks_an_invariant(name):
    """I1, I2, I3, I4, I5, I6, I7, I10, I11, I15, I16: see `ckptstore.testing.reference`."""
    assert list(enumerations()[name](MemoryStore)) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["each fault", "each death", "each outage", "each intrusion"])
def test_files_pass_the_same_enumerations(name, tmp_path):
    """I1, I2, I3, I4, I5, I6, I7, I11, I16."""
    numbers = itertools.count()
    assert list(enumerations()[name](lambda: LocalStore(str(tmp_path / f"{next(numbers)}")))) == []


@pytest.mark.parametrize("weakened", [each for each in WEAKENED if each.enumeration], ids=lambda each: each.name)
def test_the_same_enumeration_catches_each_weakened_protocol(weakened):
    """By the invariant that it breaks."""
    assert weakened.caught() is not None
