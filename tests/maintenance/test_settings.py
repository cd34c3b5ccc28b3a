"""What a bucket is set to: what would eat the log is a failure, what cannot be told is no failure of ours."""

import dataclasses
import datetime as dt
import secrets

import pytest

from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.behaviour import PART_BYTES
from ckptstore.maintenance.doctor import Scope, examine
from ckptstore.maintenance.settings import judge_settings
from ckptstore.objectstore.bucket import BucketSettings, Lock, Rule, Unknown, bucket_settings
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from localstack.faults import Answer, s3_error

ROOT = "runs/llama/"
ABORTS = {"ID": "uploads", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}}
BRIEFLY = TransferOptions(retry=RetryOptions(attempts=2, first_pause_seconds=0.01))


def judged(**settings):
    found = {"root": ROOT, "keeps_versions": False, "rules": (), "lock": Lock(), **settings}
    return {check.name: check for check in judge_settings(BucketSettings(**found))}


@pytest.mark.parametrize(
    ("prefix", "hit"),
    [
        ("", ["the log", "run.json", "data"]),
        ("runs/", ["the log", "run.json", "data"]),
        ("runs/llama", ["the log", "run.json", "data"]),
        ("runs/llama/", ["the log", "run.json", "data"]),
        ("runs/llama/log/", ["the log"]),
        ("runs/llama/log/00000", ["the log"]),
        ("runs/llama/run", ["run.json"]),
        ("runs/llama/data/f/", ["data"]),
        ("runs/llama/d", ["data"]),
        ("runs/llama/probe/", []),
        ("runs/llama/state/", []),
        ("runs/llama/latest.json", []),
        ("runs/llama-2/", []),
        ("other/", []),
    ],
)
@pytest.mark.parametrize(
    "does", [{"expires": True, "expires_after_days": 30}, {"archives_to": ("STANDARD_IA", "DEEP_ARCHIVE")}]
)
def test_a_rule_that_deletes_or_archives_what_a_run_needs_is_a_failure(prefix, hit, does):
    check = judged(rules=(Rule("cleanup", prefix, **does),))["lifecycle rules"]
    assert check.verdict == ("failed" if hit else "ok")
    if hit:
        assert check.error.code == "unsupported"
        assert "'cleanup'" in check.message
        assert {what: what in check.message for what in ("the log", "run.json", "data of")} == {
            "the log": "the log" in hit,
            "run.json": "run.json" in hit,
            "data of": "data" in hit,
        }
        assert ROOT in check.hint


@pytest.mark.parametrize(
    "rule",
    [
        Rule("old", "", expires_old_versions=True),
        Rule("uploads", "", aborts_uploads_after_days=7),
        Rule("tagged", "", expires=True, tagged=True),
        Rule("cheaper", "", archives_to=("STANDARD_IA", "GLACIER_IR", "INTELLIGENT_TIERING")),
    ],
)
def test_a_rule_that_takes_nothing_away_is_fine(rule):
    assert judged(rules=(rule,))["lifecycle rules"].verdict == "ok"


def test_a_rule_for_large_objects_takes_data_and_not_the_log():
    check = judged(rules=(Rule("big", "", larger_than=1 << 20, expires=True),))["lifecycle rules"]
    assert ("data of checkpoints" in check.message, "the log" in check.message) == (True, False)


@pytest.mark.parametrize(
    ("prefix", "verdict"),
    [("", "ok"), (ROOT, "ok"), (f"{ROOT}data/", "ok"), (f"{ROOT}data/0/", "warning"), ("other/", "warning")],
)
def test_a_rule_that_removes_incomplete_uploads_is_asked_for(prefix, verdict):
    check = judged(rules=(Rule("x", prefix, aborts_uploads_after_days=3),))["incomplete uploads"]
    assert (check.verdict, "AbortIncompleteMultipartUpload" in check.hint) == (verdict, verdict == "warning")
    assert f"{ROOT}data/" in judged()["incomplete uploads"].hint


