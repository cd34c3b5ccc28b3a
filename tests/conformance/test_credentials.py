"""Who we are on S3: where credentials are looked for, and how they are renewed."""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import traceback
from datetime import UTC, datetime

import pytest
from issuing import who_asked
from scripted import BUCKET, CALLS, HUSH, opened

from ckptstore.errors import AccessDeniedError, InvalidInputError, NotFoundError, UnavailableError
from ckptstore.objectstore import credentials
from ckptstore.objectstore.credentials import fill_from_environment, fill_from_session, find_credentials
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


def ask(scripted, **options):
    """Ask for an object that is not there."""
    with pytest.raises(NotFoundError):
        CALLS["get"](opened(storage_options={"endpoint_url": scripted.endpoint, **options}))


def test_a_containers_role_is_found(scripted, issuer, monkeypatch):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.server.endpoint}/of-this-task")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "the task's own")
    issuer.server.script = lambda *_: (200, json.dumps(issuer.next()))
    ask(scripted)
    assert who_asked(scripted) == [("key-1", "token-1")]
    ((method, path, headers),) = issuer.server.seen
    assert (method, path, headers["Authorization"]) == ("GET", "/of-this-task", "the task's own")


def test_an_instances_role_is_found(scripted, issuer, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", issuer.server.endpoint)

    def metadata(method, path, _turn):
        if method == "PUT":
            return 200, "the session's token"
        return 200, "trainer" if path.endswith("/") else json.dumps({"Code": "Success", **issuer.next()})

    issuer.server.script = metadata
    ask(scripted)
    assert who_asked(scripted) == [("key-1", "token-1")]
    assert [path for _, path, _ in issuer.server.seen][-1].endswith("/security-credentials/trainer")


def test_a_web_identity_is_exchanged(scripted, issuer, monkeypatch, tmp_path):
    (tmp_path / "identity").write_text("signed-by-the-cluster")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", issuer.server.endpoint)
    issuer.server.script = lambda *_: (200, issuer.as_xml("AssumeRoleWithWebIdentity"))
    ask(scripted)
    assert who_asked(scripted) == [("key-1", "token-1")]
    (body,) = issuer.server.bodies
    assert b"WebIdentityToken=signed-by-the-cluster" in body


@pytest.mark.parametrize("way", ["option", "AWS_PROFILE"])
def test_a_role_of_a_profile_is_assumed(scripted, issuer, monkeypatch, no_aws, way):
    (no_aws / "credentials").write_text(f"[base]\naws_access_key_id=long-lived\naws_secret_access_key={HUSH}\n")
    (no_aws / "config").write_text(
        "[profile team]\nrole_arn=arn:aws:iam::123456789012:role/trainer\nsource_profile=base\nregion=eu-west-1\n"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", issuer.server.endpoint)
    issuer.server.script = lambda *_: (200, issuer.as_xml("AssumeRole"))
    if way == "AWS_PROFILE":
        monkeypatch.setenv(way, "team")
    ask(scripted, **({"profile": "team"} if way == "option" else {}))
    assert who_asked(scripted) == [("key-1", "token-1")]
    assert "/eu-west-1/s3/" in scripted.seen[0][2]["authorization"]
    assert who_asked(issuer.server) == [("long-lived", None)]


def process(no_aws, code):
    """Let a profile get its credentials from a process."""
    (no_aws / "process.py").write_text(code)
    (no_aws / "config").write_text(f"[default]\ncredential_process = {sys.executable} {no_aws / 'process.py'}\n")


def test_a_process_may_hand_out_credentials(scripted, no_aws):
    said = {"Version": 1, "AccessKeyId": "of-a-process", "SecretAccessKey": HUSH, "SessionToken": "t"}
    process(no_aws, f"print({json.dumps(json.dumps(said))})")
    ask(scripted)
    assert who_asked(scripted) == [("of-a-process", "t")]


def test_a_process_that_fails_is_named_and_what_it_said_is_not_shown(scripted, no_aws):
    process(no_aws, f"import sys; sys.exit({HUSH!r})")
    with pytest.raises(AccessDeniedError, match="CredentialRetrievalError") as caught:
        ask(scripted)
    assert HUSH not in "".join(traceback.format_exception(caught.value))
    assert "aws sts get-caller-identity" in caught.value.hint


def test_whoever_hands_out_credentials_has_a_limit_of_time(scripted, no_aws, monkeypatch):
    monkeypatch.setattr(credentials, "ASK_SECONDS", 1.0)
    process(no_aws, "import time; time.sleep(20)")
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="within 1 s"):
        CALLS["create"](opened(storage_options={"endpoint_url": scripted.endpoint}))
    assert time.monotonic() - began < 15
    assert scripted.seen == []


def test_an_agent_that_does_not_answer_is_an_outage_and_no_denial(scripted, issuer, monkeypatch):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.server.endpoint}/of-this-task")
    issuer.server.script = lambda *_: (500, "InternalError")
    with pytest.raises(UnavailableError, match="container-role"):
        CALLS["create"](opened(storage_options={"endpoint_url": scripted.endpoint}))
    assert scripted.seen == []


