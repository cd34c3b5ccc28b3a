"""Large objects go in few parts, whose size is known before the first byte, and are written once: nothing is copied."""

import re
from collections import Counter

import pytest
import torch
from places import EVERY, on
from refusals import command, told
from states import blank, same

import storage_writers as sw
from ckptstore import options
from ckptstore.errors import InvalidInputError
from ckptstore.objectstore import s3_upload, via_obstore
from ckptstore.options import TransferOptions
from ckptstore.units import MIB, TIB

PART = 5 * MIB
PARTS = TransferOptions(part_bytes=PART, parts_in_flight=2)
FEW = 5

on_services_with_numbered_parts = on(
    "obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto", "obstore-azurite"
)
"""Google's uploads are one stream, files have no parts, and fsspec's file systems keep theirs to themselves."""

on_every_service = on(
    "obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto", "obstore-azurite", "gcsfs-fakegcs"
)


@pytest.fixture
def few_parts(monkeypatch):
    """Let the services take five parts of an object instead of ten thousand."""
    for module in (options, s3_upload, via_obstore):
        monkeypatch.setattr(module, "MAX_PARTS", FEW)


def of_size(size, value=1.0):
    return {"w": torch.full((size // 4,), value)}


def parts_sent(proxy):
    """Return how often each part was sent."""
    numbers = (re.search(r"(?:partNumber|blockid)=([^&]+)", seen.query) for seen in proxy.seen if seen.method == "PUT")
    return Counter(number[1] for number in numbers if number)


def copied_or_renamed(proxy):
    """Return the requests by which a service would copy or rename an object."""
    headers = ("x-amz-copy-source", "x-ms-copy-source", "x-ms-rename-source")
    paths = re.compile(r"/(rewriteTo|copyTo|compose|moveTo)(/|$)")
    return [seen for seen in proxy.seen if paths.search(seen.path) or any(name in seen.headers for name in headers)]


@on_services_with_numbered_parts
def test_a_shard_that_would_have_too_many_parts_gets_larger_ones_from_the_first_on(place, proxied, few_parts):
    state, proxy = of_size(7 * PART), proxied(place.server)
    there = place.probed().through(proxy.endpoint)
    sw.save(state, checkpoint_id="a", storage_writer=there.writer(transfer=PARTS))
    assert list(parts_sent(proxy).values()) == [1] * FEW
    found = blank(state)
    sw.load(found, storage_reader=place.reader())
    assert same(found, state)
    assert command("verify", place.url, "--level", "full", *place.arguments)[0] == 0


@on(*EVERY)
@pytest.mark.parametrize("size", [PART - 1, PART, PART + 1, 2 * PART, FEW * PART, FEW * PART + 1])
def test_the_last_byte_arrives_where_sizes_are_multiples_of_a_part_and_where_they_are_not(place, few_parts, size):
    body = bytes(range(251)) * (size // 251 + 1)
    store = place.store(transfer=PARTS)
    with store.open_upload("data/0/shard", size=size) as upload:
        for start in range(0, size, 3 * MIB):
            upload.write(memoryview(body)[start : min(start + 3 * MIB, size)])
        assert upload.complete().size == size
    assert place.store().get("data/0/shard", max_bytes=size) == body[:size]
    if place.url.startswith("s3://"):
        parts = int(store.head("data/0/shard").etag.partition("-")[2] or 1)
        assert parts == min(-(-size // PART), FEW)


@on_every_service
def test_what_is_larger_than_the_service_takes_is_refused_before_the_first_byte(place, proxied):
    proxy = proxied(place.server)
    store = place.through(proxy.endpoint).store()
    error = told(lambda: store.open_upload("data/0/shard", size=60 * TIB), InvalidInputError, "TiB")
    assert "smaller shards" in error.hint
    assert proxy.seen == []


@pytest.mark.parametrize("wrong", [0, -1, PART - 1, 5e6, float(PART), "16 MiB", None, True], ids=repr)
def test_parts_that_no_service_takes_are_refused_at_once(wrong):
    told(lambda: TransferOptions(part_bytes=wrong), InvalidInputError, "part_bytes", seconds=1)


@on_every_service
def test_nothing_is_ever_copied_or_renamed_and_each_byte_is_sent_once(place, proxied):
    state, proxy = of_size(12 * MIB), proxied(place.server)
    there = place.probed().through(proxy.endpoint)
    for name in ("a", "b"):
        sw.save(state, checkpoint_id=name, storage_writer=there.writer(transfer=PARTS))
    found = blank(state)
    sw.load(found, storage_reader=there.reader())
    assert same(found, state)
    for words in (("pin", "a", "--holder", "x"), ("rollback", "a", "--yes"), ("restore", "b@2"), ("verify",)):
        name, *more = words
        assert command(name, there.url, *more, *there.arguments)[0] == 0
    assert copied_or_renamed(proxy) == []
    sent = sum(int(seen.headers.get("content-length", 0)) for seen in proxy.seen if seen.method in ("PUT", "POST"))
    assert 2 * 12 * MIB < sent < 2 * 12 * MIB + MIB // 2
