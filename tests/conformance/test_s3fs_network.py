"""s3:// through s3fs with a real server behind a network that loses, resets and crawls."""

import os
import time

import pytest

from ckptstore.errors import OutcomeUnknownError, UnavailableError
from ckptstore.objectstore.port import PutMode
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.units import MIB
from localstack.faults import DropReply, Reset, ResetMidBody, Stall, s3_error

pytestmark = pytest.mark.servers

PATIENT = RetryOptions(attempts=10, first_pause_seconds=0.01, longest_pause_seconds=0.1, stall_timeout_seconds=1)
SIZE = 22 * MIB + 1


class Far:
    """A run on a real server, near and through a proxy."""

    def __init__(self, server, proxy, url):
        self.proxy, self.near = proxy, open_store(url, engine="s3fs")
        transfer = TransferOptions(part_bytes=5 * MIB, parts_in_flight=2, retry=PATIENT)
        options = server.options(proxy.endpoint)
        self.store = open_store(url, engine="s3fs", storage_options=options, transfer=transfer)

    def upload(self, body):
        with self.store.open_upload("shard", size=len(body)) as begun:
            begun.write(body)
            return begun.complete()


@pytest.fixture
def far(seaweedfs, proxied, s3_url):
    return Far(seaweedfs, proxied(seaweedfs), s3_url)


@pytest.mark.parametrize(
    "action",
    [s3_error(503, "SlowDown"), Reset(), DropReply(), ResetMidBody(after_bytes=MIB)],
    ids=["503", "reset", "lost reply", "reset in the body"],
)
def test_an_upload_arrives_whole_though_many_parts_fail(far, action):
    body = os.urandom(SIZE)
    with far.proxy.rule(action, method="PUT", query="partNumber", share=0.5) as rule:
        assert far.upload(body).size == SIZE
    assert rule.hits > 0
    assert far.near.get("shard", max_bytes=SIZE) == body
    assert list(far.near.list_uploads("")) == []


def test_a_part_that_nobody_answers_is_sent_again_on_another_connection(far):
    body = os.urandom(SIZE)
    began = time.monotonic()
    with far.proxy.rule(Stall(), method="PUT", query="partNumber=2", times=1) as rule:
        far.upload(body)
    assert rule.hits == 1
    assert time.monotonic() - began > 6  # a second, and one for each MiB
    assert far.near.get("shard", max_bytes=SIZE) == body


def test_a_slow_network_is_no_stall(far):
    """As long as each part moves at a MiB a second, it may go on."""
    body = os.urandom(11 * MIB)
    far.proxy.bytes_per_second = 2.5 * MIB
    far.upload(body)
    assert [seen.method for seen in far.proxy.seen].count("PUT") == 3
    assert far.store.get("shard", max_bytes=len(body)) == body


@pytest.mark.parametrize("size", [1, SIZE], ids=["one request", "parts"])
def test_a_publication_whose_answer_was_lost_has_happened_once(far, size):
    body = os.urandom(size)
    publishes = {"method": "PUT"} if size == 1 else {"method": "POST", "query": "uploadId"}
    with far.proxy.rule(DropReply(), **publishes, times=1) as rule:
        assert far.upload(body).size == size
    assert rule.hits == 1
    assert sum(seen.method == publishes["method"] and "uploads" not in seen.query for seen in far.proxy.seen) == 1
    assert far.near.get("shard", max_bytes=size) == body


def test_parts_that_the_server_could_not_be_told_to_forget_are_listed(far):
    begun = far.store.open_upload("data/0/shard", size=SIZE)
    begun.write(bytes(SIZE - 1))
    with far.proxy.rule(Reset(), method="DELETE") as rule:
        begun.abort()
    assert rule.hits > 0
    (left,) = far.near.list_uploads("data/")
    assert left.key == "data/0/shard"
    far.near.abort_upload(left)
    assert list(far.near.list_uploads("")) == []


def test_a_create_whose_answer_was_lost_is_neither_denied_nor_repeated(far):
    far.store.put("warm", b"a kept connection")
    with far.proxy.rule(DropReply(), method="PUT") as rule, pytest.raises(OutcomeUnknownError):
        far.store.put("log/0", b"first", mode=PutMode.CREATE)
    assert rule.hits == 1
    assert far.near.get("log/0", max_bytes=10) == b"first"


def test_a_read_that_breaks_off_is_read_again_and_never_short(far):
    body = os.urandom(3 * MIB)
    far.near.put("a", body)
    with far.proxy.rule(ResetMidBody(after_bytes=MIB), method="GET", times=2) as rule:
        assert far.store.get("a", max_bytes=len(body)) == body
    with far.proxy.rule(ResetMidBody(after_bytes=MIB), method="GET", times=2) as again:
        assert far.store.get_range("a", start=1, length=2 * MIB) == body[1 : 2 * MIB + 1]
    assert (rule.hits, again.hits) == (2, 2)


def test_a_listing_is_whole_though_a_page_is_lost(far):
    for number in range(3):
        far.near.put(f"log/{number}", b"")
    with far.proxy.rule(DropReply(), method="GET", query="list-type", times=1) as rule:
        assert [info.key for info in far.store.list("log/")] == ["log/0", "log/1", "log/2"]
    assert rule.hits == 1


def test_a_network_that_never_comes_back_is_an_error(far):
    with far.proxy.rule(Reset()), pytest.raises(UnavailableError):
        far.store.get("a", max_bytes=1)
