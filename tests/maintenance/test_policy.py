"""The policy that is printed allows what each role does, and nothing more; the log can be changed by nobody (I1)."""

import json

import pytest
from iam import Request, is_allowed
from moto.iam.exceptions import MalformedPolicyDocument
from moto.iam.policy_validation import IAMPolicyDocumentValidator

from ckptstore.errors import InvalidInputError
from ckptstore.format.layout import Stem
from ckptstore.maintenance.policy import MAX_POLICY_BYTES, PLACEHOLDERS, bucket_policy

ROLES = ("reader", "trainer", "collector")
STEM = Stem("step-1", 3, 7, "0" * 32)
LOG = ["run.json", "log/000000000000.json", "log/000000000041.json"]
DATA = [STEM.shard_key(18), STEM.part_key(0), STEM.committed_key]
HINTS = ["latest.json", "state/000000000064.json"]
PROBE = ["probe/0123/once"]
OURS = LOG + DATA + HINTS + PROBE
PUT, CREATE = ("s3:PutObject", {}), ("s3:PutObject", {"s3:if-none-match": "*"})
GET, DELETE, ABORT = ("s3:GetObject", {}), ("s3:DeleteObject", {}), ("s3:AbortMultipartUpload", {})
DELETE_VERSION = ("s3:DeleteObjectVersion", {})

# Who may do what to which keys; what is not here is not allowed. A part of an upload is a put without the header.
MAY = {
    "reader": {"get": OURS},
    "trainer": {
        "get": OURS,
        "create": OURS,
        "put": DATA + HINTS + PROBE,
        "abort": DATA + PROBE,
        "delete": PROBE,
    },
    "collector": {
        "get": OURS,
        "create": [*LOG[1:], *HINTS, *PROBE],
        "put": HINTS + PROBE,
        "abort": DATA + PROBE,
        "delete": DATA + PROBE,
    },
}
OPERATIONS = {
    "get": GET,
    "create": CREATE,
    "put": PUT,
    "abort": ABORT,
    "delete": DELETE,
    "delete version": DELETE_VERSION,
}
PLACES = [
    "s3://bucket/runs/llama-7b",
    "s3://bucket/r",
    "s3://bucket",
    "s3://bucket/runs/a*b?c${d}$",
    "s3://b-1/x y/[z]",
]


def root_of(url):
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return f"arn:aws:s3:::{bucket}", f"{prefix}/" if prefix else ""


def asked(url, role, operation, key):
    bucket, root = root_of(url)
    action, context = OPERATIONS[operation]
    return Request(PLACEHOLDERS[role], action, f"{bucket}/{root}{key}", context)


def listing(url, role, prefix, action="s3:ListBucket"):
    return Request(PLACEHOLDERS[role], action, root_of(url)[0], {} if prefix is None else {"s3:prefix": prefix})


@pytest.mark.parametrize("url", PLACES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "all"])
def test_each_role_may_do_just_what_it_does(url, role, together):
    policy = bucket_policy(url, ROLES if together else [role])
    for operation in OPERATIONS:
        allowed = {key for key in OURS if is_allowed(policy, asked(url, role, operation, key))}
        assert allowed == set(MAY[role].get(operation, ())), operation


@pytest.mark.parametrize("url", PLACES)
def test_whatever_else_allows_it_nobody_changes_or_deletes_the_log(url):  # I1
    everything = {
        "Sid": "Admin",
        "Effect": "Allow",
        "Principal": "*",
        "Action": [action for action, _ in OPERATIONS.values()],
        "Resource": [f"{root_of(url)[0]}/*"],
    }
    policy = bucket_policy(url, ROLES)
    policy["Statement"].append(everything)
    for key in LOG:
        for operation in ("put", "delete", "delete version"):
            assert not is_allowed(policy, asked(url, "trainer", operation, key))
        assert is_allowed(policy, asked(url, "trainer", "create", key))
    for key in DATA + HINTS + PROBE:
        assert is_allowed(policy, asked(url, "collector", "delete version", key))


