"""The proxy passes everything on as it is, and does to a request exactly what a rule says.

The servers are real and the clients plain.
"""

import contextlib
import gc
import http.client
import json
import os
import secrets
import socket
import ssl
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import botocore.config
import botocore.exceptions
import pytest
import trustme

from ckptstore.units import MIB
from localstack.faults import Answer, Delay, DropReply, Reset, ResetMidBody, Stall, s3_error
from localstack.proxy import Proxy

pytestmark = pytest.mark.servers

BROKEN = (botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError)


class Through:
    """A bucket as a plain client sees it through a proxy, and past it."""

    def __init__(self, server, proxy):
        self.server, self.proxy = server, proxy
        self.client, self.direct = server.client(proxy.endpoint), server.client()
        self.prefix = f"proxy/{secrets.token_hex(8)}/"

    def at(self, key):
        return {"Bucket": self.server.bucket, "Key": self.prefix + key}

    def put(self, key, body=b"x"):
        return self.client.put_object(**self.at(key), Body=body)

    def get(self, key):
        return self.client.get_object(**self.at(key))["Body"].read()

    def landed(self, key):
        """The object's bytes as the server has them, or None."""
        try:
            return self.direct.get_object(**self.at(key))["Body"].read()
        except self.direct.exceptions.NoSuchKey:
            return None

    def link(self, method, key):
        """The target of a request that anybody may send, for clients that sign nothing."""
        calls = {"GET": "get_object", "PUT": "put_object", "HEAD": "head_object", "DELETE": "delete_object"}
        url = urlsplit(self.client.generate_presigned_url(calls[method], Params=self.at(key)))
        return f"{url.path}?{url.query}"

    def raw(self, method, key, *headers):
        """A socket on which a request without a body was sent."""
        host = urlsplit(self.proxy.endpoint)
        connection = socket.create_connection((host.hostname, host.port), 20)
        lines = [f"{method} {self.link(method, key)} HTTP/1.1", f"Host: {host.netloc}", *headers]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return connection

    def close(self):
        self.client.close()
        self.direct.close()


@pytest.fixture
def through(seaweedfs, proxied):
    through = Through(seaweedfs, proxied(seaweedfs))
    yield through
    through.close()


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connection_to(proxy, **how):
    host = urlsplit(proxy.endpoint)
    return contextlib.closing(http.client.HTTPConnection(host.hostname, host.port, timeout=20, **how))


# Passing on.


@pytest.mark.parametrize("size", [0, 1, 100_000, 20 * MIB])
def test_what_goes_in_is_what_the_server_gets_and_gives(through, size):
    body = os.urandom(size)
    through.put("a", body)
    assert through.landed("a") == body
    assert through.get("a") == body
    assert through.client.head_object(**through.at("a"))["ContentLength"] == size
    assert [(seen.method, seen.status, seen.action) for seen in through.proxy.seen] == [
        ("PUT", 200, None),
        ("GET", 200, None),
        ("HEAD", 200, None),
    ]
    assert all(seen.path == f"/{through.server.bucket}/{through.prefix}a" for seen in through.proxy.seen)


