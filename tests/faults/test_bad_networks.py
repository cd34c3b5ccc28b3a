"""What is wrong with network, place or permissions is said in our words, with a hint and without a secret."""

import json
import re
import ssl
import subprocess
import sys
import traceback

import pytest
import trustme
from places import on
from scenes import transfer
from typer.testing import CliRunner

from ckptstore import CheckpointStore
from ckptstore.cli.app import app
from ckptstore.cli.exits import Exit, exit_for
from ckptstore.errors import AccessDeniedError, CkptStoreError, InvalidInputError, UnavailableError
from ckptstore.options import LogOptions, RetryOptions
from localstack.faults import Answer, s3_error
from localstack.ports import free_port_pairs

BRIEF = RetryOptions(
    attempts=2, first_pause_seconds=0.01, longest_pause_seconds=0.05, deadline_seconds=2, stall_timeout_seconds=5
)
LOG = LogOptions(deadline_seconds=0.5)
EVERY_ENGINE = ["obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-fakegcs"]
DUMPS = re.compile(
    r"Generic S3 error|Debug source|reqwest|hyper|ClientError|EndpointConnectionError|aiohttp\.client_|ClientConnector"
    r"|botocore\.exceptions|RetryTimeout|<html|<Error>|<Code>|Signature=|Credential="
)
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>hush-of-the-page</body></html>"


def checked(scene, error, kinds, hint):
    """Check how an error reads, alone and with all that led to it."""
    assert isinstance(error, kinds), error
    assert re.search(hint, error.hint), error.hint
    told = "".join([str(error), repr(error), repr(error.facts), *traceback.format_exception(error)])
    for secret in (scene.through.options.get("secret"), scene.through.options.get("key"), "hush"):
        assert secret is None or secret not in told
    lines = [line for line in told.splitlines() if not re.match(r'\s*(File "|from |import )', line)]
    assert not DUMPS.search("\n".join(lines)), DUMPS.search("\n".join(lines))


def fails(scene, act, kinds, hint):
    with pytest.raises(CkptStoreError) as caught:
        act()
    checked(scene, caught.value, kinds, hint)
    return caught.value


def read(scene):
    found = CheckpointStore.open(scene.through.url, **scene.through.access, transfer=transfer(BRIEF)).latest()
    return found.read("small")


def save(scene):
    scene.save(2, scene.writer(moves=transfer(BRIEF), log=LOG))


def ls(scene, monkeypatch):
    """Run the command in this process; return its exit code and the JSON that it prints."""
    options = dict(scene.through.options)
    for name, option in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
        if option in options:
            monkeypatch.setenv(name, options.pop(option))
    said = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    ended = CliRunner().invoke(app, ["ls", scene.through.url, "--engine", scene.through.engine, *said, "--json"])
    assert "Traceback" not in ended.output
    assert not DUMPS.search(ended.output)
    assert "hush" not in ended.output
    return ended.exit_code, json.loads(ended.stdout)


def ls_fails_alike(scene, monkeypatch, error):
    code, said = ls(scene, monkeypatch)
    assert (code, said["error"], said["hint"]) == (exit_for(error), error.code, error.hint)


def s3(status, code, more=""):
    return Answer(
        status,
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>hush</Message>{more}</Error>".encode(),
        {"Content-Type": "application/xml"},
    )


def gcs(status, reason):
    said = {"error": {"code": status, "message": "hush", "errors": [{"reason": reason, "message": "hush"}]}}
    return Answer(status, json.dumps(said).encode(), {"Content-Type": "application/json"})


S3_ENGINES = ["obstore-seaweedfs", "s3fs-seaweedfs"]
REGION = "<Region>eu-west-1</Region>"
SAID_BY_S3 = {
    "wrong region, 400": (s3(400, "AuthorizationHeaderMalformed", REGION), InvalidInputError, "AWS_REGION"),
    "wrong region, 301": (s3(301, "PermanentRedirect"), InvalidInputError, "AWS_REGION"),
    "expired token": (s3(400, "ExpiredToken"), AccessDeniedError, "Log in again"),
    "unknown key": (s3(403, "InvalidAccessKeyId"), AccessDeniedError, "credentials"),
    "wrong secret": (s3(403, "SignatureDoesNotMatch"), AccessDeniedError, "credentials"),
    "clock": (s3(403, "RequestTimeTooSkewed"), AccessDeniedError, "clock"),
    "denied": (s3(403, "AccessDenied"), AccessDeniedError, "permissions"),
    "no bucket": (s3(404, "NoSuchBucket"), InvalidInputError, "bucket"),
}
SAID_BY_GOOGLE = {
    "expired token": (gcs(401, "authError"), AccessDeniedError, "Log in"),
    "denied": (gcs(403, "forbidden"), AccessDeniedError, "permissions"),
    "no bucket": (gcs(404, "notFound"), InvalidInputError, "bucket"),
}


