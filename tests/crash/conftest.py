import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `jobs`, here and in the processes that a job starts


@pytest.fixture
def place(request, tmp_path):
    """A run's root that nobody else uses, on the engine that the test asks for."""
    from jobs import FilePlace, S3Place  # noqa: PLC0415  (torch is for those who ask for it)

    if request.param == "file":
        return FilePlace(tmp_path / "run")
    return S3Place(request.getfixturevalue("s3_url"), request.getfixturevalue("seaweedfs"))


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and "place" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.servers)
