"""Credentials that end in the middle of a save are renewed; or it says to log in, and the next save works."""

import os
import re
import time

import pytest
from places import Place, on
from scenes import transfer

from ckptstore.errors import AccessDeniedError
from ckptstore.objectstore import credentials

SECONDS = 3  # as long as a renewable key is good
HANDS_OUT = """#!/bin/sh
end=$(date -u -d "+{seconds} seconds" +%Y-%m-%dT%H:%M:%SZ)
echo '{{"Version": 1, "AccessKeyId": "key-'$(date +%s)'", "SecretAccessKey": "hush", "SessionToken": "hush-hush", \
"Expiration": "'$end'"}}'
"""
MOVES = transfer(parts_in_flight=1)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """What stands for `~/.aws`, with nothing in it; and nothing in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def without_keys(scene):
    """Let the scene's stores look for credentials themselves."""
    options = {name: value for name, value in scene.through.options.items() if name not in ("key", "secret")}
    scene.through = Place(scene.through.url, scene.through.engine, options, scene.through.server)


def keys_that_signed(scene):
    """Return the access keys of the requests, in the order in which they were first used."""
    signed = (re.search("Credential=([^/]+)/", seen.headers["authorization"])[1] for seen in scene.proxy.seen)
    return list(dict.fromkeys(signed))


def ends_as_denied(scene, writer=None):
    with pytest.raises(AccessDeniedError) as caught:
        scene.save(1, writer or scene.writer(moves=MOVES), megabytes=16)
    assert "Log in" in caught.value.hint
    assert "rank-00000.safetensors" in caught.value.facts["key"]
    scene.check()


EXPIRED = {"400 ExpiredToken": (400, "ExpiredToken"), "403 ExpiredToken": (403, "ExpiredToken")}


@on("obstore-seaweedfs", "s3fs-seaweedfs")
@pytest.mark.parametrize("answer", EXPIRED)
def test_a_token_that_ends_with_the_second_part_ends_the_save_and_says_to_log_in(scene, answer):
    """From then on everything is refused, also that the server forgets the parts: they are listed."""
    status, code = EXPIRED[answer]
    with scene.proxy.rule(scene.refusal(status, code), path="rank-", after=2) as rule:
        ends_as_denied(scene)
    assert rule.hits >= 2
    assert len(scene.uploads()) == 1
    scene.save(2)
    scene.check("step-2")


@on("gcsfs-book")
def test_a_token_of_google_that_ends_with_the_second_chunk_ends_the_save_and_says_to_log_in(scene):
    with scene.proxy.rule(scene.refusal(401, "authError"), query="upload_id", after=1) as rule:
        ends_as_denied(scene)
    assert rule.hits >= 1
    scene.save(2)
    scene.check("step-2")


def log_in(home, monkeypatch, way, key):
    said = {"aws_access_key_id": key, "aws_secret_access_key": "hush", "aws_session_token": "hush-hush"}
    if way == "exported":
        for name, value in said.items():
            monkeypatch.setenv(name.upper(), value)
    else:
        (home / "credentials").write_text("\n".join(["[default]", *(f"{name}={said[name]}" for name in said)]))


@on("obstore-moto", "s3fs-moto")
@pytest.mark.parametrize("way", ["exported", "in a file"])
def test_the_writer_whose_token_ended_saves_on_after_a_new_login(scene, home, monkeypatch, way):
    monkeypatch.setattr(credentials, "LOOK_AGAIN_SECONDS", 0.1)
    without_keys(scene)
    log_in(home, monkeypatch, way, "old")
    rules = []

    def tap(call, act):
        if call.operation == "write" and not rules:
            rule = scene.proxy.rule(scene.refusal(400, "ExpiredToken"), headers={"authorization": "=old/"})
            rules.append(scene.rules.enter_context(rule))
        return act()

    writer = scene.writer(tap, moves=MOVES)
    ends_as_denied(scene, writer)
    assert keys_that_signed(scene) == ["old"]
    log_in(home, monkeypatch, way, "new")
    time.sleep(0.2)
    scene.save(2, writer, megabytes=6)
    assert rules[0].hits >= 1
    assert keys_that_signed(scene) == ["old", "new"]
    scene.check("step-2")


@on("obstore-moto", "s3fs-moto")
def test_credentials_that_can_be_renewed_are_renewed_in_the_middle_of_a_save(scene, home):
    process = home / "process.sh"
    process.write_text(HANDS_OUT.format(seconds=SECONDS))
    process.chmod(0o700)
    (home / "config").write_text(f"[default]\ncredential_process = {process}\n")
    without_keys(scene)
    written = []

    def tap(call, act):
        if call.operation == "write" and not written:
            time.sleep(SECONDS + 1)
            first = keys_that_signed(scene)[0]
            written.append(
                scene.rules.enter_context(
                    scene.proxy.rule(scene.refusal(400, "ExpiredToken"), headers={"authorization": f"={first}/"})
                )
            )
        return act()

    scene.save(1, scene.writer(tap, moves=MOVES), megabytes=16)
    assert [rule.hits for rule in written] == [0]
    assert len(keys_that_signed(scene)) > 1
    scene.check("step-1")