@pytest.mark.parametrize("url", [url for url in PLACES if url != "s3://bucket"])
@pytest.mark.parametrize("role", ROLES)
def test_listing_is_for_the_run_alone_and_an_absent_key_of_it_reads_as_absent(url, role):
    policy, (_, root) = bucket_policy(url, ROLES), root_of(url)
    # of an absent key that is read, Amazon takes the key for the prefix, to decide between 404 and 403
    for prefix in (root, f"{root}log/", f"{root}data/f/", f"{root}probe/0123/absent"):
        assert is_allowed(policy, listing(url, role, prefix))
    for prefix in (None, "", "other/", f"{root[:-1]}-2/", root[:-1]):
        assert not is_allowed(policy, listing(url, role, prefix))


def test_a_run_that_is_a_whole_bucket_may_be_listed_whole():
    policy = bucket_policy("s3://bucket", ROLES)
    for prefix in (None, "", "log/"):
        assert is_allowed(policy, listing("s3://bucket", "reader", prefix))


def test_only_a_collector_lists_uploads():
    policy = bucket_policy(PLACES[0], ROLES)
    for role in ROLES:
        request = listing(PLACES[0], role, "runs/llama-7b/", "s3:ListBucketMultipartUploads")
        assert is_allowed(policy, request) is (role == "collector")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_outside_of_the_run_is_allowed(role, operation):
    url = "s3://bucket/runs/a*b"
    policy = bucket_policy(url, ROLES)
    for key in ("run.json", "runs/axb/data/x", "runs/a*b-2/data/x", "runs/run.json", "runs/a*b"):
        action, context = OPERATIONS[operation]
        request = Request(PLACEHOLDERS[role], action, f"arn:aws:s3:::bucket/{key}", context)
        assert not is_allowed(policy, request)
    other = Request(PLACEHOLDERS[role], OPERATIONS[operation][0], "arn:aws:s3:::bucket-2/runs/a*b/data/x", {})
    assert not is_allowed(policy, other)


def test_somebody_else_may_do_nothing():
    policy = bucket_policy(PLACES[0], ROLES)
    for action, context in OPERATIONS.values():
        assert not is_allowed(
            policy, Request("arn:aws:iam::1:role/OTHER", action, f"{root_of(PLACES[0])[0]}/x", context)
        )


def test_each_statement_has_a_name_of_its_own():
    sids = [statement["Sid"] for statement in bucket_policy(PLACES[0], ROLES)["Statement"]]
    assert len(sids) == len(set(sids))


def test_its_form_is_what_amazon_accepts():
    policy = bucket_policy("s3://bucket/runs/a*b", ROLES)
    for statement in policy["Statement"]:
        del statement["Principal"]  # the validator is for policies of users
    IAMPolicyDocumentValidator(json.dumps(policy)).validate()
    for spoil in ({"Effect": "Maybe"}, {"Action": ["PutObject"]}, {"Condition": {"Nil": {"s3:if-none-match": "true"}}}):
        spoiled = {**policy, "Statement": [{**policy["Statement"][0], **spoil}]}
        with pytest.raises(MalformedPolicyDocument):
            IAMPolicyDocumentValidator(json.dumps(spoiled)).validate()


def test_a_policy_that_is_too_long_is_refused():
    url = f"s3://bucket/{'x' * 900}"
    assert len(json.dumps(bucket_policy(url, ["trainer"]))) <= MAX_POLICY_BYTES
    with pytest.raises(InvalidInputError, match="one role at a time"):
        bucket_policy(f"s3://bucket/{'x' * 1000}", ROLES)


@pytest.mark.parametrize("url", ["file:///data/run", "memory://x", "gs://bucket/run", "s3://"])
def test_what_has_no_bucket_policy_is_refused(url):
    with pytest.raises(InvalidInputError):
        bucket_policy(url, ROLES)