def test_a_multipart_upload_a_listing_a_delete_and_errors_pass(through):
    upload = through.at("a") | {"UploadId": through.client.create_multipart_upload(**through.at("a"))["UploadId"]}
    etag = through.client.upload_part(**upload, PartNumber=1, Body=b"x" * 5 * MIB)["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    through.client.complete_multipart_upload(**upload, MultipartUpload=parts)
    listed = through.client.list_objects_v2(Bucket=through.server.bucket, Prefix=through.prefix)["Contents"]
    assert [found["Size"] for found in listed] == [5 * MIB]
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        through.client.put_object(**through.at("a"), Body=b"y", IfNoneMatch="*")
    through.client.delete_object(**through.at("a"))
    with pytest.raises(through.client.exceptions.NoSuchKey):
        through.get("a")
    assert [seen.status for seen in through.proxy.seen] == [200, 200, 200, 200, 412, 204, 404]
    assert "uploads" in through.proxy.seen[0].query


def test_checksums_that_follow_the_body_pass(through, monkeypatch):
    """`aws-chunked`: the framing is inside of the body."""
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    body = os.urandom(300_000)
    through.client.put_object(**through.at("a"), Body=body, ChecksumAlgorithm="CRC32")
    assert through.landed("a") == body


def test_one_connection_serves_many_requests_with_and_without_bodies(through):
    through.put("a", b"hello")
    with connection_to(through.proxy) as connection:
        for method, key, body, status, answer in [
            ("HEAD", "a", None, 200, b""),
            ("GET", "a", None, 200, b"hello"),
            ("PUT", "b", b"x" * 100_000, 200, b""),
            ("HEAD", "absent", None, 404, b""),
            ("DELETE", "a", None, 204, b""),
            ("GET", "b", None, 200, b"x" * 100_000),
        ]:
            connection.request(method, through.link(method, key), body)
            used = connection.sock
            reply = connection.getresponse()
            assert (reply.status, reply.read()) == (status, answer)
            assert connection.sock is used  # neither closed nor opened anew


def test_chunks_pass_in_both_directions(fake_gcs, proxied):
    proxy, name = proxied(fake_gcs), secrets.token_hex(8)
    chunks = [os.urandom(1 + 7000 * number) for number in range(20)]
    with connection_to(proxy) as connection:
        path = f"/upload/storage/v1/b/{fake_gcs.bucket}/o?uploadType=media&name={name}/"
        for number in range(20):
            in_chunks = {"Transfer-Encoding": "chunked"}
            connection.request("POST", f"{path}{number:02}", iter(chunks), in_chunks, encode_chunked=True)
            assert json.loads(connection.getresponse().read())["size"] == str(sum(map(len, chunks)))
        connection.request("GET", f"/storage/v1/b/{fake_gcs.bucket}/o?prefix={name}/")
        reply = connection.getresponse()
        assert reply.headers["Transfer-Encoding"] == "chunked"
        assert len(json.loads(reply.read())["items"]) == 20
        connection.request("GET", f"/download/storage/v1/b/{fake_gcs.bucket}/o/{name}%2F00?alt=media")
        assert connection.getresponse().read() == b"".join(chunks)


def test_a_client_that_waits_for_leave_gets_it_before_it_sends(through):
    with through.raw("PUT", "a", "Content-Length: 5", "Expect: 100-continue") as connection:
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert through.landed("a") is None
        connection.sendall(b"hello")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    assert through.landed("a") == b"hello"


def test_an_answer_that_does_not_wait_for_the_body_arrives(through, seaweedfs):
    stranger = type(seaweedfs)()
    stranger.endpoint = seaweedfs.endpoint
    client = stranger.client(through.proxy.endpoint)
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        client.put_object(**through.at("a"), Body=b"x" * 20 * MIB)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    client.close()
    with connection_to(through.proxy) as connection:  # one that does not ask for leave
        connection.request("PUT", f"/{through.server.bucket}/{through.prefix}a", b"x" * 20 * MIB)
        assert connection.getresponse().status == 403


def test_no_body_is_held(through):
    size = 100 * MIB
    pieces = (bytes(MIB) for _ in range(size // MIB))

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with connection_to(through.proxy) as connection:
        connection.request("HEAD", through.link("HEAD", "a"))  # all is loaded that will be
        connection.getresponse().read()
        before = most = resident()
        connection.request("PUT", through.link("PUT", "a"), pieces, {"Content-Length": str(size)})
        assert connection.getresponse().read() == b""
        most = max(most, resident())
        connection.request("GET", through.link("GET", "a"))
        reply, got = connection.getresponse(), 0
        while piece := reply.read(MIB):
            got += len(piece)
            most = max(most, resident())
    assert got == size
    assert most - before < 30 * MIB


def test_a_server_that_was_started_again_is_reached_again(seaweedfs, through):
    through.put("a", b"before")
    seaweedfs.restart()
    assert through.get("a") == b"before"


def test_a_server_that_is_not_there_is_a_connection_that_closes(seaweedfs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with Proxy(nowhere) as proxy:
        through = Through(seaweedfs, proxy)
        with pytest.raises(BROKEN):
            through.get("a")
        assert [seen.status for seen in proxy.seen] == [None]
        through.close()


# Faults.


def test_a_dropped_reply_means_the_server_acted_and_the_client_heard_nothing(through):
    with through.proxy.rule(DropReply(), method="PUT", path="/a$", times=1) as rule:
        with pytest.raises(botocore.exceptions.ConnectionClosedError):
            through.put("a", b"landed")
        assert through.landed("a") == b"landed"
        through.put("a", b"again")
    assert rule.hits == 1
    assert through.landed("a") == b"again"
    assert [(seen.status, seen.action) for seen in through.proxy.seen] == [(None, DropReply()), (200, None)]

    with through.proxy.rule(DropReply()), through.raw("GET", "a") as connection:
        assert connection.recv(1000) == b""  # closed, not reset, and not a byte before


def test_a_dropped_reply_of_a_create_is_there_and_cannot_be_created_again(through):
    with through.proxy.rule(DropReply(), times=1), pytest.raises(botocore.exceptions.ConnectionClosedError):
        through.client.put_object(**through.at("a"), Body=b"x", IfNoneMatch="*")
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        through.client.put_object(**through.at("a"), Body=b"x", IfNoneMatch="*")
    assert caught.value.response["Error"]["Code"] == "PreconditionFailed"


def test_a_reset_reaches_the_client_and_nothing_reaches_the_server(through):
    with through.proxy.rule(Reset()) as rule:
        with pytest.raises(BROKEN):
            through.put("a", b"x" * 100_000)
        with through.raw("GET", "a") as connection, pytest.raises(ConnectionResetError):
            connection.recv(1000)
    assert rule.hits == 2
    assert through.landed("a") is None


def test_a_delay_before_holds_the_request_back_and_one_after_only_the_answer(through):
    with ThreadPoolExecutor(1) as threads:
        for key, before, seconds in (("before", True, 1.0), ("after", False, 3.0)):
            with through.proxy.rule(Delay(seconds, before=before)):
                began = time.monotonic()
                put = threads.submit(through.put, key)
                wait_until(lambda: len(through.proxy.seen) == (1 if before else 2))  # noqa: B023  (used at once)
                if before:
                    assert through.landed(key) is None
                else:
                    wait_until(lambda: through.landed(key) == b"x", seconds)  # noqa: B023  (the same)
                assert not put.done()
                put.result(20)
                assert time.monotonic() - began >= seconds
                assert through.landed(key) == b"x"


@pytest.mark.parametrize("after_bytes", [0, MIB, 5 * MIB, 50 * MIB])
def test_an_upload_that_is_reset_in_the_middle_never_lands(through, after_bytes):
    with through.proxy.rule(ResetMidBody(after_bytes), method="PUT"), pytest.raises(BROKEN):
        through.put("a", b"x" * 5 * MIB)
    assert through.landed("a") is None
    assert through.proxy.seen[0].status is None


@pytest.mark.parametrize("after_bytes", [0, MIB + 1])
def test_a_download_that_is_reset_in_the_middle_ends_there(through, after_bytes):
    through.put("a", b"x" * 5 * MIB)
    got = b""
    with through.proxy.rule(ResetMidBody(after_bytes)), connection_to(through.proxy) as connection:
        connection.request("GET", through.link("GET", "a"))
        reply = connection.getresponse()
        with contextlib.suppress(ConnectionResetError):
            while piece := reply.read1(10_000):
                got += piece
            pytest.fail("The body ended, or came whole.")
    assert after_bytes / 2 <= len(got) <= after_bytes


def test_an_answer_in_the_servers_place_is_all_that_happens(through):
    slow_down = s3_error(503, "SlowDown", {"Retry-After": "7"})
    with through.proxy.rule(slow_down, method="PUT"), pytest.raises(botocore.exceptions.ClientError) as caught:
        through.put("a", b"x" * 100_000)
    assert caught.value.response["Error"]["Code"] == "SlowDown"
    assert caught.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"
    assert through.landed("a") is None
    assert through.proxy.seen[0].status == 503


@pytest.mark.parametrize(("method", "status", "body"), [("GET", 503, b"no"), ("HEAD", 503, b""), ("PUT", 204, b"")])
def test_after_an_answer_in_the_servers_place_the_connection_goes_on(through, method, status, body):
    with connection_to(through.proxy) as connection:
        with through.proxy.rule(Answer(status, b"no"), times=1):
            connection.request(method, "/", b"x" * MIB if method == "PUT" else None)
            used = connection.sock
            reply = connection.getresponse()
            assert (reply.status, reply.read()) == (status, body)
        connection.request("PUT", through.link("PUT", "a"), b"x")
        assert connection.getresponse().status == 200
        assert connection.sock is used


def test_a_stall_is_no_answer_and_no_end(through):
    with through.proxy.rule(Stall()), through.raw("GET", "a") as connection:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert through.proxy.seen[0].status is None
    assert through.landed("a") is None


def test_a_stall_ends_when_the_client_goes(through):
    def serving():
        return [thread for thread in threading.enumerate() if thread.name == "proxy"]

    others = len(serving())
    with through.proxy.rule(Stall()), through.raw("PUT", "a", "Content-Length: 5"):
        wait_until(lambda: through.proxy.seen)
        assert len(serving()) == others + 1
    wait_until(lambda: len(serving()) == others)


# Rules.


def statuses(proxied, server, seed, count=40):
    proxy = proxied(server, seed=seed)
    with connection_to(proxy) as connection, proxy.rule(Answer(503), share=0.3) as rule:
        for _ in range(count):
            connection.request("GET", "/")
            connection.getresponse().read()
    found = [seen.status for seen in proxy.seen]
    assert rule.hits == found.count(503)
    assert rule.passed == count - rule.hits
    return found


def test_a_share_is_drawn_with_the_seed(seaweedfs, proxied):
    first = statuses(proxied, seaweedfs, seed=7)
    assert 5 <= first.count(503) <= 20
    assert statuses(proxied, seaweedfs, seed=7) == first
    assert statuses(proxied, seaweedfs, seed=8) != first


@pytest.mark.parametrize(
    ("wanted", "acted_on"),
    [
        ({}, "aabbab"),
        ({"times": 2}, "aa"),
        ({"after": 2}, "bbab"),
        ({"after": 1, "times": 2, "path": "/b$"}, "bb"),
        ({"method": "GET"}, "abb"),
        ({"query": "(^|&)mark=1"}, "ab"),
        ({"path": "nowhere"}, ""),
        ({"headers": {"host": r"^127\.0\.0\.1:\d+$"}, "method": "GET"}, "abb"),
        ({"headers": {"host": "127", "x-mark": "."}}, ""),
        ({"seconds": 0.0}, ""),
        ({"seconds": 60.0}, "aabbab"),
        ({"share": 0.0}, ""),
    ],
    ids=str,
)
def test_a_rule_acts_on_what_it_names(seaweedfs, proxied, wanted, acted_on):
    proxy = proxied(seaweedfs)
    requests = ["HEAD /a", "GET /a?mark=1", "GET /b", "HEAD /b?x=2&mark=1", "HEAD /a", "GET /b?mark=10"]
    requests[-1] = "GET /b?bookmark=1"
    began = time.monotonic()
    with connection_to(proxy) as connection, proxy.rule(Answer(599), **wanted) as rule:
        for request in requests:
            connection.request(*request.split(" "))
            connection.getresponse().read()
    assert "".join(seen.path[1:] for seen in proxy.seen if seen.status == 599) == acted_on
    assert rule.hits == len(acted_on)
    assert began <= proxy.seen[0].at < proxy.seen[-1].at <= time.monotonic()


def test_the_newer_rule_goes_first_and_an_ended_one_does_nothing(seaweedfs, proxied):
    proxy = proxied(seaweedfs)
    with connection_to(proxy) as connection:

        def status():
            connection.request("GET", "/")
            reply = connection.getresponse()
            reply.read()
            return reply.status

        with proxy.rule(Answer(598)) as older:
            with proxy.rule(Answer(599), times=1) as newer:
                assert [status(), status()] == [599, 598]
            assert status() == 598
        assert (older.hits, newer.hits) == (2, 1)
        assert status() == 403


# Bandwidth, TLS, the end.


def test_the_bandwidth_is_for_all_connections_together_and_both_directions(through):
    body = b"x" * 2 * MIB
    through.put("a", body)
    through.proxy.bytes_per_second = 4 * MIB
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        assert [threads.submit(through.get, "a").result, threads.submit(through.put, "b", body).result][0]() == body
    assert 0.8 < time.monotonic() - began < 10
    through.proxy.bytes_per_second = None
    began = time.monotonic()
    for _ in range(20):  # they took 10 s
        through.get("a")
    assert time.monotonic() - began < 8


@pytest.fixture
def authority(tmp_path, monkeypatch):
    """A certificate authority that clients here believe; and a server's context with a certificate of it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    return authority


def context_of(authority, *names):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def test_tls_ends_at_the_proxy_and_all_else_is_the_same(seaweedfs, proxied, authority):
    through = Through(seaweedfs, proxied(seaweedfs, tls=context_of(authority, "127.0.0.1")))
    assert through.proxy.endpoint.startswith("https://")
    body = os.urandom(20 * MIB)
    through.put("a", body)
    assert through.get("a") == body
    with through.proxy.rule(DropReply()), pytest.raises(BROKEN):
        through.put("b", b"landed")
    assert through.landed("b") == b"landed"
    with through.proxy.rule(Reset()), pytest.raises(BROKEN):
        through.put("c")
    through.close()


@pytest.mark.parametrize("wrong", ["name", "authority"])
def test_a_certificate_that_is_not_right_is_not_believed(seaweedfs, proxied, authority, wrong):
    issuer = authority if wrong == "name" else trustme.CA()
    name = "elsewhere.example" if wrong == "name" else "127.0.0.1"
    through = Through(seaweedfs, proxied(seaweedfs, tls=context_of(issuer, name)))
    with pytest.raises(botocore.exceptions.SSLError):
        through.get("a")
    assert through.proxy.seen == []
    through.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_an_upload_to_google_goes_on_where_it_began(fake_gcs, proxied, authority, tls):
    proxy = proxied(fake_gcs, tls=context_of(authority, "127.0.0.1") if tls else None)
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode()) if tls else None
    url = f"{proxy.endpoint}/upload/storage/v1/b/{fake_gcs.bucket}/o?uploadType=resumable&name=resumed"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=10, context=trusting) as reply:  # noqa: S310
        assert reply.headers["Location"].startswith(proxy.endpoint + "/")


def test_the_end_ends_everything(seaweedfs):
    def serving():
        return [thread for thread in threading.enumerate() if thread.name == "proxy"]

    gc.collect()
    others, files = len(serving()), len(os.listdir("/proc/self/fd"))  # noqa: PTH208  (a number)
    with Proxy(seaweedfs.endpoint) as proxy:
        through = Through(seaweedfs, proxy)
        idle = through.raw("GET", "a")
        wait_until(lambda: proxy.seen and proxy.seen[0].status == 404)
        with proxy.rule(Stall()):
            stalled = through.raw("GET", "a")
            wait_until(lambda: len(proxy.seen) == 2)
        with proxy.rule(Delay(600.0)):
            delayed = through.raw("GET", "a")
            wait_until(lambda: len(proxy.seen) == 3)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    for connection in (idle, stalled, delayed):
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
        connection.close()
    host = urlsplit(proxy.endpoint)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host.hostname, host.port), 5)
    through.close()
    assert len(serving()) == others
    assert len(os.listdir("/proc/self/fd")) <= files  # noqa: PTH208  (as above)