def test_old_versions_that_nothing_removes_are_a_warning():
    assert judged()["versioning"].verdict == "ok"
    assert judged(keeps_versions=True)["versioning"].verdict == "warning"
    kept = judged(keeps_versions=True, rules=(Rule("x", "", expires_old_versions=True),))
    assert kept["versioning"].verdict == "ok"


def test_a_lock_of_everything_suits_the_log_and_is_a_warning():
    assert judged(lock=Lock(enabled=True))["object lock"].verdict == "ok"
    check = judged(lock=Lock(enabled=True, mode="COMPLIANCE", period="30 days"))["object lock"]
    assert (check.verdict, "30 days" in check.message) == ("warning", True)


def test_what_is_not_known_is_unknown_with_its_reason():
    why = Unknown("Denied: no.", "Allow s3:GetLifecycleConfiguration to see it.")
    found = judged(keeps_versions=why, rules=why, lock=why)
    assert {(check.verdict, check.message, check.hint) for check in found.values()} == {
        ("unknown", "Denied: no.", "Allow s3:GetLifecycleConfiguration to see it.")
    }


def test_settings_that_eat_the_log_are_a_failure_of_the_examination_and_unknown_ones_are_not():
    scope = Scope(multipart=False, network=False)
    why = Unknown("no")
    unknown = BucketSettings(ROOT, why, why, why)
    assert examine(MemoryStore(), scope=scope, settings=lambda: unknown).failed == []
    eaten = dataclasses.replace(unknown, rules=(Rule("all", "", expires=True),))
    assert [each.name for each in examine(MemoryStore(), scope=scope, settings=lambda: eaten).failed] == [
        "lifecycle rules"
    ]
    assert [check.group for check in examine(MemoryStore(), scope=scope, settings=lambda: None).checks].count(
        "bucket"
    ) == 0


@pytest.fixture
def bucket(moto_server):
    """A bucket of moto, which may be set; return it with its client and what opens it."""
    client = moto_server.client()
    name = f"settings-{secrets.token_hex(8)}"

    def make(**more):
        client.create_bucket(Bucket=name, **more)
        return client, name, lambda: bucket_settings(f"s3://{name}/runs/llama", storage_options=moto_server.options())

    return make


@pytest.mark.servers
def test_a_bucket_where_nothing_is_set_says_so(bucket):
    _, _, look = bucket()
    assert look() == BucketSettings(ROOT, keeps_versions=False, rules=(), lock=Lock())


@pytest.mark.servers
def test_what_amazon_s_calls_set_is_read_back(bucket):
    client, name, look = bucket(ObjectLockEnabledForBucket=True)
    retention = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 5}}
    client.put_object_lock_configuration(
        Bucket=name, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": retention}
    )
    day = dt.datetime(2031, 1, 1, tzinfo=dt.UTC)
    rules = [
        {**ABORTS, "Filter": {"Prefix": ""}},
        {"ID": "plain", "Prefix": "a/", "Expiration": {"Days": 9}},
        {
            "ID": "both",
            "Filter": {"And": {"Prefix": "b/", "Tags": [{"Key": "k", "Value": "v"}]}},
            "Expiration": {"Date": day},
        },
        {"ID": "tag", "Filter": {"Tag": {"Key": "k", "Value": "v"}}, "Expiration": {"Days": 1}},
        {"ID": "marker", "Filter": {"Prefix": "c/"}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
        {
            "ID": "away",
            "Filter": {"Prefix": "d/"},
            "Transitions": [{"Days": 3, "StorageClass": "GLACIER"}],
            "NoncurrentVersionExpiration": {"NoncurrentDays": 4},
        },
        {"ID": "off", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}, "Status": "Disabled"},
    ]
    client.put_bucket_lifecycle_configuration(
        Bucket=name, LifecycleConfiguration={"Rules": [{"Status": "Enabled", **rule} for rule in rules]}
    )
    found = look()
    assert found.keeps_versions is True
    assert found.lock == Lock(enabled=True, mode="GOVERNANCE", period="5 days")
    assert found.rules == (
        Rule("uploads", "", aborts_uploads_after_days=3),
        Rule("plain", "a/", expires=True, expires_after_days=9),
        Rule("both", "b/", tagged=True, expires=True),
        Rule("tag", "", tagged=True, expires=True, expires_after_days=1),
        Rule("marker", "c/"),
        Rule("away", "d/", archives_to=("GLACIER",), expires_old_versions=True),
    )


