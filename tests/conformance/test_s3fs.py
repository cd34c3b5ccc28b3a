"""s3:// through s3fs: the whole suite, on servers that differ, and how it goes wrong."""

import pytest

from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.testing.conformance import StoreConformance
from ckptstore.units import MIB
from localstack.fixtures import fresh_url

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=RetryOptions(attempts=4))


@pytest.mark.servers
class TestS3fsOnSeaweedFS(StoreConformance):
    @pytest.fixture
    def open_again(self, s3_url):
        return lambda: open_store(s3_url, engine="s3fs", transfer=PARTS)


@pytest.mark.servers
class TestS3fsOnMoto(StoreConformance):
    many_keys = 1_001

    @pytest.fixture
    def open_again(self, moto_server, monkeypatch):
        url = fresh_url(moto_server, monkeypatch)
        return lambda: open_store(url, engine="s3fs", transfer=PARTS)
