"""On a server that obeys policies: the printed one is enough for each role, and each missing right is found by name."""

import secrets

import pytest
from limited import Limited

from ckptstore.errors import AccessDeniedError
from ckptstore.maintenance.behaviour import PART_BYTES
from ckptstore.maintenance.collect import collect, collect_retired, retire_by
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.maintenance.doctor import Scope, examine
from ckptstore.maintenance.policy import bucket_policy
from ckptstore.maintenance.retention import Keep
from ckptstore.maintenance.uploads import abort, find_uploads
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated

pytestmark = pytest.mark.servers
ROLES = ("reader", "trainer", "collector")


@pytest.fixture(scope="module")
def limited():
    with Limited() as server:
        yield server


@pytest.fixture
def url(limited):
    return limited.url(f"tests/{secrets.token_hex(8)}/run")


def opened(limited, url, user):
    transfer = TransferOptions(part_bytes=PART_BYTES, retry=RetryOptions(attempts=2, first_pause_seconds=0.01))
    return open_store(url, engine="s3fs", storage_options=limited.options_of(user), transfer=transfer)


def without(policy, action):
    for statement in policy["Statement"]:
        if statement["Effect"] == "Allow":
            statement["Action"] = [each for each in statement["Action"] if each != action]
    policy["Statement"] = [statement for statement in policy["Statement"] if statement["Action"]]
    return policy


def test_the_printed_policy_is_enough_for_each_role(limited, url):
    limited.set_policy(bucket_policy(url, ROLES))
    trainer = opened(limited, url, "trainer")
    log, job = RunLog.create(trainer), Incarnation.new(job="gpt")
    for name in "ab":
        simulated.save(log, job, name)
    lost = log.fold.newest.commit.stem.shard_key(9)
    limited.client().create_multipart_upload(
        Bucket=limited.bucket, Key=f"{url.partition(limited.bucket)[2][1:]}/{lost}"
    )

    reader = RunLog.open(opened(limited, url, "reader"))
    assert [each.commit.checkpoint_id for each in Catalog(reader).checkpoints()] == ["a", "b"]
    with pytest.raises(AccessDeniedError):
        claim(reader, Incarnation.new(job="other"))

    collector = opened(limited, url, "collector")
    assert Catalog(RunLog.open(collector)).pin(1, holder="eval", reason="") is not None
    dead = find_uploads(collector).abortable(older_than_seconds=0)
    assert [error for _, error in abort(collector, dead)] == [None]
    shard = log.fold.commits[1].commit.stem.shard_key(0)
    collector.delete(shard)
    with pytest.raises(AccessDeniedError):
        trainer.delete(log.fold.commits[2].commit.stem.shard_key(0))
    for store in (trainer, collector, opened(limited, url, "reader")):
        with pytest.raises(AccessDeniedError):
            store.delete("log/000000000001.json")
    with pytest.raises(AccessDeniedError):
        trainer.put("elsewhere/x", b"")


def test_the_printed_policy_is_enough_to_collect_and_a_trainer_only_retires(limited, url):
    limited.set_policy(bucket_policy(url, ROLES))
    trainer = opened(limited, url, "trainer")
    log, job = RunLog.create(trainer), Incarnation.new(job="gpt")
    for name in "abcd":
        simulated.save(log, job, name)
    simulated.upload(trainer, begin(log, job, checkpoint_id="lost", world_size=1), 0)
    lost = begin(log, Incarnation.new(job="gpt"), checkpoint_id="x", world_size=1).stem.shard_key(0)
    key = f"{url.partition(limited.bucket)[2][1:]}/{lost}"
    limited.client().create_multipart_upload(Bucket=limited.bucket, Key=key)
    claim(log, Incarnation.new(job="gpt"))

    assert retire_by(log, Keep(last=3), term=log.fold.term) == [1]
    report = collect_retired(log, now=None, grace_seconds=0)
    assert (report.is_denied, report.deleted, report.collected) == (True, [], [])

    collector = RunLog.open(opened(limited, url, "collector"))
    keep = Keep(last=2)
    shown = plan_collection(collector, keep=keep)  # whose grace needs the store's time
    assert (shown.notes, len(shown.waiting)) == ((), 3)
    digest = plan_collection(collector, keep=keep, grace_seconds=0).digest
    report = collect(collector, digest=digest, keep=keep, grace_seconds=0)
    assert (report.failed, report.retired, report.collected) == ({}, [2], [1, 2])
    assert [each.key for each in report.aborted] == [lost]
    assert plan_collection(collector, keep=keep, grace_seconds=0).is_empty
    assert all(each.ok for each in Catalog(collector).verify_kept(level="full"))


@pytest.mark.parametrize("role", ROLES)
def test_the_printed_policy_satisfies_the_doctor(limited, url, role):
    limited.set_policy(bucket_policy(url, ROLES))
    simulated.save(RunLog.create(opened(limited, url, "trainer")), Incarnation.new(job="gpt"), "a")
    report = examine(opened(limited, url, role), scope=Scope(role=role, network=False))
    denied = {check.name for check in report.checks if check.group == "permission" and check.verdict != "ok"}
    # the least is not all: a trainer does without a list of uploads
    assert denied == ({"list uploads"} if role == "trainer" else set())
    assert report.roles[role] is True
    assert (report.failed, report.left_behind) == ([], ())


@pytest.mark.parametrize(
    ("action", "missing", "role"),
    [
        ("s3:ListBucket", {"list"}, "trainer"),
        ("s3:GetObject", {"read"}, "trainer"),
        ("s3:PutObject", {"create", "overwrite", "multipart"}, "trainer"),
        ("s3:DeleteObject", {"delete"}, "collector"),
        # not s3:AbortMultipartUpload: SeaweedFS takes the right to put for it
        ("s3:ListBucketMultipartUploads", {"list uploads"}, "collector"),
    ],
)
def test_each_right_that_is_missing_is_found_by_its_name(limited, url, action, missing, role):
    limited.set_policy(without(bucket_policy(url, [role]), action))
    report = examine(opened(limited, url, role), scope=Scope(role=role, network=False))
    found = {check.name: check for check in report.checks if check.group == "permission"}
    denied = {name for name, check in found.items() if check.verdict in ("failed", "warning")}
    assert denied - {"list uploads"} == missing - {"list uploads"}
    assert ("list uploads" in denied) is (role == "trainer" or "list uploads" in missing)
    assert report.roles[role] is False
    assert {found[name].facts["right"] for name in missing} == {action}


def test_a_user_that_may_do_nothing_is_one_error(limited, url):
    limited.set_policy(bucket_policy(url, ["reader"]))
    with pytest.raises(AccessDeniedError):
        examine(opened(limited, url, "trainer"))
