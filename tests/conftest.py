"""What all tests share: real servers, and ranks as real processes."""

import signal
import sys
from pathlib import Path

import pytest

from localstack.fixtures import (
    az_url,
    azurite,
    fake_gcs,
    gs_url,
    juicefs,
    moto_server,
    proxied,
    rclone,
    s3_url,
    seaweedfs,
)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `ranks` and `states`, here and in the processes that a gang starts

__all__ = [
    "az_url",
    "azurite",
    "fake_gcs",
    "gs_url",
    "juicefs",
    "moto_server",
    "proxied",
    "rclone",
    "s3_url",
    "seaweedfs",
]


@pytest.fixture
def place(request):
    """Where the run is, see `places.on`."""
    from places import place_at  # noqa: PLC0415  (found by the line above)

    return place_at(request.param, request)


@pytest.fixture(scope="session")
def gang():
    from ranks import Gang  # noqa: PLC0415  (torch is for those who ask for it)

    gang = Gang()
    yield gang
    gang.close()


def pytest_collection_modifyitems(items):
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("adapters", "dcp", "cases", "faults", "telemetry", "training"):
            item.add_marker(
                pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
            )
