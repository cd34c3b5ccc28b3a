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

    @pytest.fixture
    def open_again(self, rclone):
        return opener(rclone, "obstore")


@pytest.mark.servers
class TestS3fsOnRclone(RefusedConformance):
    knows_folders = True

    @pytest.fixture
    def open_again(self, rclone):
        return opener(rclone, "s3fs")


class OnJuiceFS(RefusedConformance):
    keeps_etags = False

    def test_an_incomplete_upload_is_listed_and_can_be_forgotten(self):
        pytest.skip("On JuiceFS a part that was on its way brings an upload back that was aborted.")


@pytest.mark.servers
class TestObstoreOnJuiceFS(OnJuiceFS):
    @pytest.fixture
    def open_again(self, juicefs):
        return opener(juicefs, "obstore")


@pytest.mark.servers
class TestS3fsOnJuiceFS(OnJuiceFS):
    @pytest.fixture
    def open_again(self, juicefs):
        return opener(juicefs, "s3fs")
