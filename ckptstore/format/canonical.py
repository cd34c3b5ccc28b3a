"""Canonical JSON, and its values read back into checked fields."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

from ckptstore.errors import InvalidInputError
from ckptstore.format.strict_json import dump_json, is_utf8
from ckptstore.units import KIB

MAX_TEXT_BYTES = 16 * KIB
NON_FINITE = ("NaN", "Infinity", "-Infinity")

MAX_DEPTH = 64

_MAX_INTEGER = 2**63
_MAX_WRITTEN = 10**1000  # json's parser refuses 4,300 digits
_HASH = re.compile(r"[0-9a-f]{64}")
_SHOWN = 80
_T = TypeVar("_T")


def canonical_json(value: object, *, what: str = "This value", max_depth: int = MAX_DEPTH) -> bytes:
    """Return `value` as JSON with sorted keys, no spaces, UTF-8; non-finite floats become text.

    Args:
        value: Plain values.
        what: What it is, for messages.
        max_depth: How many lists and tables may stand in each other. It must be readable from any depth of calls.

    Raises:
        InvalidInputError: It holds something that is not JSON, a key that is not text, or text that UTF-8 cannot hold,
            or is nested too deeply; where is named.
    """
    try:
        return dump_json(_plain(value, max_depth), what=what)
    except _Unwritable as found:
        at = what + "".join(f"[{step!r}]" for step in reversed(found.steps))
        at = f"{at[:_SHOWN]}…" if found.deep else at
        raise InvalidInputError(
            f"{at} {found.fault}, and cannot be recorded.",
            hint="Pass None, bool, int, float, str, and lists and dicts of them with text for keys.",
            at=at,
        ) from None


def check_written(value: object) -> None:
    """Check that `value`, from JSON, is within what `canonical_json` writes: what was read must be foldable.

    Raises:
        InvalidInputError: It is nested too deeply, or holds a number or text that is not written. Nothing deeper than
            the limit is looked into.
    """
    try:
        _plain(value, MAX_DEPTH - 1)  # which counts those that may still stand inside
    except _Unwritable as found:
        raise InvalidInputError(f"{str(next(reversed(found.steps), 'it'))[:_SHOWN]!r} {found.fault}.") from None


class _Unwritable(Exception):  # noqa: N818  (it does not leave this file)
    """Something is not JSON. The way to it is gathered while it is raised, so that what is written costs no path."""

    def __init__(self, fault: str, *, deep: bool = False) -> None:
        self.fault, self.deep = fault, deep
        self.steps: list[str | int] = []


def _plain(value: object, depth_left: int) -> object:
    """Return `value` with what JSON has not replaced."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        finite = math.isfinite(value)
        return value if finite else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and abs(value) < _MAX_WRITTEN:
        return value
    if isinstance(value, str) and is_utf8(value):
        return value
    if depth_left < 0:
        raise _Unwritable("is nested too deeply", deep=True)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not is_utf8(key):
                raise _Unwritable(f"has the key {key!r:.80}, which is no text")
        return dict(_plain_items(value.items(), depth_left - 1))
    if isinstance(value, list | tuple):
        return [inner for _, inner in _plain_items(enumerate(value), depth_left - 1)]
    known = "a number that is too large" if isinstance(value, int) else "text that UTF-8 cannot hold"
    raise _Unwritable(f"is {known if isinstance(value, int | str) else f'a {type(value).__name__}'}")


def _plain_items(items: Iterable[tuple[Any, object]], depth_left: int) -> Iterator[tuple[Any, object]]:
    for step, inner in items:
        try:
            yield step, _plain(inner, depth_left)
        except _Unwritable as found:
            found.steps.append(step)
            raise


def integer(value: object) -> int:
    """Return `value` if it is a whole number from 0 to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_INTEGER:
        raise _expected("a whole number", value)
    return value


def text(value: object) -> str:
    """Return `value` if it is text of at most 16 KiB."""
    if not isinstance(value, str) or len(value.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise _expected(f"text of at most {MAX_TEXT_BYTES} bytes", value)
    return value


def digest(value: object) -> str:
    """Return `value` if it is 64 hexadecimal digits."""
    if not isinstance(value, str) or _HASH.fullmatch(value) is None:
        raise _expected("64 hexadecimal digits", value)
    return value


def number(value: object) -> float:
    """Return `value` if it is a number, or the text of a non-finite one."""
    if isinstance(value, str) and value in NON_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _expected("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _expected("a number", value) from None


def flag(value: object) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise _expected("true or false", value)
    return value


def table(value: object) -> dict[str, Any]:
    """Return `value` if it is an object."""
    if not isinstance(value, dict):
        raise _expected("an object", value)
    return value


def optional(read: Callable[[object], _T]) -> Callable[[object], _T | None]:
    """Return a reader that also takes null."""
    return lambda value: None if value is None else read(value)


def sequence(read: Callable[[object], _T]) -> Callable[[object], tuple[_T, ...]]:
    """Return a reader of a list of what `read` reads."""

    def read_all(value: object) -> tuple[_T, ...]:
        if not isinstance(value, list | tuple):
            raise _expected("a list", value)
        return tuple(read(inner) for inner in value)

    return read_all


def mapping(read: Callable[[object], _T]) -> Callable[[object], dict[str, _T]]:
    """Return a reader of an object whose values `read` reads."""
    return lambda value: {text(key): read(inner) for key, inner in table(value).items()}


READERS: dict[str, Callable[[object], Any]] = {
    "int": integer,
    "int | None": optional(integer),
    "str": text,
    "str | None": optional(text),
    "bool": flag,
    "tuple[int, ...]": sequence(integer),
    "tuple[str, ...]": sequence(text),
    "dict[str, int]": mapping(integer),
    "dict[str, str]": mapping(text),
    "dict[str, float]": mapping(number),
    "dict[str, Any]": table,
}
"""How a dataclass's field is read, by its annotation."""


def read_fields(kind: type[_T], value: object, **special: Callable[[object], Any]) -> _T:
    """Return a dataclass of `kind` from the object `value`, each field checked by its annotation.

    Keys that the dataclass has not are ignored: a later release may add some.

    Args:
        kind: A dataclass; its module has postponed annotations.
        value: What JSON said.
        special: Readers of single fields, by name.

    Raises:
        InvalidInputError: A field is missing or is not what it must be; it is named.
    """
    given, found = table(value), {}
    for each in fields(cast("Any", kind)):  # a dataclass, which `type[_T]` cannot say
        if not each.init:
            continue
        if each.name not in given:
            if each.default is MISSING:
                raise InvalidInputError(f"{each.name} is missing.")
            continue
        try:
            found[each.name] = (special.get(each.name) or READERS[str(each.type)])(given[each.name])
        except InvalidInputError as error:
            raise InvalidInputError(f"{each.name}: {error.message}") from error
    return kind(**found)


def _expected(what: str, value: object) -> InvalidInputError:
    return InvalidInputError(f"expected {what}, found {repr(value)[:_SHOWN]}.")