def is_told_alike_by_all(scene, monkeypatch, action, kinds, hint):
    """Save once; then let every request be answered so, and read, save and list."""
    scene.save(1)
    with scene.proxy.rule(action):
        ls_fails_alike(scene, monkeypatch, fails(scene, lambda: read(scene), kinds, hint))
        fails(scene, lambda: save(scene), kinds, hint)
    scene.check("step-1")


@on(*S3_ENGINES)
@pytest.mark.parametrize("what", SAID_BY_S3)
def test_what_an_s3_server_refuses_everything_for_is_told_with_what_helps(scene, monkeypatch, what):
    is_told_alike_by_all(scene, monkeypatch, *SAID_BY_S3[what])


@on("gcsfs-fakegcs")
@pytest.mark.parametrize("what", SAID_BY_GOOGLE)
def test_what_google_refuses_everything_for_is_told_with_what_helps(scene, monkeypatch, what):
    is_told_alike_by_all(scene, monkeypatch, *SAID_BY_GOOGLE[what])


@on(*EVERY_ENGINE)
@pytest.mark.parametrize("status", [200, 403, 404, 502])
def test_a_web_page_in_the_servers_place_is_no_empty_run_and_no_save(scene, monkeypatch, status):
    """A proxy's page: to log in, or that the server cannot be reached."""
    scene.save(1)
    with scene.proxy.rule(Answer(status, PAGE, {"Content-Type": "text/html; charset=utf-8"})):
        error = fails(scene, lambda: read(scene), CkptStoreError, "HTTPS_PROXY|endpoint|permissions")
        fails(scene, lambda: save(scene), CkptStoreError, "HTTPS_PROXY|endpoint|permissions")
        if not isinstance(error, UnavailableError):  # which a command tries again for seconds
            ls_fails_alike(scene, monkeypatch, error)
    scene.check("step-1")


@on(*EVERY_ENGINE)
def test_a_name_that_does_not_resolve_is_told_as_that(scene):
    scene.through = scene.place.through("http://no-such-host.invalid:9000")
    for act in (read, save):
        error = fails(scene, lambda act=act: act(scene), UnavailableError, "endpoint")
        assert "DNS" in error.message


@on(*EVERY_ENGINE)
def test_nobody_listening_is_told_as_that(scene):
    scene.through = scene.place.through(f"http://127.0.0.1:{free_port_pairs(1)[0]}")
    for act in (read, save):
        fails(scene, lambda act=act: act(scene), UnavailableError, "endpoint")


@pytest.mark.servers
def test_a_command_says_after_some_tries_that_nobody_listens(seaweedfs, fake_gcs):
    nobody = f"http://127.0.0.1:{free_port_pairs(1)[0]}"
    servers = {"obstore": seaweedfs, "s3fs": seaweedfs, "gcsfs": fake_gcs}
    commands = {}
    for engine, server in servers.items():
        said = [word for name, value in server.options(nobody).items() for word in ("-o", f"{name}={value}")]
        words = [sys.executable, "-m", "ckptstore.cli", "ls", server.url("run"), "--engine", engine, *said, "--json"]
        commands[engine] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for command in commands.values():
        said = json.loads(command.communicate(timeout=60)[0])
        assert (command.returncode, said["error"]) == (Exit.STORE, "unavailable")
        assert "See whether the server runs" in said["hint"]


@on(*EVERY_ENGINE)
def test_a_certificate_that_is_not_trusted_is_told_as_that(place, proxied, scene_at):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    scene = scene_at(place)
    scene.through = place.through(proxied(place.server, tls=context).endpoint)
    for act in (read, save):
        error = fails(scene, lambda act=act: act(scene), InvalidInputError, "certificate")
        assert "TLS" in error.message


