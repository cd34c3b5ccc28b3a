"""Who we are on S3 after a while: credentials that end, that are renewed, and that a server refuses."""

import json
import threading
import time

import pytest
from issuing import who_asked
from scripted import CALLS, HUSH, THERE, multipart, opened

from ckptstore.errors import AccessDeniedError, NotFoundError, UnavailableError
from ckptstore.objectstore import credentials
from ckptstore.units import MIB


def test_a_token_that_ends_while_an_upload_runs_is_renewed(scripted, issuer, monkeypatch):
    """Each part goes with the credentials of its own moment, and no part with ended ones."""
    issuer.seconds = 2.0
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.server.endpoint}/of-this-task")
    issuer.server.script = lambda *_: (200, json.dumps(issuer.next()))

    def script(method, path, turn):
        token = scripted.seen[turn][2]["x-amz-security-token"]
        if issuer.ends[token] + 0.5 < time.time():
            return 400, "ExpiredToken"
        there = (200, "", ("Content-Length", str(20 * MIB)), ("ETag", '"e-4"'), THERE[4])
        done = (200, "<R><ETag>e-4</ETag></R>")
        return multipart(method, path, lambda method: there if method == "HEAD" else done)

    scripted.script = script
    store = opened(storage_options={"endpoint_url": scripted.endpoint})
    with store.open_upload("shard", size=20 * MIB) as begun:  # four parts of 5 MiB
        for _ in range(4):
            begun.write(bytes(5 * MIB))
            time.sleep(1.2)
        assert begun.complete().size == 20 * MIB
    assert len(who_asked(scripted)) >= 3


def test_credentials_that_end_in_the_middle_and_cannot_be_renewed_end_the_upload(scripted, issuer, monkeypatch):
    issuer.seconds = 3.0
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.server.endpoint}/of-this-task")
    issuer.server.script = lambda _method, _path, turn: (200, json.dumps(issuer.next())) if turn < 2 else None
    scripted.script = lambda method, path, _: multipart(method, path, lambda _: (404, "NoSuchKey"))
    store = opened(storage_options={"endpoint_url": scripted.endpoint})

    def write():
        with store.open_upload("shard", size=40 * MIB) as begun:
            for _ in range(8):
                begun.write(bytes(5 * MIB))
                time.sleep(0.6)
            begun.complete()

    with pytest.raises(UnavailableError, match="container-role"):
        write()
    assert {method for method, path, _ in scripted.seen if "uploadId" in path} <= {"PUT"}


def test_a_renewal_that_fails_matters_only_when_the_old_credentials_end(scripted, issuer, monkeypatch):
    """botocore asks early; until the end, what it has is good."""
    issuer.seconds = 6.0
    monkeypatch.setattr(credentials, "_ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.server.endpoint}/of-this-task")
    # botocore asks twice in the beginning: what it gets ends too soon for its taste.
    issuer.server.script = lambda _method, _path, turn: (200, json.dumps(issuer.next())) if turn < 2 else None
    store = opened(storage_options={"endpoint_url": scripted.endpoint})
    with pytest.raises(NotFoundError):
        CALLS["get"](store)
    assert who_asked(scripted) == [("key-2", "token-2")]
    said = NotFoundError
    while said is NotFoundError:
        with pytest.raises((NotFoundError, UnavailableError)) as caught:
            store.get("a", max_bytes=1)
        said = caught.type
    assert "container-role" in str(caught.value)
    assert time.time() > issuer.ends["token-2"] - 1


def refuses(scripted, old):
    """Let a server take every token but one."""

    def script(_method, _path, turn):
        ended = scripted.seen[turn][2].get("x-amz-security-token") == old
        return (400, "ExpiredToken") if ended else (404, "NoSuchKey")

    scripted.script = script


def test_a_token_that_the_server_calls_ended_is_a_denial_that_says_what_to_do(scripted, no_aws, monkeypatch):
    """And what is exported then counts from the next request on."""
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", HUSH), ("SESSION_TOKEN", "old")):
        monkeypatch.setenv(f"AWS_{name}", value)
    refuses(scripted, "old")
    store = opened(storage_options={"endpoint_url": scripted.endpoint})
    with pytest.raises(AccessDeniedError, match="ExpiredToken") as caught:
        CALLS["get"](store)
    assert "Log in again" in caught.value.hint
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    with pytest.raises(NotFoundError):
        CALLS["get"](store)
    assert who_asked(scripted) == [("k", "old"), ("k", "new")]


def test_a_file_of_credentials_that_was_renewed_counts_from_the_next_request_on(scripted, no_aws):
    def write(token):
        (no_aws / "credentials").write_text(
            f"[default]\naws_access_key_id=k\naws_secret_access_key={HUSH}\naws_session_token={token}\n"
        )

    write("old")
    refuses(scripted, "old")
    store = opened(storage_options={"endpoint_url": scripted.endpoint})
    for call in ("get", "create"):
        with pytest.raises(AccessDeniedError):
            CALLS[call](store)
    write("new")
    with pytest.raises(NotFoundError):
        CALLS["get"](store)
    assert who_asked(scripted) == [("k", "old"), ("k", "new")]


def test_a_late_refusal_of_old_credentials_takes_no_newer_ones_away(scripted, no_aws, monkeypatch):
    """One request is still under way with the old ones, while others go on with the new ones."""
    monkeypatch.setattr(credentials, "LOOK_AGAIN_SECONDS", 0.2)
    held, late = threading.Event(), []

    def write(token):
        (no_aws / "credentials").write_text(
            f"[default]\naws_access_key_id=k\naws_secret_access_key={HUSH}\naws_session_token={token}\n"
        )

    def script(_method, path, turn):
        if path.endswith("late"):
            held.wait(20)
        ended = scripted.seen[turn][2].get("x-amz-security-token") == "old"
        return (400, "ExpiredToken") if ended else (404, "NoSuchKey")

    def ask_late():
        try:
            store.get("late", max_bytes=1)
        except AccessDeniedError as error:
            late.append(error)

    write("old")
    scripted.script = script
    store = opened(storage_options={"endpoint_url": scripted.endpoint})
    with pytest.raises(AccessDeniedError):
        CALLS["get"](store)
    thread = threading.Thread(target=ask_late)
    thread.start()
    while not any(path.endswith("late") for _, path, _ in scripted.seen):
        time.sleep(0.01)
    with pytest.raises(AccessDeniedError):
        CALLS["get"](store)
    write("new")
    time.sleep(0.3)
    with pytest.raises(NotFoundError):
        CALLS["get"](store)
    (no_aws / "credentials").unlink()  # whoever looked anew would find nothing
    held.set()
    thread.join(20)
    assert len(late) == 1
    with pytest.raises(NotFoundError):
        CALLS["get"](store)
