"""A proxy's pages and redirects, which obstore takes for answers of a store: what is believed of them."""

import secrets

import pytest
from scripted import CALLS, THERE, opened

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
)
from ckptstore.objectstore.port import PutMode
from ckptstore.units import MIB

PAGE = "<!DOCTYPE html><html><body>Please log in</body></html>"
REDIRECTS = [301, 302, 303, 307, 308]


def sent_on(scripted, status, method, *headers):
    """Let a server send requests of a method on to a page, which has headers of its own; else it stores nothing."""

    def script(asked, path, _turn):
        if path == "/page":
            return 200, PAGE, ("Content-Type", "text/html"), *headers
        if asked == method:
            return status, "", ("Location", f"{scripted.endpoint}/page"), ("Raw", "")
        return 404, "NoSuchKey"

    scripted.script = script


@pytest.mark.parametrize("headers", [THERE[3:], THERE[3:4], ()], ids=["as of an object", "an ETag", "no ETag"])
@pytest.mark.parametrize("call", ["create", "put"])
@pytest.mark.parametrize("status", REDIRECTS)
def test_a_put_that_is_sent_on_to_a_page_is_not_called_stored(scripted, status, call, headers):
    """obstore follows redirects. A record that was believed, and is nowhere, would be a lost commit (I5)."""
    sent_on(scripted, status, "PUT", *headers)
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](opened(storage_options=scripted.options))
    assert type(caught.value) is (OutcomeUnknownError if status in (302, 303) else InvalidInputError)
    assert ("/page" in [path for _, path, _ in scripted.seen]) == (status == 303)


@pytest.mark.parametrize("call", ["create", "put"])
@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ((200, "x", *THERE[3:]), None),
        ((200, "y", *THERE[3:]), OutcomeUnknownError),
        ((200, "xx", *THERE[3:]), OutcomeUnknownError),
        ((404, "NoSuchKey"), OutcomeUnknownError),
        ((403, "AccessDenied"), OutcomeUnknownError),
        ((500, "InternalError"), OutcomeUnknownError),
    ],
)
def test_a_put_whose_answer_does_not_name_its_bytes_is_read_back(scripted, call, there, expected):
    """Encryption by KMS, and other clouds, have other ETags."""
    scripted.script = lambda method, *_: (200, "", ("ETag", '"e"')) if method == "PUT" else there
    store = opened(storage_options=scripted.options)
    if expected is not None:
        with pytest.raises(expected):
            CALLS[call](store)
    else:
        assert CALLS[call](store).etag == "e"
        assert [method for method, _, _ in scripted.seen] == ["PUT", "GET"]


def test_an_empty_page_is_no_empty_object(scripted):
    scripted.script = lambda *_: (200, "", *THERE[3:])
    with pytest.raises(OutcomeUnknownError):
        opened(storage_options=scripted.options).put("a", b"", mode=PutMode.CREATE)


@pytest.mark.servers
@pytest.mark.parametrize("name", ["seaweedfs", "moto_server"])
@pytest.mark.parametrize("body", [b"", b"x", bytes(8 * MIB + 1)], ids=["empty", "one", "8 MiB"])
@pytest.mark.parametrize("mode", PutMode)
def test_a_put_is_one_request_where_the_server_names_its_bytes(request, proxied, name, body, mode):
    server = request.getfixturevalue(name)
    proxy = proxied(server)
    store = opened(server.url(f"once/{secrets.token_hex(8)}"), storage_options=server.options(proxy.endpoint))
    store.put("a", body, mode=mode)
    assert [(seen.method, seen.status) for seen in proxy.seen] == [("PUT", 200)]
    assert store.get("a", max_bytes=len(body)) == body


@pytest.mark.parametrize("status", [200, 302, 403, 404, 407, 502])
@pytest.mark.parametrize("call", ["get", "list", "create"])
def test_a_web_page_is_no_answer_of_a_store(scripted, status, call):
    """A proxy's page must be neither an absent object nor an empty log: the run would look like a fresh one."""
    scripted.script = lambda *_: (status, PAGE, ("Raw", ""), ("Content-Type", "text/html"))
    with pytest.raises(CkptStoreError) as caught:
        CALLS[call](opened(storage_options=scripted.options))
    assert not isinstance(caught.value, NotFoundError | AlreadyExistsError)
    assert "log in" not in str(caught.value)
