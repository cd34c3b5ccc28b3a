"""Settings: frozen, validated once where they enter."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckptstore.errors import InvalidInputError
from ckptstore.signing import Signing
from ckptstore.units import MIB

MIN_PART_BYTES = 5 * MIB
MAX_PARTS = 10_000
MAX_COUNT = 10**18
MAX_SECONDS = 7 * 24 * 3600
"""Nothing waits longer than a week."""


def check_seconds(**values: object) -> None:
    """Check that each value is a length of time that can pass.

    Raises:
        InvalidInputError: One is no number, not above 0, or not finite; it is named.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
            raise InvalidInputError(
                f"{name} must be a number of seconds, not {value!r}.",
                hint=f"Set {name} above 0 and to at most {MAX_SECONDS}.",
                option=name,
            )


def check_counts(**values: object) -> None:
    """Check that each value is a whole number from 1 to 10^18.

    Raises:
        InvalidInputError: One is not; it is named.
    """
    for name, value in values.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not 1 <= value <= MAX_COUNT:  # type: ignore[operator]
            shown = "one of many digits" if is_whole and abs(value) > MAX_COUNT else f"{value!r:.80}"  # type: ignore[arg-type]
            raise InvalidInputError(
                f"{name} must be a whole number from 1 to 10^18, not {shown}.", hint=f"Set {name}=3, say.", option=name
            )


