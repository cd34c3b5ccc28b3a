"""s3:// through s3fs: the whole suite, on servers that differ, and how it goes wrong."""

import pytest

from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.testing.conformance import RefusedConformance, StoreConformance
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


@pytest.mark.servers
class TestS3fsOnRclone(RefusedConformance):
    @pytest.fixture
    def open_again(self, rclone, monkeypatch):
        url = fresh_url(rclone, monkeypatch)
        return lambda: open_store(url, engine="s3fs", transfer=PARTS)

    def test_deleting_takes_exactly_one_key(self, store):
        """Of keys, that is: rclone answers 500 to deleting the name of a folder."""
        for key in ("exp[12]", "exp1", "a/b", "a/bc"):
            store.put(key, b"")
        for key in ("exp[12]", "a/b", "absent", "a/absent"):
            store.delete(key)
        assert [info.key for info in store.list("")] == ["a/bc", "exp1"]


@pytest.mark.servers
class TestS3fsOnJuiceFS(RefusedConformance):
    @pytest.fixture
    def open_again(self, juicefs, monkeypatch):
        url = fresh_url(juicefs, monkeypatch)
        return lambda: open_store(url, engine="s3fs", transfer=PARTS)

    def test_put_head_and_list_say_the_same(self, store):
        """But for the ETag, which JuiceFS forgets."""
        store.put("data/0/a", b"four")
        (listed,) = store.list("")
        for info in (listed, store.head("data/0/a")):
            assert (info.key, info.size, info.etag) == ("data/0/a", 4, None)

    def test_an_incomplete_upload_is_listed_and_can_be_forgotten(self):
        pytest.skip("on JuiceFS a part that was on its way brings an upload back that was aborted")
