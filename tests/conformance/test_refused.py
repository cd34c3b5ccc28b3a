"""Stores that do not create once: they are read whole, and writing to them is refused."""

import pytest

from ckptstore.errors import CkptStoreError
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.testing.conformance import RefusedConformance
from ckptstore.units import MIB
from localstack.fixtures import fresh_url

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=RetryOptions(attempts=3))


class RcloneConformance(RefusedConformance):
    """What `rclone serve s3` can do: it shows folders of a disk."""

    engine = ""

    @pytest.fixture
    def open_again(self, rclone, monkeypatch):
        url = fresh_url(rclone, monkeypatch)
        return lambda: open_store(url, engine=self.engine, transfer=PARTS)

    def test_deleting_takes_exactly_one_key(self, store):
        """The name of a folder is no key, and to delete it is an error to rclone; nothing is lost by it."""
        for key in ("exp[12]", "exp1", "exp2", "a/b", "a/bc"):
            store.put(key, b"")
        for key in ("exp[12]", "a/b", "absent", "a/absent"):
            store.delete(key)
        with pytest.raises(CkptStoreError):
            store.delete("a")
        assert [info.key for info in store.list("")] == ["a/bc", "exp1", "exp2"]


class JuiceFSConformance(RefusedConformance):
    """What the JuiceFS gateway can do: an old MinIO."""

    engine = ""

    @pytest.fixture
    def open_again(self, juicefs, monkeypatch):
        url = fresh_url(juicefs, monkeypatch)
        return lambda: open_store(url, engine=self.engine, transfer=PARTS)

    def test_put_head_and_list_say_the_same(self, store):
        """But for the ETag: what a put answers is not kept."""
        store.put("data/0/a", b"four")
        (listed,) = store.list("")
        assert listed == store.head("data/0/a")
        assert (listed.key, listed.size, listed.etag) == ("data/0/a", 4, None)

    def test_an_incomplete_upload_is_listed_and_can_be_forgotten(self):
        pytest.skip("On JuiceFS a part that was on its way brings an upload back that was aborted.")


@pytest.mark.servers
class TestObstoreOnRclone(RcloneConformance):
    engine = "obstore"


@pytest.mark.servers
class TestS3fsOnRclone(RcloneConformance):
    engine = "s3fs"


@pytest.mark.servers
class TestObstoreOnJuiceFS(JuiceFSConformance):
    engine = "obstore"


@pytest.mark.servers
class TestS3fsOnJuiceFS(JuiceFSConformance):
    engine = "s3fs"
