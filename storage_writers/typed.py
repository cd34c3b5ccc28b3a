"""Values that a state holds as documents of typed JSON: stored as they are, never pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.strict_json import parse_json
from ckptstore.format.value_types import ValueTypes
from ckptstore.format.values import MAX_VALUE_BYTES, encode_value


@dataclass(frozen=True, slots=True, repr=False)
class TypedValue:
    """A leaf of a state that is stored as these very bytes, under the codec `ckptstore.json/1`.

    It is written by every way of saving, and read by `Checkpoint.value`, never by DCP.

    Args:
        body: A value document, as `ckptstore.format.values.encode_value` returns it.

    Raises:
        InvalidInputError: It is no JSON, or larger than 64 MiB, which no reader takes.
    """

    body: bytes

    def __post_init__(self) -> None:
        if type(self.body) is not bytes or len(self.body) > MAX_VALUE_BYTES:
            what = f"{len(self.body)} bytes" if isinstance(self.body, bytes) else f"a {type(self.body).__name__}"
            raise InvalidInputError(
                f"A typed value is a document of at most {MAX_VALUE_BYTES} bytes, not {what}.",
                hint="Make it with ckptstore.format.values.encode_value, and store large arrays as tensors.",
            )
        try:
            parse_json(self.body, what="The body of a typed value")
        except IntegrityError as error:
            raise InvalidInputError(error.message, hint="Make it with ckptstore.format.values.encode_value.") from error

    @classmethod
    def of(cls, value: Any, *, types: ValueTypes, name: str = "state") -> Self:
        """Return a value as such a leaf; see `encode_value`, whose document needs no second look.

        Raises:
            UnsupportedError: It holds something that is not known; the place is named.
            InvalidInputError: It is too large.
        """
        made = object.__new__(cls)
        object.__setattr__(made, "body", encode_value(value, types=types, name=name))
        return made

    def __repr__(self) -> str:
        return f"TypedValue({len(self.body)} bytes)"
