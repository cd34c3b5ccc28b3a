"""Amazon's rule for one bucket policy, as far as ours goes: nothing is allowed but what is; a Deny wins.

Every word of a policy that is not known here is an error: a test that passes over one would show nothing.
"""

import re
from dataclasses import dataclass, field

LIST_ACTIONS = {"s3:ListBucket", "s3:ListBucketMultipartUploads"}
OBJECT_ACTIONS = {
    "s3:GetObject",
    "s3:PutObject",
    "s3:DeleteObject",
    "s3:DeleteObjectVersion",
    "s3:AbortMultipartUpload",
}


@dataclass(frozen=True)
class Request:
    """One request: who, which action, on what, and what is known of it."""

    principal: str
    action: str
    resource: str
    context: dict = field(default_factory=dict)


def is_allowed(policy, request):
    assert policy["Version"] == "2012-10-17"
    effects = {statement["Effect"] for statement in policy["Statement"] if _applies(statement, request)}
    return "Allow" in effects and "Deny" not in effects


def _applies(statement, request):
    assert set(statement) <= {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    assert statement["Effect"] in ("Allow", "Deny")
    assert re.fullmatch("[A-Za-z0-9]+", statement["Sid"])
    for action in statement["Action"]:
        assert action in LIST_ACTIONS | OBJECT_ACTIONS, action
        # Amazon refuses a policy in which an action meets a resource that it cannot have.
        assert all(("/" in resource) is (action in OBJECT_ACTIONS) for resource in statement["Resource"])
    who = statement["Principal"]
    return (
        who in ("*", {"AWS": request.principal})
        and request.action in statement["Action"]
        and any(_like(pattern, request.resource) for pattern in statement["Resource"])
        and all(_holds(*test, request.context) for test in statement.get("Condition", {}).items())
    )


def _holds(operator, tests, context):
    if operator == "Null":
        return all((name in context) is (value == "false") for name, value in tests.items())
    assert operator == "StringLike"
    return all(
        name in context and any(_like(pattern, context[name]) for pattern in patterns)
        for name, patterns in tests.items()
    )


def _like(pattern, text):
    """`*` and `?` stand for others, `${*}`, `${?}` and `${$}` for themselves; another variable is an error."""
    regex = ""
    while pattern:
        literal = re.match(r"\$\{([*?$])\}", pattern)
        assert literal or not pattern.startswith("$")
        piece = literal[0] if literal else pattern[0]
        regex += re.escape(literal[1]) if literal else {"*": ".*", "?": "."}.get(piece, re.escape(piece))
        pattern = pattern[len(piece) :]
    return re.fullmatch(regex, text, re.DOTALL) is not None
