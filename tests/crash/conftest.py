import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "dcp"):  # for `jobs` and `ranks`, in every process
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from jobs import FilePlace, S3Place


@pytest.fixture
def place(request, tmp_path):
    """A run's root that nobody else uses, on the engine that the test asks for."""
    if request.param == "file":
        return FilePlace(tmp_path / "run")
    return S3Place(request.getfixturevalue("s3_url"), request.getfixturevalue("seaweedfs"))


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and "place" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("jobs"))  # one server, one forkserver
            item.add_marker(pytest.mark.servers)