@pytest.mark.servers
@pytest.mark.parametrize("server", ["seaweedfs", "moto_server", "rclone", "juicefs"])
def test_no_service_makes_it_fail(request, server):
    server = request.getfixturevalue(server)
    found = bucket_settings(server.url("runs/llama"), storage_options=server.options(), transfer=BRIEFLY)
    checks = judge_settings(found)
    assert len(checks) == 4
    assert {check.verdict for check in checks} <= {"ok", "warning", "unknown"}
    assert all(check.message for check in checks)


@pytest.mark.servers
def test_the_sizes_of_a_rule_are_read_in_amazon_s_own_words(seaweedfs, proxied):
    proxy = proxied(seaweedfs)
    said = (
        "<LifecycleConfiguration><Rule><ID>x</ID><Status>Enabled</Status><Filter><And><Prefix>b/</Prefix>"
        "<ObjectSizeGreaterThan>70000</ObjectSizeGreaterThan><ObjectSizeLessThan>80000</ObjectSizeLessThan></And>"
        "</Filter><Expiration><Days>2</Days></Expiration></Rule></LifecycleConfiguration>"
    )
    with proxy.rule(Answer(200, said.encode(), {"Content-Type": "application/xml"}), query="lifecycle"):
        found = bucket_settings(seaweedfs.url("r"), storage_options=seaweedfs.options(proxy.endpoint))
    assert found.rules == (Rule("x", "b/", larger_than=70000, smaller_than=80000, expires=True, expires_after_days=2),)


@pytest.mark.servers
def test_settings_that_may_not_be_read_are_unknown_with_the_right_that_is_missing(seaweedfs, proxied):
    proxy = proxied(seaweedfs)
    with proxy.rule(s3_error(403, "AccessDenied"), method="GET", query="lifecycle|versioning|object-lock"):
        found = bucket_settings(
            seaweedfs.url("runs/llama"), storage_options=seaweedfs.options(proxy.endpoint), transfer=BRIEFLY
        )
    assert [each.hint for each in (found.keeps_versions, found.rules, found.lock)] == [
        "Allow s3:GetBucketVersioning to see it.",
        "Allow s3:GetLifecycleConfiguration to see it.",
        "Allow s3:GetBucketObjectLockConfiguration to see it.",
    ]


@pytest.mark.servers
def test_the_doctor_fails_where_a_rule_would_eat_the_log(bucket, moto_server):
    client, name, look = bucket()
    rule = {"ID": "month", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, "Expiration": {"Days": 30}}
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})
    store = open_store(
        f"s3://{name}/runs/llama",
        storage_options=moto_server.options(),
        transfer=TransferOptions(part_bytes=PART_BYTES),
    )
    report = examine(store, scope=Scope(network=False), settings=look)
    assert [(check.name, check.error.code) for check in report.failed] == [("lifecycle rules", "unsupported")]
    assert "after 30 days" in report.find("bucket", "lifecycle rules").message


@pytest.mark.parametrize(
    ("url", "groups"),
    [
        ("file:///x", 0),
        ("memory://x", 0),
        ("sftp://host/x", 0),
        ("gs://bucket/x", 1),
        ("az://box", 1),
        ("oss://bucket/x", 1),
    ],
)
def test_elsewhere_there_is_no_bucket_or_one_line_says_that_it_is_not_looked_at(url, groups):
    found = bucket_settings(url)
    checks = judge_settings(found) if found is not None else []
    assert [(check.name, check.verdict) for check in checks] == [("lifecycle rules", "unknown")] * groups
    assert all("none may delete or archive" in check.hint for check in checks)


def test_an_option_that_is_not_known_is_refused():
    with pytest.raises(InvalidInputError):
        bucket_settings("s3://bucket/x", storage_options={"nope": 1})