ASK = """
    import json, sys
    from ckptstore.errors import CkptStoreError
    from ckptstore.objectstore.urls import open_store
    options = {"endpoint_url": sys.argv[1], **json.loads(sys.argv[2] if sys.argv[2:] else "{}")}
    try:
        open_store("s3://bucket/run", storage_options=options).get("a", max_bytes=1)
    except CkptStoreError as error:
        print(type(error).__name__, error)
    print(sorted({"botocore", "aiobotocore", "boto3"} & sys.modules.keys()))
"""


def run(home, code, *arguments, **environment):
    """Run code in a process of its own, at home in a folder; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    environment = {**kept, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", **environment}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return ended.stdout + ended.stderr


@pytest.fixture
def sso(tmp_path):
    """A home with a profile of SSO, and a function that logs in for so many seconds."""
    cache = tmp_path / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    (tmp_path / ".aws" / "config").write_text(
        "[profile team]\nsso_session=corp\nsso_account_id=123456789012\nsso_role_name=trainer\nregion=eu-west-1\n"
        "[sso-session corp]\nsso_start_url=https://corp.example/start\nsso_region=eu-west-1\n"
    )

    def log_in(seconds):
        end = datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        token = {"accessToken": "logged-in", "expiresAt": end, "startUrl": "https://corp.example/start"}
        (cache / f"{hashlib.sha1(b'corp', usedforsecurity=False).hexdigest()}.json").write_text(json.dumps(token))

    return tmp_path, log_in


def test_a_login_by_sso_is_found(scripted, issuer, sso):
    home, log_in = sso
    log_in(3600)
    one = issuer.next()
    named = {"accessKeyId": one["AccessKeyId"], "secretAccessKey": HUSH, "sessionToken": one["Token"]}
    said = {"roleCredentials": named | {"expiration": int((time.time() + 3600) * 1000)}}
    issuer.server.script = lambda *_: (200, json.dumps(said))
    said = run(home, ASK, scripted.endpoint, AWS_PROFILE="team", AWS_ENDPOINT_URL_SSO=issuer.server.endpoint)
    assert said.startswith("NotFoundError")
    assert who_asked(scripted) == [("key-1", "token-1")]
    ((_, path, headers),) = issuer.server.seen
    assert path.startswith("/federation/credentials")
    assert headers.get("x-amz-sso_bearer_token") == "logged-in"


def test_a_login_that_has_ended_asks_to_log_in_again(scripted, issuer, sso):
    home, log_in = sso
    log_in(-60)
    said = run(home, ASK, scripted.endpoint, AWS_PROFILE="team", AWS_ENDPOINT_URL_SSO=issuer.server.endpoint)
    assert re.match(r"AccessDeniedError The login has ended.*`aws sso login", said)
    assert scripted.seen == []


@pytest.mark.parametrize("config", [False, True], ids=["no configuration", "a region said"])
@pytest.mark.parametrize("way", ["environment", "options"])
def test_credentials_that_are_said_load_no_botocore(scripted, tmp_path, way, config):
    variables = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": HUSH} if way == "environment" else {}
    options = {"key": "k", "secret": HUSH} if way == "options" else {}
    if config:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "config").write_text("[default]\nregion=eu-west-1\n")
        variables["AWS_REGION"] = "eu-west-1"
    printed = run(tmp_path, ASK, scripted.endpoint, json.dumps(options), **variables)
    assert re.fullmatch(r"NotFoundError .*\n\[\]\n", printed)
    assert who_asked(scripted) == [("k", None)]


SERVICES = """
[default]
services = mine
endpoint_url = http://127.0.0.1:9
[services mine]
s3 =
  endpoint_url = {there}
"""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("[default]\nendpoint_url = {there}\n", True),
        (SERVICES, True),
        ("[default]\nignore_configured_endpoint_urls = true\nendpoint_url = {there}\n", False),
    ],
    ids=["profile", "services", "ignored"],
)
def test_the_endpoint_of_the_configuration_is_found(scripted, no_aws, config, expected):
    (no_aws / "config").write_text(config.format(there=scripted.endpoint))
    found = fill_from_session(S3Options(key="k", secret=HUSH))
    assert (found.endpoint_url == scripted.endpoint) is expected
    assert found.region_name == "us-east-1"
