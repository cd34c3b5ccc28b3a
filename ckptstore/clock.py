"""Time, identifiers and chance, as things that are handed in."""

from __future__ import annotations

import random
import secrets
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Nothing in the protocol is decided by `now`; it is written down for people."""

    def now(self) -> datetime:
        """Return the wall-clock time, with its time zone (UTC)."""
        ...

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back; only differences mean anything."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class IdSource(Protocol):
    """Where identifiers and jitter come from."""

    def nonce(self) -> str:
        """Return 32 hexadecimal digits that nobody else has."""
        ...

    def fraction(self) -> float:
        """Return a number in [0, 1), for jitter."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)


class SystemIds:
    """The machine's own randomness."""

    def nonce(self) -> str:
        """Return 128 random bits in hexadecimal."""
        return secrets.token_hex(16)

    def fraction(self) -> float:
        """Return a number in [0, 1)."""
        return random.random()  # noqa: S311  (jitter, not a secret)


def timestamp(clock: Clock) -> str:
    """Return the clock's wall time as ISO 8601 in UTC with milliseconds, e.g. `2026-01-02T03:04:05.678Z`."""
    return clock.now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
