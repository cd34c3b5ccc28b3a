"""What hands out temporary credentials, and who came with which of them."""

import re
import time
from datetime import UTC, datetime

from scripted import HUSH


class Issuer:
    """What hands out temporary credentials, each with a number: a container's agent, an instance, STS, SSO."""

    def __init__(self, server, *, seconds=3600.0):
        self.server, self.seconds, self.ends = server, seconds, {}

    def next(self):
        number = len(self.ends) + 1
        self.ends[f"token-{number}"] = time.time() + self.seconds
        end = datetime.fromtimestamp(self.ends[f"token-{number}"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"AccessKeyId": f"key-{number}", "SecretAccessKey": HUSH, "Token": f"token-{number}", "Expiration": end}

    def as_xml(self, action):
        one = self.next()
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in one.items()).replace("Token>", "SessionToken>")
        role = "<AssumedRoleUser><Arn>arn:x</Arn><AssumedRoleId>x</AssumedRoleId></AssumedRoleUser>"
        result = f"{role}<Credentials>{inner}</Credentials>"
        return f"<{action}Response><{action}Result>{result}</{action}Result></{action}Response>"


def who_asked(scripted):
    """Return the keys and tokens of the requests that a server saw, without repetitions."""
    seen = {}
    for _, _, sent in scripted.seen:
        headers = {name.lower(): value for name, value in sent.items()}
        key = re.search(r"Credential=([^/]+)/", headers["authorization"])[1]
        seen[key, headers.get("x-amz-security-token")] = None
    return list(seen)
