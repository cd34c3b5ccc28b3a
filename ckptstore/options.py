"""Settings: frozen, validated once where they enter."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.errors import InvalidInputError
from ckptstore.units import MIB

MIN_PART_BYTES = 5 * MIB
MAX_PARTS = 10_000


def _positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InvalidInputError(f"{name} must be a positive number, not {value!r}.", hint=f"Set {name} above 0.")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How records are appended.

    Args:
        deadline_seconds: How long one append goes on before its outcome is called unknown.
        request_pause_seconds: The first pause between two tries; it doubles, with full jitter, up to 5 seconds.
        assume_single_writer: The user's promise that one process at a time appends. Fencing does not hold then.
    """

    deadline_seconds: float = 120.0
    request_pause_seconds: float = 0.05
    assume_single_writer: bool = False

    def __post_init__(self) -> None:
        _positive(deadline_seconds=self.deadline_seconds, request_pause_seconds=self.request_pause_seconds)


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How bytes are moved.

    Args:
        part_bytes: Size of one uploaded part, in bytes; at least 5 MiB. Grown so that an object has at most 10,000.
        parts_in_flight: Parts of one shard that are on their way at once.
        fetch_bytes: Largest single ranged read, in bytes.
        fetches_in_flight: Ranged reads that are on their way at once.
    """

    part_bytes: int = 16 * MIB
    parts_in_flight: int = 4
    fetch_bytes: int = 8 * MIB
    fetches_in_flight: int = 4

    def __post_init__(self) -> None:
        _positive(
            part_bytes=self.part_bytes,
            parts_in_flight=self.parts_in_flight,
            fetch_bytes=self.fetch_bytes,
            fetches_in_flight=self.fetches_in_flight,
        )
        if self.part_bytes < MIN_PART_BYTES:
            raise InvalidInputError(
                f"part_bytes is {self.part_bytes}, object stores take parts of {MIN_PART_BYTES} bytes or more.",
                hint=f"Set part_bytes to {MIN_PART_BYTES} or more.",
            )
