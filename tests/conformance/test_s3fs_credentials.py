"""s3:// through s3fs: who we are and where it is, as ~/.aws says it, and as that changes."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted import BUCKET, CALLS, HUSH, QUICK, THERE

from ckptstore.errors import AccessDeniedError, InvalidInputError
from ckptstore.objectstore import via_s3fs
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.units import MIB

IN_CLEAR = ("127.0.0.1", "0.0.0.0")  # noqa: S104  (nothing is bound to it)
CUSTOMER = {"s3_additional_kwargs": {"SSECustomerKey": "k" * 32}}


def log_in(home, key):
    said = f"aws_access_key_id = {key}\naws_secret_access_key = {HUSH}\naws_session_token = {HUSH}\n"
    (home / "credentials").write_text(f"[default]\n{said}")


def store_at(**options):
    return open_store(BUCKET, engine="s3fs", storage_options=options, transfer=TransferOptions(retry=QUICK))


@pytest.mark.parametrize("call", [*CALLS, "list_uploads"])
def test_a_key_of_ones_own_is_never_sent_where_others_can_read_it(scripted, no_aws, call):
    """Also where only ~/.aws/config names such a place: every address of this machine is more than its loopback."""
    log_in(no_aws, "known")
    (no_aws / "config").write_text(f"[default]\nendpoint_url = {scripted.endpoint.replace(*IN_CLEAR)}\n")
    store = store_at(**CUSTOMER)
    with pytest.raises(InvalidInputError, match="others can read it"):
        list(store.list_uploads("")) if call == "list_uploads" else CALLS[call](store)
    assert scripted.seen == []


def test_a_key_of_ones_own_is_sent_to_the_loopback_that_a_profile_names(scripted, no_aws):
    log_in(no_aws, "known")
    (no_aws / "config").write_text(f"[default]\nendpoint_url = {scripted.endpoint}\n")
    scripted.script = lambda *_: THERE
    store_at(**CUSTOMER).head("a")
    ((_, _, headers),) = scripted.seen
    assert "x-amz-server-side-encryption-customer-key" in {name.lower() for name in headers}


def place_of(scripted, *, known, refusal):
    """Return a store whose server knows one key and refuses every other one."""
    scripted.script = lambda *_: THERE if signer(scripted) == known else refusal
    return store_at(endpoint_url=scripted.endpoint)


def signer(scripted):
    headers = {name.lower(): value for name, value in scripted.seen[-1][2].items()}
    return re.search("Credential=([^/]+)/", headers["authorization"])[1]


REFUSALS = [
    (400, "ExpiredToken"),
    (403, "ExpiredToken"),
    (403, "InvalidAccessKeyId"),
    (403, "SignatureDoesNotMatch"),
    (403, "InvalidClientTokenId"),
    (403, "AccessDenied"),
    (401, "Unauthorized"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: " ".join(map(str, refusal)))
def test_credentials_that_were_refused_are_looked_up_anew(scripted, no_aws, refusal):
    """Who has logged in again, or renewed what is in the files, goes on with the same store."""
    log_in(no_aws, "old")
    store = place_of(scripted, known="new", refusal=refusal)
    with pytest.raises(AccessDeniedError):
        store.get("a", max_bytes=1)
    log_in(no_aws, "new")
    assert store.head("a").size == 6 * MIB


def test_credentials_that_were_not_there_are_looked_for_anew(scripted, no_aws):
    store = place_of(scripted, known="new", refusal=(403, "AccessDenied"))
    with pytest.raises(AccessDeniedError, match="no credentials"):
        store.head("a")
    log_in(no_aws, "new")
    assert store.head("a").size == 6 * MIB


def test_credentials_that_go_on_being_refused_are_not_looked_up_each_time(scripted, no_aws, monkeypatch):
    """Each look may ask a service that gives them out, and opens a client."""
    opened = []
    new_session = via_s3fs.new_session
    monkeypatch.setattr(via_s3fs, "new_session", lambda profile: opened.append(profile) or new_session(profile))
    log_in(no_aws, "old")
    store = place_of(scripted, known="new", refusal=(403, "AccessDenied"))
    for _ in range(10):
        with pytest.raises(AccessDeniedError):
            store.get("a", max_bytes=1)
    assert len(opened) == 2


def test_credentials_of_the_options_are_not_looked_for_elsewhere(scripted, no_aws):
    log_in(no_aws, "new")
    scripted.script = lambda *_: THERE if signer(scripted) == "new" else (403, "ExpiredToken")
    store = store_at(key="old", secret=HUSH, endpoint_url=scripted.endpoint)
    for _ in range(2):
        with pytest.raises(AccessDeniedError, match="ExpiredToken"):
            store.get("a", max_bytes=1)


def test_what_is_under_way_while_credentials_are_looked_up_goes_on(scripted, no_aws):
    """A body that is being read belongs to the client that was refused meanwhile."""
    log_in(no_aws, "old")
    begun, go_on = threading.Event(), threading.Event()

    def slowly():
        yield b"123"
        begun.set()
        go_on.wait(30)
        yield b"456"

    def script(_method, path, _turn):
        if path.endswith("slow"):
            return 200, slowly(), ("Content-Length", "6"), ("ETag", '"e"')
        return THERE if signer(scripted) == "new" else (403, "ExpiredToken")

    scripted.script = script
    store = store_at(endpoint_url=scripted.endpoint)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(store.get, "slow", max_bytes=6)
        assert begun.wait(30)
        with pytest.raises(AccessDeniedError):
            store.get("a", max_bytes=1)
        log_in(no_aws, "new")
        store.head("a")
        go_on.set()
        assert slow.result(30) == b"123456"