def check_flags(**values: object) -> None:
    """Check that each value is True or False: the text "no" would count as yes.

    Raises:
        InvalidInputError: One is not; it is named.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InvalidInputError(
                f"{name} must be True or False, not {value!r}.", hint=f"Pass {name}=True, or leave it out.", option=name
            )


def check_kinds(**values: tuple[object, type]) -> None:
    """Check that each value, if there is one, is of the kind that stands beside it.

    Raises:
        InvalidInputError: One is not; it is named.
    """
    for name, (value, kind) in values.items():
        if value is not None and not isinstance(value, kind):
            raise InvalidInputError(
                f"{name} must be {kind.__name__}, not {value!r:.80}.",
                hint=f"Pass {name}={kind.__name__}(...), or leave it out.",
                option=name,
            )


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How records are appended, and whose are believed.

    Args:
        deadline_seconds: How long one append goes on before its outcome is called unknown.
        request_pause_seconds: The first pause between two tries; it doubles, with full jitter, up to 5 seconds.
        assume_single_writer: The user's promise that one process at a time appends. Fencing does not hold then.
        signing: Who signs what is appended, and whose signature a record must have. Pickled with its private key.
        refuse_lost_tail: Nothing is appended where a hint tells that the newest records were lost, as by every command:
            a new one takes the slot of a lost one. A job that does not ask for it goes on, and tells it.
    """

    deadline_seconds: float = 120.0
    request_pause_seconds: float = 0.05
    assume_single_writer: bool = False
    signing: Signing | None = None
    refuse_lost_tail: bool = False

    def __post_init__(self) -> None:
        check_seconds(deadline_seconds=self.deadline_seconds, request_pause_seconds=self.request_pause_seconds)
        check_flags(assume_single_writer=self.assume_single_writer, refuse_lost_tail=self.refuse_lost_tail)
        if not isinstance(self.signing, Signing | None):  # its value is not shown: it may be a key
            raise InvalidInputError(
                "signing must be Signing.", hint="Pass signing=Signing.read(...).", option="signing"
            )


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """How often and how long a request is tried, on every engine alike, with one exception.

    obstore tells nobody of Retry-After, and tries the parts of an upload again by a rule of its own, made from these
    values: a server that asks for a longer pause does not get it, and no part waits less than the first pause.

    Args:
        attempts: Of one request, the first one included.
        first_pause_seconds: The bound of the first pause. It doubles; a pause is drawn between 0 and it (full jitter).
        longest_pause_seconds: Where doubling ends, and the longest that a server may ask for (Retry-After).
        deadline_seconds: After this long no other try of a request begins.
        stall_timeout_seconds: How long a request may be without an answer before it is given up, beyond what its bytes
            need at 1 MiB/s for each part that is in flight.
    """

    attempts: int = 8
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 20.0
    deadline_seconds: float = 120.0
    stall_timeout_seconds: float = 20.0

    def __post_init__(self) -> None:
        check_counts(attempts=self.attempts)
        check_seconds(
            first_pause_seconds=self.first_pause_seconds,
            longest_pause_seconds=self.longest_pause_seconds,
            deadline_seconds=self.deadline_seconds,
            stall_timeout_seconds=self.stall_timeout_seconds,
        )


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _usual_hash_threads() -> int:
    """Return a quarter of the cores that this process may use, at least 1 and at most 4."""
    return min(4, max(1, usable_cores() // 4))


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How bytes are moved.

    Args:
        part_bytes: Size of one uploaded part, in bytes; at least 5 MiB. Grown so that an object has at most 10,000.
        parts_in_flight: Parts of one shard that are on their way at once.
        fetch_bytes: Largest single ranged read, in bytes.
        fetches_in_flight: Ranged reads that are on their way at once.
        transfer_bytes: What one process holds at most of bytes on their way, all its uploads and reads together, in
            bytes. Fewer parts or reads are in flight where they would not fit; one that alone is larger goes alone.
        hash_threads: Threads that hash one shard while it is sent. A core hashes about 3 GiB/s.
        retry: How often and how long each request is tried.
    """

    part_bytes: int = 16 * MIB
    parts_in_flight: int = 4
    fetch_bytes: int = 8 * MIB
    fetches_in_flight: int = 4
    transfer_bytes: int = 64 * MIB
    hash_threads: int = field(default_factory=_usual_hash_threads)
    retry: RetryOptions = field(default_factory=RetryOptions)

    def __post_init__(self) -> None:
        check_counts(
            part_bytes=self.part_bytes,
            parts_in_flight=self.parts_in_flight,
            fetch_bytes=self.fetch_bytes,
            fetches_in_flight=self.fetches_in_flight,
            transfer_bytes=self.transfer_bytes,
            hash_threads=self.hash_threads,
        )
        if not isinstance(self.retry, RetryOptions):
            raise InvalidInputError(
                f"retry must be RetryOptions, not {self.retry!r:.80}.",
                hint="Pass retry=RetryOptions(...), or leave it out.",
                option="retry",
            )
        if self.part_bytes < MIN_PART_BYTES:
            raise InvalidInputError(
                f"part_bytes is {self.part_bytes}, object stores take parts of {MIN_PART_BYTES} bytes or more.",
                hint=f"Set part_bytes to {MIN_PART_BYTES} or more.",
            )
        if self.transfer_bytes < MIN_PART_BYTES:
            raise InvalidInputError(
                f"transfer_bytes is {self.transfer_bytes}, too few for one part of {MIN_PART_BYTES} bytes.",
                hint=f"Set transfer_bytes to {MIN_PART_BYTES} or more.",
            )

    def part_bytes_of(self, size: int) -> int:
        """Return the size of the parts of an object of `size` bytes, so that it has at most 10,000 of them."""
        return max(min(self.part_bytes, self.transfer_bytes), -(-size // MAX_PARTS))

    def parts_at_once(self, size: int) -> int:
        """Return how many parts of an object of `size` bytes are on their way at once."""
        return max(1, min(self.parts_in_flight, self.transfer_bytes // self.part_bytes_of(size)))

    @property
    def wait_seconds(self) -> float:
        """After how many seconds in which nothing came to an end, whoever waits for room gives up.

        Longer than any request, with all its tries, may take.
        """
        moving = self.transfer_bytes / MIB  # at the slowest pace that counts as one
        return 2 * (self.retry.deadline_seconds + self.retry.stall_timeout_seconds + moving)
