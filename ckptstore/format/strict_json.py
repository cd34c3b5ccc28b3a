"""JSON, read without trust and written one way only."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ckptstore.errors import IntegrityError, InvalidInputError


def parse_json(body: bytes, *, what: str) -> Any:
    """Return the value in `body`. Order of keys is kept.

    Raises:
        IntegrityError: It is no UTF-8 or no JSON, names a key twice, holds a number that is not finite, or is nested
            too deeply.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON and numbers of 4,300 digits are ValueErrors
        raise IntegrityError(
            f"{what} is not the JSON that was written: {str(error)[:200]}.",
            hint="Run `ckptstore verify URL` and load an older checkpoint.",
            what=what,
        ) from error


def dump_json(value: Any, *, what: str, sort_keys: bool = True) -> bytes:
    """Return `value` as UTF-8 JSON without spaces.

    Raises:
        InvalidInputError: It holds something that is no JSON: a number that is not finite, text that is no UTF-8.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} cannot be written as JSON: {error}.", what=what) from error


def is_utf8(text: str) -> bool:
    """Return whether `text` can be written as UTF-8: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value
