"""What a measurement moves is bounded, and its figures are those of the store."""

import threading
import time

import pytest
from odd_stores import Denies

from ckptstore.clock import SystemClock, SystemIds
from ckptstore.errors import AccessDeniedError, UnavailableError
from ckptstore.maintenance.doctor import examine
from ckptstore.maintenance.report import unwatched
from ckptstore.maintenance.throughput import MAX_BYTES, check_throughput, measure
from ckptstore.maintenance.visit import Visit
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.units import MIB


def visiting(store):
    visit = Visit(store, clock=SystemClock(), ids=SystemIds(), watch=unwatched)
    visit.store.allowed.add("delete")
    return visit


class Peak(ForwardingStore):
    """Notes the most bytes that lay in it at once, and the most writes that were under way."""

    def __init__(self, inner, pause=0.0):
        super().__init__(inner)
        self.bytes = self.under_way = self.most_under_way = self.most_bytes = 0
        self.pause, self.lock = pause, threading.Lock()

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        with self.lock:
            self.under_way += 1
            self.bytes += len(body)
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.most_bytes = max(self.most_bytes, self.bytes)
        time.sleep(self.pause)
        try:
            return super().put(key, body, mode=mode)
        finally:
            with self.lock:
                self.under_way -= 1

    def delete(self, key):
        with self.lock:
            self.bytes -= self._inner.head(key).size
        super().delete(key)


class SharedLine(ForwardingStore):
    """All connections together move 2 MiB a second."""

    def __init__(self, inner):
        super().__init__(inner)
        self.line = threading.Lock()

    def wait(self, size):
        with self.line:
            time.sleep(size / (2 * MIB))

    def put(self, key, body, *, mode=PutMode.OVERWRITE):
        self.wait(len(body))
        return super().put(key, body, mode=mode)

    def get(self, key, *, max_bytes):
        body = super().get(key, max_bytes=max_bytes)
        self.wait(len(body))
        return body


def test_both_ways_are_measured_over_1_4_and_16_connections_and_nothing_is_left():
    store = Peak(MemoryStore())
    visit = visiting(store)
    check_throughput(visit)
    assert [check.name for check in visit.checks] == [
        f"{way}, {connections}"
        for connections in ("1 connection", "4 connections", "16 connections")
        for way in ("up", "down")
    ]
    for check in visit.checks:
        assert (check.verdict, check.unit) == ("ok", "MiB/s")
        assert check.value > 0
        assert check.facts["small_requests_per_second"] > 0
        assert check.facts["bytes"] <= MAX_BYTES
    assert list(store.list("")) == []
    assert store.most_bytes <= MAX_BYTES + 10 * MIB
    assert visit.store.sent <= 200 * MIB + MIB
    assert visit.store.received <= 200 * MIB + MIB


def test_so_many_connections_are_really_used():
    store = Peak(MemoryStore(), pause=0.01)
    visit = visiting(store)
    check_throughput(visit)
    assert store.most_under_way == 16
    rates = {check.name: check.facts["small_requests_per_second"] for check in visit.checks}
    assert rates["up, 1 connection"] < 100 < rates["up, 16 connections"]


def test_a_slow_network_is_measured_in_time_and_about_right():
    visit = visiting(SharedLine(MemoryStore()))
    began = time.monotonic()
    check_throughput(visit)
    assert time.monotonic() - began < 6 * 4 + 5
    assert [check.value for check in visit.checks] == [pytest.approx(2, rel=0.4)] * 6


def test_a_store_that_takes_no_more_is_a_warning_and_no_failure():
    class Busy(Peak):
        def put(self, key, body, *, mode=PutMode.OVERWRITE):
            if self.under_way > 4:
                raise UnavailableError("PUT: 503 SlowDown.")
            return super().put(key, body, mode=mode)

    visit = visiting(Busy(MemoryStore(), pause=0.005))
    check_throughput(visit)
    verdicts = {check.name: check.verdict for check in visit.checks}
    assert verdicts["up, 1 connection"] == verdicts["up, 4 connections"] == "ok"
    assert verdicts["up, 16 connections"] == "warning"
    assert "parts_in_flight" in next(check.hint for check in visit.checks if check.verdict == "warning")
    assert list(visit.store.list("")) == []


def test_where_nothing_can_be_deleted_nothing_large_is_written():
    store = MemoryStore()
    report = examine(Denies(store, "delete"))
    assert [check.verdict for check in report.checks if check.group == "network"] == ["unknown"]
    assert sum(info.size for info in store.list("")) < 13 * MIB


def test_an_interrupt_ends_all_connections_and_leaves_nothing():
    class Interrupted(Peak):
        def put(self, key, body, *, mode=PutMode.OVERWRITE):
            info = super().put(key, body, mode=mode)
            if "/16/" in key:
                raise KeyboardInterrupt
            return info

    store = Interrupted(MemoryStore())
    with pytest.raises(KeyboardInterrupt):
        examine(store)
    assert store.under_way == 0
    assert list(store.list("")) == []


def test_what_one_request_raises_ends_the_measurement():
    calls = []

    def act():
        calls.append(1)
        raise AccessDeniedError("403")

    with pytest.raises(AccessDeniedError):
        measure(act, 4, clock=SystemClock(), seconds=5, max_requests=1000)
    assert len(calls) <= 4
