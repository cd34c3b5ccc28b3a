import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `ranks`, here and in the processes that it starts

from ranks import Gang

_runs = itertools.count()


@pytest.fixture(scope="session")
def gang():
    gang = Gang()
    yield gang
    gang.close()


@pytest.fixture
def url():
    """The root of a run in memory that no other test has."""
    return f"memory://dcp-{next(_runs)}"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
            )
            if "gang" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("gang"))  # one set of processes for all
