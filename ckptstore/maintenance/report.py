"""What an examination says: plain values, for a table, for JSON and for drills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptstore.errors import AccessDeniedError, CkptStoreError, Fact, UnsupportedError

Verdict = Literal["ok", "warning", "failed", "unknown"]
Group = Literal["run", "store", "permission", "bucket", "clock", "network"]
Role = Literal["reader", "trainer", "collector"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Args:
        group: What it is about: the store's behaviour, a permission, the clock, the network, the bucket's settings, or
            the run.
        name: Which one; stable.
        verdict: `warning`: it works, and something should be done. `unknown`: it could not be told, and why.
        message: What was seen.
        hint: What to do next; empty where nothing is to be done.
        value: A number or a word, where there is one.
        unit: Of the value.
        facts: Further plain values by name.
        error: Of `failed`: what a job would meet.
    """

    group: Group
    name: str
    verdict: Verdict
    message: str
    hint: str = ""
    value: float | str | None = None
    unit: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    error: CkptStoreError | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """A check that is under way."""

    group: Group
    name: str


Watch = Callable[[Began | Check], None]
"""Told of every check when it begins and when it has ended."""


def unwatched(event: Began | Check) -> None:
    """Watch nothing."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a store, its credentials and its network can do.

    Args:
        url: The run's root, without secrets.
        engine: What moved the bytes.
        role: For whom it was asked.
        checks: In the order in which they were made.
        roles: Whether the store with these credentials is fit for a reader, a trainer, a collector; None: nothing
            speaks against it, and not all that it needs was tried. For `role` it is False if a check failed, and only
            then.
        left_behind: Keys that could not be deleted again.
        bytes_sent: Of the probes' bodies.
        bytes_received: Of the probes' bodies.
        seconds: How long it took.
    """

    url: str
    engine: str
    role: Role
    checks: tuple[Check, ...]
    roles: Mapping[Role, bool | None]
    left_behind: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> list[Check]:
        """What does not work."""
        return [check for check in self.checks if check.verdict == "failed"]

    @property
    def untried(self) -> list[str]:
        """Permissions that the role needs, and that were not tried."""
        return [
            check.name
            for check in self.checks
            if (check.group, check.verdict) == ("permission", "unknown") and self.role in check.facts["needed_by"]  # type: ignore[operator]
        ]

    @property
    def refuses_writing(self) -> bool:
        """Whether a job would be refused here, whatever its credentials."""
        return any(check.group == "store" and isinstance(check.error, UnsupportedError) for check in self.failed)

    @property
    def lacks_permission(self) -> bool:
        """Whether something that the role needs is denied."""
        return any(isinstance(check.error, AccessDeniedError) for check in self.failed)

    def find(self, group: Group, name: str) -> Check:
        """Return one check.

        Raises:
            KeyError: It was not made.
        """
        for check in self.checks:
            if (check.group, check.name) == (group, name):
                return check
        raise KeyError(f"{group}: {name}")


def fine(group: Group, name: str, message: str, *, value: float | str | None = None, unit: str | None = None) -> Check:
    """Return a check of something that works."""
    return Check(group, name, "ok", message, value=value, unit=unit)


def failure(group: Group, name: str, error: CkptStoreError) -> Check:
    """Return a check of something that does not work."""
    return Check(group, name, "failed", error.message, hint=error.hint, error=error)
