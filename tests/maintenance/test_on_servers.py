"""On real servers, and through a proxy that answers in their place: what is denied is found by its name."""

import time
from pathlib import Path

import pytest
from places import on

from ckptstore.clock import SystemClock, SystemIds
from ckptstore.errors import OutcomeUnknownError, UnavailableError
from ckptstore.maintenance import throughput
from ckptstore.maintenance.behaviour import PART_BYTES
from ckptstore.maintenance.doctor import Scope, examine
from ckptstore.maintenance.report import unwatched
from ckptstore.maintenance.visit import Visit
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB
from localstack.faults import Stall, s3_error

BRIEFLY = TransferOptions(
    part_bytes=PART_BYTES, retry=RetryOptions(attempts=2, first_pause_seconds=0.01, stall_timeout_seconds=2)
)
ALL_BUT_SPEED = Scope(role="collector", network=False)
DENIED = s3_error(403, "AccessDenied")
S3 = ("obstore-seaweedfs", "s3fs-seaweedfs")


@on("memory", "files", "fsspec-memory", *S3, "s3fs-moto", "gcsfs-fakegcs")
def test_every_engine_is_fit_for_a_trainer_and_nothing_is_left(place):
    store = place.store(transfer=BRIEFLY)
    report = examine(store, scope=Scope(network=False), again=lambda: place.store(transfer=BRIEFLY))
    assert report.failed == []
    assert report.roles["trainer"] is True
    assert list(store.list("")) == []
    if place.url.startswith("/"):
        assert [path for path in Path(place.url).rglob("*") if path.is_file()] == []


@on("obstore-rclone", "s3fs-rclone", "obstore-juicefs", "s3fs-juicefs", "fsspec-files")
def test_what_cannot_create_once_is_not_fit_and_the_rest_is_looked_at_all_the_same(place):
    report = examine(place.store(transfer=BRIEFLY), scope=Scope(multipart=False, network=False))
    assert report.refuses_writing
    assert {check.name for check in report.failed} == {"create once", "create once in a race"}


@pytest.mark.parametrize(
    ("request_", "missing"),
    [
        ({"method": "GET", "query": "list-type"}, "list"),
        ({"method": "DELETE", "query": "^(?!.*uploadId)"}, "delete"),
        ({"method": "POST", "query": "uploads"}, "multipart"),
        ({"method": "GET", "query": "uploads"}, "list uploads"),
        ({"method": "DELETE", "query": "uploadId"}, "abort"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
@on(*S3)
def test_each_request_that_is_denied_is_one_permission_that_is_missing(place, proxied, request_, missing):
    proxy = proxied(place.server)
    with proxy.rule(DENIED, **request_) as denied:
        report = examine(place.through(proxy.endpoint).store(transfer=BRIEFLY), scope=ALL_BUT_SPEED)
    assert denied.hits
    verdicts = {check.name: check.verdict for check in report.checks if check.group == "permission"}
    assert verdicts.pop(missing) in ("failed", "warning")
    assert set(verdicts.values()) <= {"ok", "unknown"}
    assert not report.refuses_writing


@on(*S3)
def test_a_server_that_stops_answering_ends_it_in_time(place, proxied):
    proxy = proxied(place.server)
    began = time.monotonic()
    with proxy.rule(Stall(), after=14), pytest.raises((UnavailableError, OutcomeUnknownError)):
        examine(place.through(proxy.endpoint).store(transfer=BRIEFLY), scope=ALL_BUT_SPEED)
    assert time.monotonic() - began < 30


@on(*S3)
def test_the_speed_of_a_line_is_what_is_measured(place, proxied, monkeypatch):
    monkeypatch.setattr(throughput, "CONNECTIONS", (4,))
    proxy = proxied(place.server)
    proxy.bytes_per_second = 4 * MIB
    store = place.through(proxy.endpoint).store(transfer=BRIEFLY)
    visit = Visit(store, clock=SystemClock(), ids=SystemIds(), watch=unwatched)
    visit.store.allowed.add("delete")
    throughput.check_throughput(visit)
    assert [check.name for check in visit.checks] == ["up, 4 connections", "down, 4 connections"]
    assert all(1 < check.value < 6 for check in visit.checks)  # a busy machine is slower than the line
