"""The least that each role needs, as an S3 bucket policy. It is only made here; whoever owns the bucket sets it.

What it rests on, from Amazon's documents: a bucket policy can demand the header `If-None-Match` by the condition key
`s3:if-none-match`, absent (`Null: true`) or there; an Allow adds to what others allow, so that only a Deny holds
against everybody; the right to begin, feed and complete an upload is `s3:PutObject`. `s3:prefix` limits
`s3:ListBucket`; when an absent key is read it is the key, so that under the prefix it reads as absent, and elsewhere as
denied. It does not limit `s3:ListBucketMultipartUploads`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.format.layout import DATA_PREFIX, LATEST_KEY, LOG_PREFIX, PROBE_PREFIX, RUN_KEY, STATE_PREFIX
from ckptstore.maintenance.report import Role

MAX_POLICY_BYTES = 20 * 1024
"""No bucket policy may be longer."""

PLACEHOLDERS: dict[Role, str] = {
    "reader": "arn:aws:iam::ACCOUNT_ID:role/READER",
    "trainer": "arn:aws:iam::ACCOUNT_ID:role/TRAINER",
    "collector": "arn:aws:iam::ACCOUNT_ID:role/COLLECTOR",
}
_HINTS = (LATEST_KEY, f"{STATE_PREFIX}*", f"{PROBE_PREFIX}*")
_CREATED_ONCE = {"Null": {"s3:if-none-match": "false"}}
_NOT_CREATED_ONCE = {"Null": {"s3:if-none-match": "true"}}

Statement = dict[str, Any]


def bucket_policy(url: str, roles: Sequence[Role]) -> dict[str, Any]:
    """Return the policy for the run at `url`, with placeholders for who has each role.

    Args:
        url: `s3://bucket/path/to/run`, in plain form.
        roles: Who is allowed what. What nobody may do is always in it.

    Raises:
        InvalidInputError: It is no s3:// URL, or too long for a policy.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise InvalidInputError(f"Only s3:// has bucket policies, not {scheme}://.", hint="Name an s3:// URL.")
    run = _Run(bucket, f"{prefix}/" if prefix else "")
    makers = {"reader": run.reader, "trainer": run.trainer, "collector": run.collector}
    statements = [statement for role in roles for statement in makers[role](role)]
    policy = {"Version": "2012-10-17", "Statement": [*statements, *run.nobody()]}
    if len(json.dumps(policy)) > MAX_POLICY_BYTES:
        raise InvalidInputError(
            f"The policy would be longer than the {MAX_POLICY_BYTES} bytes that S3 allows.",
            hint="Print it for one role at a time, or use a shorter URL.",
        )
    return policy


class _Run:
    """A run's place in a bucket, and what may be done there."""

    def __init__(self, bucket: str, root: str) -> None:
        self._bucket, self._root = f"arn:aws:s3:::{bucket}", root

    def reader(self, role: Role) -> list[Statement]:
        listing = _allow(role, "List", ["s3:ListBucket"], [self._bucket])
        if self._root:  # a request for the whole bucket names no prefix, which no condition would fit
            listing["Condition"] = {"StringLike": {"s3:prefix": [_literal(self._root) + "*"]}}
        return [_allow(role, "Read", ["s3:GetObject"], self._keys("*")), listing]

    def trainer(self, role: Role) -> list[Statement]:
        return [
            *self.reader(role),
            self._create_once(role, RUN_KEY, f"{LOG_PREFIX}*"),
            _allow(role, "Write", ["s3:PutObject"], self._keys(f"{DATA_PREFIX}*", *_HINTS)),
            self._give_up(role),
            _allow(role, "CleanUp", ["s3:DeleteObject"], self._keys(f"{PROBE_PREFIX}*")),
        ]

    def collector(self, role: Role) -> list[Statement]:
        return [
            *self.reader(role),
            self._create_once(role, f"{LOG_PREFIX}*"),
            _allow(role, "Write", ["s3:PutObject"], self._keys(*_HINTS)),
            self._give_up(role),
            _allow(role, "Delete", ["s3:DeleteObject"], self._keys(f"{DATA_PREFIX}*", f"{PROBE_PREFIX}*")),
            _allow(role, "FindUploads", ["s3:ListBucketMultipartUploads"], [self._bucket]),
        ]

    def nobody(self) -> list[Statement]:
        """Return what holds against everybody, whatever else allows it: I1."""
        log = self._keys(RUN_KEY, f"{LOG_PREFIX}*")
        return [
            {
                "Sid": "LogIsCreatedOnceAndNeverChanged",
                "Effect": "Deny",
                "Principal": "*",
                "Action": ["s3:PutObject"],
                "Resource": log,
                "Condition": _NOT_CREATED_ONCE,
            },
            {
                "Sid": "LogIsNeverDeleted",
                "Effect": "Deny",
                "Principal": "*",
                "Action": ["s3:DeleteObject", "s3:DeleteObjectVersion"],
                "Resource": log,
            },
        ]

    def _create_once(self, role: Role, *keys: str) -> Statement:
        return {**_allow(role, "Append", ["s3:PutObject"], self._keys(*keys)), "Condition": _CREATED_ONCE}

    def _give_up(self, role: Role) -> Statement:
        return _allow(role, "GiveUp", ["s3:AbortMultipartUpload"], self._keys(f"{DATA_PREFIX}*", f"{PROBE_PREFIX}*"))

    def _keys(self, *patterns: str) -> list[str]:
        return [f"{self._bucket}/{_literal(self._root)}{pattern}" for pattern in patterns]


def _allow(role: Role, what: str, actions: list[str], resources: list[str]) -> Statement:
    return {
        "Sid": f"{role.capitalize()}{what}",
        "Effect": "Allow",
        "Principal": {"AWS": PLACEHOLDERS[role]},
        "Action": actions,
        "Resource": resources,
    }


def _literal(text: str) -> str:
    """Return `text` so that a policy takes it as it is: `*`, `?` and `$` mean something there."""
    return "".join(f"${{{each}}}" if each in "*?$" else each for each in text)
