import itertools

import pytest

_runs = itertools.count()


@pytest.fixture
def url():
    """The root of a run in memory that no other test has."""
    return f"memory://dcp-{next(_runs)}"
