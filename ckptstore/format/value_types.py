"""Which types a value may have beyond Python's own, and how each is taken apart and put together again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zoneinfo import ZoneInfo, available_timezones

import ml_dtypes
import numpy as np

from ckptstore.errors import InvalidInputError

CORE_TAGS = frozenset(
    {"str", "int", "float", "bytes", "tuple", "set", "frozenset", "dict"}
    | {"OrderedDict", "Counter", "defaultdict", "deque"}
)
_ARRAY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)|\|S\d+|[<>]U\d+|[<>][mM]8(\[\d*[a-zA-Z]+\])?"
)
_ARRAY_NAMES = frozenset(
    name for name, kind in vars(ml_dtypes).items() if isinstance(kind, type) and issubclass(kind, np.generic)
)

_T = TypeVar("_T")


class Kind(NamedTuple):
    """How values of some types are stored."""

    tag: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class ValueTypes:
    """The types that values may have, beyond Python's own. Start from `standard_types()`."""

    def __init__(self) -> None:
        self._by_type: dict[type, Kind] = {}
        self._by_tag: dict[str, Kind] = {}

    def register(self, tag: str, *kinds: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        """Make values of exactly the types `kinds` storable.

        Args:
            tag: What a document calls them. It must stay the same for ever.
            kinds: A subclass is another type.
            encode: Returns a value of types that are known already. Raises ValueError for a value that it cannot store.
            decode: Returns the value again from what `encode` returned. Whatever it raises means a broken document.

        Raises:
            InvalidInputError: The tag or a type is registered already.
        """
        if tag in CORE_TAGS or tag in self._by_tag or any(kind in self._by_type for kind in kinds):
            raise InvalidInputError(f"{tag!r} or one of its types is registered already.", hint="Choose another tag.")
        self._by_tag[tag] = kind = Kind(tag, encode, decode)
        self._by_type.update(dict.fromkeys(kinds, kind))

    def register_enum(self, kind: type[enum.Enum], name: str) -> None:
        """Make the members of an Enum storable, by name.

        Raises:
            InvalidInputError: The name or the Enum is registered already.
        """

        def encode(member: enum.Enum) -> str:
            if kind.__members__.get(str(member.name)) is not member:
                raise ValueError("is a combination of members that has no name")
            return str(member.name)

        self.register(f"enum:{name}", kind, encode=encode, decode=kind.__getitem__)

    def register_dataclass(self, kind: type, name: str) -> None:
        """Make a dataclass storable, field by field. Neither `__init__` nor `__post_init__` runs when it comes back.

        Raises:
            InvalidInputError: It is no dataclass, or the name or the dataclass is registered already.
        """
        if not dataclasses.is_dataclass(kind):
            raise InvalidInputError(f"{kind.__qualname__} is no dataclass.", hint="Use `register`.")
        names = [field.name for field in dataclasses.fields(kind)]

        def encode(value: Any) -> dict[str, Any]:
            return {each: getattr(value, each) for each in names}

        def decode(fields: dict[str, Any]) -> Any:
            if fields.keys() != set(names):
                raise ValueError(f"it was stored with the fields {sorted(fields)} and has {sorted(names)} here")
            value = object.__new__(kind)
            for each in names:
                object.__setattr__(value, each, fields[each])
            return value

        self.register(f"dataclass:{name}", kind, encode=encode, decode=decode)

    def of_type(self, kind: type) -> Kind | None:
        """Return how values of exactly this type are stored."""
        return self._by_type.get(kind)

    def of_tag(self, tag: str) -> Kind | None:
        """Return how values with this tag come back."""
        return self._by_tag.get(tag)


def standard_types() -> ValueTypes:
    """Return the types of the standard library and of NumPy, to which others can be added."""
    types = ValueTypes()
    types.register("date", date, encode=date.isoformat, decode=lambda text: date.fromisoformat(_of(str, text)))
    types.register("datetime", datetime, encode=_from_datetime, decode=_to_datetime)
    types.register("timedelta", timedelta, encode=_from_timedelta, decode=_to_timedelta)
    types.register("timezone", timezone, encode=_from_timezone, decode=lambda parts: timezone(*_of(list, parts)))
    types.register("zoneinfo", ZoneInfo, encode=_from_zone, decode=_to_zone)
    types.register("path", type(Path()), encode=str, decode=lambda text: Path(_of(str, text)))
    types.register("numpy.array", np.ndarray, encode=_from_array, decode=_to_array)
    types.register("numpy.str", np.str_, encode="".join, decode=lambda text: np.str_(_of(str, text)))
    types.register("numpy.bytes", np.bytes_, encode=bytes, decode=lambda data: np.bytes_(_of(bytes, data)))
    types.register(
        "numpy.scalar",
        *(
            kind
            for kind in {*np.sctypeDict.values(), *(getattr(ml_dtypes, name) for name in _ARRAY_NAMES)} - _NOT_SCALARS
        ),
        encode=_from_array,
        decode=lambda fields: _to_array(fields)[()],
    )
    return types


def _of(kind: type[_T], value: object) -> _T:
    """Return `value` if it is of this type: of a number `bytes` makes as many zeros, and `str` takes anything."""
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


_NOT_SCALARS: frozenset[type] = frozenset({np.str_, np.bytes_, np.void, np.object_})


def _from_datetime(value: datetime) -> dict[str, Any]:
    return {"at": value.replace(tzinfo=None, fold=0).isoformat(), "fold": value.fold, "tz": value.tzinfo}


def _to_datetime(fields: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(_of(str, fields["at"])).replace(tzinfo=fields["tz"], fold=fields["fold"])


def _from_timedelta(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _to_timedelta(parts: list[int]) -> timedelta:
    days, seconds, microseconds = (_of(int, part) for part in _of(list, parts))
    return timedelta(days, seconds, microseconds)


def _from_timezone(value: timezone) -> list[Any]:
    offset, name = value.utcoffset(None), value.tzname(None)
    return [offset] if name == timezone(offset).tzname(None) else [offset, name]


def _from_zone(value: ZoneInfo) -> str:
    if value.key is None or value.key not in _zones():
        raise ValueError("is a time zone without a usual name")
    return value.key


def _to_zone(key: str) -> ZoneInfo:
    if key not in _zones():  # else a name of one would be looked for among Python's modules
        raise ValueError(f"{key!r:.40} is no time zone here")
    return ZoneInfo(key)


_zones = functools.cache(available_timezones)


def _from_array(value: Any) -> dict[str, Any]:
    dtype = value.dtype
    if _ARRAY_DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        name = dtype.str
    elif dtype.name in _ARRAY_NAMES:
        name = dtype.name
    else:
        raise ValueError(f"is a NumPy value of the element type {dtype}, which has no portable bytes")
    return {"dtype": name, "shape": list(value.shape), "data": value.tobytes()}


def _to_array(fields: dict[str, Any]) -> Any:
    name, shape, data = fields["dtype"], tuple(_of(list, fields["shape"])), _of(bytes, fields["data"])
    if name in _ARRAY_NAMES:
        dtype = np.dtype(getattr(ml_dtypes, name))
    elif _ARRAY_DTYPE.fullmatch(name):
        dtype = np.dtype(name)
    else:
        raise ValueError(f"{name!r} is no element type")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {shape} elements of {name}")
    return np.ndarray(shape, dtype, buffer=bytearray(data)).copy()
