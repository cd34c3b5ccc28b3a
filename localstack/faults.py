"""What the proxy can do to a request, and to which."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DropReply:
    """The server acts and answers in full; the client's connection is closed without a byte of the answer."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait.

    Args:
        seconds: How long.
        before: Before the request is passed on; else before the answer is.
    """

    seconds: float
    before: bool = True


@dataclass(frozen=True, slots=True)
class Reset:
    """The client's connection is reset (TCP RST), and nothing is passed on."""


@dataclass(frozen=True, slots=True)
class ResetMidBody:
    """Pass on so much of a body, then reset the connections (TCP RST) on both sides.

    It is the request's body where there is one, else the answer's. A shorter body is reset at its end; of a request's
    the last byte is kept back, so that the server never has it whole.
    """

    after_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the server's place. Nothing is passed on."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stall:
    """Read on no further, answer nothing and close nothing, until the client gives up or the proxy ends."""


Action = DropReply | Delay | Reset | ResetMidBody | Answer | Stall


def s3_error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an error as S3 words it, for example `s3_error(503, "SlowDown")`."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return Answer(status, body.encode(), {"Content-Type": "application/xml"} | dict(headers or {}))


@dataclass(slots=True)
class Seen:
    """A request that came.

    Attributes:
        method: The method.
        path: The path as it was sent, without the query.
        query: What follows `?`, as it was sent.
        headers: Its headers, by lower-case name.
        at: When its head had come, by `time.monotonic`.
        status: Of the answer whose head was passed on; None: none was, until now.
        action: What was done to it.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str] = field(default_factory=dict)
    at: float = 0.0
    status: int | None = None
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requests that a rule is about.

    Args:
        method: The method; None: any.
        path: A regular expression that is found in the path; None: any.
        query: A regular expression that is found in the query; None: any.
        headers: By lower-case name, regular expressions each of which is found in that header.
        after: So many of these requests pass before the first one counts.
        times: At most so many are acted on; None: all.
        share: The share that is acted on, drawn for each.
        seconds: For how long after the rule's beginning; None: as long as it is in force.
    """

    method: str | None = None
    path: str | None = None
    query: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int = 0
    times: int | None = None
    share: float = 1.0
    seconds: float | None = None

    def includes(self, seen: Seen) -> bool:
        """Return whether the request is one of these, whatever its turn."""
        return (
            self.method in (None, seen.method)
            and (self.path is None or re.search(self.path, seen.path) is not None)
            and (self.query is None or re.search(self.query, seen.query) is not None)
            and all(re.search(wanted, seen.headers.get(name, "")) for name, wanted in self.headers.items())
        )


class RuleInForce:
    """A rule, and how often it was used. Used under the proxy's lock.

    Attributes:
        hits: How many requests were acted on.
        passed: How many it is about were let through.
    """

    def __init__(self, action: Action, wanted: Wanted, *, seed: str) -> None:
        self.action, self.hits, self.passed = action, 0, 0
        self._wanted = wanted
        self._began = time.monotonic()
        self._random = random.Random(seed)  # noqa: S311  (no secret)

    def acts_on(self, seen: Seen) -> bool:
        """Return whether it is this request's turn, and count it."""
        wanted = self._wanted
        if not wanted.includes(seen):
            return False
        drawn = self._random.random() < wanted.share
        late = wanted.seconds is not None and time.monotonic() - self._began >= wanted.seconds
        spent = wanted.times is not None and self.hits >= wanted.times
        if self.hits + self.passed < wanted.after or late or spent or not drawn:
            self.passed += 1
            return False
        self.hits += 1
        return True
