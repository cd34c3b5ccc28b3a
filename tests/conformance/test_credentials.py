"""Who we are on S3: where credentials are looked for, and how they are renewed."""

import pickle
import re

import pytest
from scripted import BUCKET, CALLS, HUSH, opened

from ckptstore.errors import AccessDeniedError, InvalidInputError, NotFoundError
from ckptstore.objectstore.credentials import fill_from_environment, find_credentials
from ckptstore.objectstore.s3_options import S3Options
from ckptstore.objectstore.urls import open_store


def test_the_environment_fills_what_was_not_said_and_never_mixes_credentials():
    environment = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": HUSH,
        "AWS_SESSION_TOKEN": HUSH,
        "AWS_ENDPOINT_URL": "http://general",
        "AWS_ENDPOINT_URL_S3": "http://special",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }
    expected = {"endpoint_url": "http://special", "region_name": "eu-west-1"}
    assert fill_from_environment(S3Options(), environment) == S3Options(**expected)
    ignoring = environment | {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert fill_from_environment(S3Options(), ignoring) == S3Options(region_name="eu-west-1")
    assert fill_from_environment(S3Options(), {"AWS_REGION": ""}) == S3Options()
    found = find_credentials(S3Options(), environment)()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("k", HUSH, HUSH)
    found = find_credentials(S3Options(key="mine", secret=HUSH), environment)()
    assert (found["access_key_id"], found["token"]) == ("mine", None)
    assert find_credentials(S3Options(anon=True), environment) is None


def test_what_was_said_wins_over_every_variable(scripted, monkeypatch, no_aws):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "wrong")
    with pytest.raises(NotFoundError):
        CALLS["get"](opened(storage_options=scripted.options))
    ((_, _, headers),) = scripted.seen
    assert "Credential=known/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


@pytest.mark.parametrize("given", [{"profile": "typo"}, {}], ids=["option", "environment"])
def test_a_profile_that_does_not_exist_is_bad_input_and_no_outage(scripted, no_aws, monkeypatch, given):
    if not given:
        monkeypatch.setenv("AWS_PROFILE", "typo")
    store = opened(storage_options={**given, "endpoint_url": scripted.options["endpoint_url"]})
    for call in CALLS.values():
        with pytest.raises(InvalidInputError, match="typo") as raised:
            call(store)
        assert "aws configure list" in raised.value.hint


def test_a_profile_is_found(scripted, no_aws):
    (no_aws / "credentials").write_text(f"[team]\naws_access_key_id=of-the-team\naws_secret_access_key={HUSH}\n")
    (no_aws / "config").write_text("[profile team]\nregion=eu-central-1\n")
    options = {"profile": "team", "endpoint_url": scripted.options["endpoint_url"]}
    with pytest.raises(NotFoundError):
        CALLS["get"](opened(storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert re.search(r"Credential=of-the-team/\d+/eu-central-1/s3/", headers["authorization"])


def test_without_credentials_nothing_is_sent(scripted, no_aws):
    store = opened(storage_options={"endpoint_url": scripted.options["endpoint_url"]})
    with pytest.raises(AccessDeniedError, match="no credentials"):
        CALLS["get"](store)
    assert scripted.seen == []


def test_an_anonymous_request_is_not_signed(scripted, no_aws):
    options = {"anon": True, "endpoint_url": scripted.options["endpoint_url"]}
    with pytest.raises(NotFoundError):
        CALLS["get"](opened(storage_options=options))
    ((_, _, headers),) = scripted.seen
    assert "authorization" not in {name.lower() for name in headers}


def test_a_pickled_store_takes_no_secret_of_the_environment_along(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", HUSH)
    assert HUSH.encode() not in pickle.dumps(open_store(BUCKET))
