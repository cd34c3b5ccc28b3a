"""`doctor --uploads`: what was begun and never ended, and its removal; a living writer's stays."""

from __future__ import annotations

import os
import time

import pytest

from ckptstore.cli.doctor_uploads import duration
from ckptstore.errors import InvalidInputError
from ckptstore.protocol.attempt import begin

DAY = 24 * 3600


@pytest.fixture
def left(run, tmp_path):
    """Two dead attempts' temporaries, two days and one minute old, and one that may be living, two days old."""

    def leave(name, age):
        stem = begin(run.log, run.job, checkpoint_id=name, world_size=1).stem
        folder = tmp_path / "run" / stem.prefix(1)
        folder.mkdir(parents=True)
        path = folder / ".ckptstore-tmp-0123"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
        return path

    old, young = leave("x", 2 * DAY), leave("y", 60)
    run.save("a")
    return old, young, leave("z", 2 * DAY)


def there(left):
    return [path.exists() for path in left]


def test_they_are_listed_and_nothing_is_removed(ckptstore, run, left):
    ended = ckptstore("doctor", run.url, "--uploads")
    assert (ended.code, there(left)) == (0, [True] * 3)
    assert "1 of 3 would be aborted by --abort." in ended.out
    document = ckptstore("doctor", run.url, "--uploads", "--json").json
    assert [each["state"] for each in document["uploads"]] == ["dead", "dead", "may be living"]
    assert [each["may_be_aborted"] for each in document["uploads"]] == [True, False, False]
    assert (document["clock"], document["older_than_seconds"], document["run"]) == ("store", DAY, run.log.run)
    keys = {"key", "upload_id", "began", "age_seconds", "state", "why", "attempt", "may_be_aborted", "aborted", "error"}
    assert all(set(each) == keys for each in document["uploads"])
    assert document["uploads"][0]["age_seconds"] == pytest.approx(2 * DAY, abs=30)


@pytest.mark.parametrize(
    ("more", "stay"),
    [
        ([], [False, True, True]),
        (["--older-than", "7d"], [True, True, True]),
        (["--older-than", "30s"], [False, False, True]),
        (["--all"], [False, True, False]),
        (["--all", "--older-than", "0s"], [False, False, False]),
    ],
)
def test_what_is_dead_and_older_is_aborted_and_what_may_be_living_only_if_asked_for(ckptstore, run, left, more, stay):
    ended = ckptstore("doctor", run.url, "--uploads", "--abort", "--yes", *more, "--json")
    assert (ended.code, there(left)) == (0, stay)
    assert [not each["aborted"] for each in ended.json["uploads"]] == stay


def test_nothing_is_aborted_unless_somebody_says_yes(ckptstore, run, left):
    for more in ([], ["--json"]):
        ended = ckptstore("doctor", run.url, "--uploads", "--abort", *more)
        assert (ended.code, there(left)) == (2, [True] * 3)
        assert "--yes" in ended.out + ended.err


def test_where_there_is_none_it_says_so(ckptstore, run):
    run.save("a")
    ended = ckptstore("doctor", run.url, "--uploads", "--abort")
    assert (ended.code, "No upload is incomplete." in ended.out) == (0, True)


@pytest.mark.parametrize(
    "more",
    [
        ["--uploads", "--quick"],
        ["--uploads", "--for", "reader"],
        ["--uploads", "--policy", "all"],
        ["--policy", "all", "--quick"],
        ["--abort"],
        ["--older-than", "1h"],
        ["--yes"],
        ["--all"],
        ["--uploads", "--yes"],
        ["--uploads", "--all"],
        ["--uploads", "--older-than", "soon"],
        ["--uploads", "--older-than", "-1h"],
        ["--uploads", "--older-than", "1"],
        ["--policy", "king"],
        ["--policy", "all"],
    ],
)
def test_what_does_not_go_together_is_refused(ckptstore, run, left, more):
    ended = ckptstore("doctor", run.url, *more, "--json")
    assert (ended.code, ended.json["error"], there(left)) == (2, "invalid_input", [True] * 3)
    assert ended.json["hint"]


def test_a_damaged_log_calls_nothing_dead(ckptstore, run, left):
    run.flip("log/000000000001.json", 30)
    ended = ckptstore("doctor", run.url, "--uploads", "--abort", "--yes", "--older-than", "0s")
    assert (ended.code, there(left)) == (1, [True] * 3)


def test_a_length_of_time_is_read_as_it_is_written():
    assert [duration(text) for text in ("0s", "90s", "30m", "24h", "7d")] == [0, 90, 1800, DAY, 7 * DAY]
    for text in ("", "h", "1.5h", "24 h", "1w", "9999999d"):
        with pytest.raises(InvalidInputError):
            duration(text)


@pytest.mark.servers
def test_on_an_object_store_uploads_of_a_dead_attempt_are_aborted(ckptstore, make_run, s3_url, seaweedfs):
    run = make_run(s3_url)
    stem = begin(run.log, run.job, checkpoint_id="x", world_size=1).stem
    client, prefix = seaweedfs.client(), s3_url.partition(f"{seaweedfs.bucket}/")[2]
    client.create_multipart_upload(Bucket=seaweedfs.bucket, Key=f"{prefix}/{stem.shard_key(3)}")
    arguments = ("doctor", s3_url, "--engine", "s3fs", "--uploads", "--abort", "--yes", "--older-than", "0s", "--json")
    (living,) = ckptstore(*arguments).json["uploads"]
    assert (living["state"], living["aborted"], living["key"]) == ("may be living", False, stem.shard_key(3))
    run.save("a")
    (dead,) = ckptstore(*arguments).json["uploads"]
    assert (dead["state"], dead["aborted"]) == ("dead", True)
    assert ckptstore(*arguments).json["uploads"] == []


@pytest.mark.servers
def test_a_policy_is_printed_and_nothing_is_set(ckptstore, s3_url, seaweedfs):
    ended = ckptstore("doctor", s3_url, "--policy", "trainer")
    assert ended.code == 0
    assert {statement["Effect"] for statement in ended.json["Statement"]} == {"Allow", "Deny"}
    assert "nothing was changed" in ended.err
    assert len(ckptstore("doctor", s3_url, "--policy", "all").json["Statement"]) > len(ended.json["Statement"])
    client = seaweedfs.client()
    with pytest.raises(client.exceptions.ClientError, match="NoSuchBucketPolicy"):
        client.get_bucket_policy(Bucket=seaweedfs.bucket)
