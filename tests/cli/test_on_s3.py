"""The commands on a real object store."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers


def test_the_commands_answer_on_an_object_store(ckptstore, make_run, s3_url):
    run = make_run(s3_url)
    run.abandon("dead")
    run.save("a")
    key = run.save("b").commit.stem.shard_key(1)
    found = ckptstore("ls", s3_url, "--json").json
    assert [each["checkpoint_id"] for each in found["committed"]] == ["b", "a"]
    assert [(each["checkpoint_id"], each["state"]) for each in found["uncommitted"]] == [("dead", "dead")]
    assert ckptstore("verify", s3_url, "--all", "--level", "full").code == 0
    run.flip(key, 40)
    assert ckptstore("verify", s3_url).code == 0
    findings = ckptstore("verify", s3_url, "--level", "etag", "--json").json["checkpoints"][0]["findings"]
    assert [(each["kind"], each["key"]) for each in findings] == [("rewritten", key)]
    assert ckptstore("verify", s3_url, "--level", "full").code == 1
    assert ckptstore("rollback", s3_url, "a", "--yes").code == 0
    assert ckptstore("latest", s3_url).out == "a@1\n"


def test_an_absent_run_in_a_bucket_is_empty_and_an_absent_bucket_is_bad_input(ckptstore, s3_url):
    assert ckptstore("ls", s3_url).code == 0
    assert ckptstore("latest", s3_url).code == 1
    assert ckptstore("ls", "s3://no-such-bucket-anywhere/run").code == 2


def test_refused_credentials_are_told_and_not_printed(ckptstore, s3_url, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-is-not-it")
    ended = ckptstore("ls", s3_url, "--json")
    assert (ended.code, ended.json["error"]) == (4, "access_denied")
    assert "hunter2" not in ended.out + ended.err
