"""s3:// through s3fs: the whole suite, and how it goes wrong."""

import pytest

from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.testing.conformance import StoreConformance
from ckptstore.units import MIB

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2)


@pytest.mark.servers
class TestS3fsOnSeaweedFS(StoreConformance):
    @pytest.fixture
    def open_again(self, s3_url):
        return lambda: open_store(s3_url, engine="s3fs", transfer=PARTS)