@on(*S3_ENGINES)
def test_wrong_credentials_are_denied_by_the_server_itself(scene, monkeypatch):
    scene.save(1)
    for wrong in ({"key": "somebody-hush"}, {"secret": "wrong-hush"}):
        scene.through.options.update(scene.place.server.options(scene.proxy.endpoint) | wrong)
        ls_fails_alike(scene, monkeypatch, fails(scene, lambda: read(scene), AccessDeniedError, "credentials"))
        fails(scene, lambda: save(scene), AccessDeniedError, "credentials")
    scene.check("step-1")


@on("obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto", "gcsfs-fakegcs")
def test_a_bucket_that_is_not_there_is_told_and_never_created(scene, monkeypatch):
    scheme = scene.place.server.scheme
    object.__setattr__(scene.through, "url", f"{scheme}://no-such-bucket-here/run")
    ls_fails_alike(scene, monkeypatch, fails(scene, lambda: read(scene), InvalidInputError, "bucket"))
    fails(scene, lambda: save(scene), InvalidInputError, "bucket")
    assert scene.asked("PUT", "^/[^/]*/?$") == []
    assert scene.asked("POST", "/b$") == []
    buckets = scene.client.list_buckets()
    names = [each.name for each in buckets] if scheme == "gs" else [each["Name"] for each in buckets["Buckets"]]
    assert "no-such-bucket-here" not in names


@on(*S3_ENGINES)
def test_who_may_list_and_not_read_is_told_so(scene, monkeypatch):
    scene.save(1)
    with scene.proxy.rule(s3_error(403, "AccessDenied"), method="GET", path="/run/"):
        ls_fails_alike(scene, monkeypatch, fails(scene, lambda: read(scene), AccessDeniedError, "permissions"))
        fails(scene, lambda: save(scene), AccessDeniedError, "permissions")
    scene.check("step-1")


@on(*EVERY_ENGINE)
def test_who_may_read_and_not_write_reads_and_is_told_so(scene, monkeypatch):
    scene.save(1)
    denied = scene.refusal(403, "AccessDenied")
    with scene.proxy.rule(denied, method="PUT"), scene.proxy.rule(denied, method="POST"):
        assert read(scene).tobytes() == scene.states["step-1"]["small"].numpy().tobytes()
        assert ls(scene, monkeypatch)[0] == 0
        fails(scene, lambda: save(scene), AccessDeniedError, "permissions")
    scene.check("step-1")


@on(*EVERY_ENGINE)
def test_who_may_write_and_not_delete_saves(scene):
    """Nothing that a save needs is deleted."""
    with scene.proxy.rule(scene.refusal(403, "AccessDenied"), method="DELETE"):
        scene.save(1, megabytes=6 if scene.place.server.scheme == "s3" else 0)
        scene.save(2)
    scene.check("step-1", "step-2")


FULL = {
    "507": {"s3": s3(507, "InsufficientStorage"), "gs": gcs(507, "insufficientStorage")},
    "quota": {"s3": s3(403, "QuotaExceeded"), "gs": gcs(403, "quotaExceeded")},
    "minio": {"s3": s3(507, "XMinioStorageFull"), "gs": gcs(507, "")},
}


@on(*EVERY_ENGINE)
@pytest.mark.parametrize("how", FULL)
@pytest.mark.parametrize("at", ["the shard", "the commit"])
def test_a_place_without_room_is_told_as_that_and_nothing_is_committed(scene, how, at):
    key = {"the shard": ("complete", "rank-"), "the commit": ("put", "log/000000000001")}[at]
    scheme = scene.place.server.scheme
    tap, rules = scene.upon(*key, FULL[how][scheme], method={"s3": "PUT", "gs": "POST"}[scheme])
    saving = scene.writer(tap, moves=transfer(BRIEF), log=LOG)
    fails(scene, lambda: scene.save(1, saving), UnavailableError, "Make room or raise the quota")
    assert [rule.hits > 0 for rule in rules.values()] == [True]
    scene.rules.close()
    scene.check()
    scene.save(2)
    scene.check("step-2")
