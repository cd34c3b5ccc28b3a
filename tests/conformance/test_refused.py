"""Stores that do not create once: they can be read whole, and writing to them is refused."""

import secrets

import pytest

from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.testing.conformance import RefusedConformance
from ckptstore.units import MIB

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=RetryOptions(attempts=3))


def opener(server, engine):
    url, options = server.url(f"tests/{secrets.token_hex(8)}/run"), server.options()
    return lambda: open_store(url, engine=engine, storage_options=options, transfer=PARTS)


@pytest.mark.servers
class TestObstoreOnRclone(RefusedConformance):
    knows_folders = True
    tells_uploads = False

    @pytest.fixture
    def open_again(self, rclone):
        return opener(rclone, "obstore")


@pytest.mark.servers
class TestS3fsOnRclone(RefusedConformance):
    knows_folders = True

    @pytest.fixture
    def open_again(self, rclone):
        return opener(rclone, "s3fs")


@pytest.mark.servers
class TestObstoreOnJuiceFS(RefusedConformance):
    keeps_etags = False
    tells_uploads = False

    @pytest.fixture
    def open_again(self, juicefs):
        return opener(juicefs, "obstore")


@pytest.mark.servers
class TestS3fsOnJuiceFS(RefusedConformance):
    keeps_etags = False

    @pytest.fixture
    def open_again(self, juicefs):
        return opener(juicefs, "s3fs")
