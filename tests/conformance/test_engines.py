"""Every engine and every wrapper, against the whole suite."""

import secrets

import pytest

from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.observed import Counts, ObservedStore
from ckptstore.objectstore.wrappers.prefixed import PrefixedStore
from ckptstore.objectstore.wrappers.retrying import RetryingStore
from ckptstore.objectstore.wrappers.throttled import ThrottledStore
from ckptstore.options import TransferOptions
from ckptstore.testing.conformance import StoreConformance
from ckptstore.units import MIB

PARTS = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2)


class TestMemory(StoreConformance):
    picklable = False

    @pytest.fixture
    def open_again(self):
        name = secrets.token_hex(8)
        return lambda: open_store(f"memory://{name}")


class TestLocal(StoreConformance):
    @pytest.fixture
    def open_again(self, tmp_path):
        return lambda: open_store(tmp_path / "above" / "run")


@pytest.mark.servers
class TestObstoreOnSeaweedFS(StoreConformance):
    @pytest.fixture
    def open_again(self, s3_url):
        return lambda: open_store(s3_url, transfer=PARTS)


@pytest.mark.servers
class TestObstoreOnMoto(StoreConformance):
    @pytest.fixture
    def open_again(self, moto_server):
        url, options = moto_server.url(f"tests/{secrets.token_hex(8)}/run"), moto_server.options()
        return lambda: open_store(url, storage_options=options, transfer=PARTS)


class OnMemory(StoreConformance):
    """A wrapper changes one thing; all else stays."""

    picklable = False

    @pytest.fixture
    def open_again(self):
        inner = MemoryStore()
        return lambda: self.wrap(inner)


class TestPrefixed(OnMemory):
    def wrap(self, inner):
        inner.put("above", b"never seen")
        inner.put("runs/ab/x", b"never seen")
        return PrefixedStore(inner, "runs/a/")


class TestObserved(OnMemory):
    def wrap(self, inner):
        return ObservedStore(inner, Counts())


class TestRetrying(OnMemory):
    def wrap(self, inner):
        return RetryingStore(inner)


class TestThrottled(OnMemory):
    many_keys = 1_001

    def wrap(self, inner):
        return ThrottledStore(inner, seconds_per_request=1e-4, bytes_per_second=1e9)
