"""Each fault at each store call of small histories: the protocol stands. Weakened ones: see `test_weakened.py`."""

from __future__ import annotations

import itertools

import pytest

from ckptstore.objectstore.local import LocalStore
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.testing.enumeration import enumerations


@pytest.mark.parametrize("name", enumerations())
def test_no_fault_at_any_call_breaks_an_invariant(name):
    """I1, I2, I3, I4, I5, I6, I7, I10, I11, I15, I16: see `ckptstore.testing.reference`."""
    assert list(enumerations()[name](MemoryStore)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["each fault", "each death", "each outage", "each intrusion"])
def test_files_pass_the_same_enumerations(name, tmp_path):
    """I1, I2, I3, I4, I5, I6, I7, I11, I16."""
    numbers = itertools.count()
    assert list(enumerations()[name](lambda: LocalStore(str(tmp_path / f"{next(numbers)}")))) == []
