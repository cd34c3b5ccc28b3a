"""s3:// through s3fs: who we are and where it is, as ~/.aws says it, and as that changes."""

import pytest
from scripted import BUCKET, CALLS, HUSH, QUICK, THERE

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions

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
