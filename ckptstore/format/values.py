"""Values that are not tensors, as typed JSON (`ckptstore.json/1`): what comes back has the types that went in.

What JSON has stands for itself: null, true, numbers below 2^53, text, lists, and dicts whose keys are text without a
leading `$`. Everything else is an object with one key, `$` and a tag. Nothing is imported, called or unpickled because
a document says so: a tag that is not registered is refused.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from ckptstore.errors import CkptStoreError, IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format.strict_json import dump_json, is_utf8, parse_json
from ckptstore.format.value_types import ValueTypes
from ckptstore.units import MIB

CODEC = "ckptstore.json/1"
MAX_VALUE_BYTES = 64 * MIB
MAX_DEPTH = 64
SAFE_INTEGER = 2**53

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple, Counter, OrderedDict, deque)
}
"""What a defaultdict may make its values with."""

_INTEGER = re.compile("-?0x[0-9a-f]+")
_NAN_BITS = re.compile("[0-9a-f]{16}")
_NAMED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

_Path = tuple[Any, str]  # the path of what holds it (None above the root), and the step from there


def encode_value(value: Any, *, types: ValueTypes, name: str = "state", max_bytes: int = MAX_VALUE_BYTES) -> bytes:
    """Return `value` as a document. The same value gives the same bytes, always.

    Args:
        value: What several places hold is stored once for each of them.
        types: What it may hold beyond Python's own types.
        name: What to call it in messages.
        max_bytes: The largest document allowed.

    Raises:
        UnsupportedError: It holds something that is not known, or is nested deeper than 64. The message names the
            place, as in `state['a'][3]`.
        InvalidInputError: The document would be larger than `max_bytes`.
    """
    body = dump_json(_Writer(types, max_bytes).plain(value, (None, name), 0), what=name, sort_keys=False)
    if len(body) > max_bytes:
        raise _too_large(name, max_bytes)
    return body


def decode_value(body: bytes, *, types: ValueTypes, name: str = "state", max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """Return the value in a document, with the types that it had.

    Raises:
        IntegrityError: It is no such document, or a value in it is not what its tag says.
        UnsupportedError: It holds a tag that is not registered here.
        InvalidInputError: It is larger than `max_bytes`.
    """
    if len(body) > max_bytes:
        raise _too_large(name, max_bytes)
    return _Reader(types).value(parse_json(body, what=name), (None, name), 0)


class _Writer:
    def __init__(self, types: ValueTypes, max_bytes: int) -> None:
        self._types, self._room, self._max_bytes = types, max_bytes, max_bytes

    def plain(self, value: Any, path: _Path, depth: int) -> Any:
        """Return `value` as what the `json` module writes."""
        self._spend(1, path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if abs(value) < SAFE_INTEGER else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _name_of(value)}
        if kind is str:
            self._spend(len(value), path)
            return value if is_utf8(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind is bytes:
            self._spend(len(value), path)
            return {"$bytes": _base64(value)}
        if depth >= MAX_DEPTH:
            raise _refused(path, f"is nested deeper than {MAX_DEPTH}, or holds itself")
        return self._container(value, path, depth + 1)

    def _container(self, value: Any, path: _Path, depth: int) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            items = self._items(value, path, depth)
            return items if kind is list else {"$tuple": items}
        if kind is dict:
            return self._dict(value, path, depth, "[{!r}]")
        if kind is set or kind is frozenset:
            items = [self.plain(item, (path, "{…}"), depth) for item in value]
            return {f"${kind.__name__}": sorted(items, key=_spelled)}
        if kind in (OrderedDict, Counter, defaultdict):
            pairs = self._pairs(value, path, depth)
            return {f"${kind.__name__}": _with_factory(value, pairs, path) if kind is defaultdict else pairs}
        if kind is deque:
            return {"$deque": {"items": self._items(value, path, depth), "maxlen": value.maxlen}}
        return self._registered(value, path, depth)

    def _registered(self, value: Any, path: _Path, depth: int) -> Any:
        kind = self._types.of_type(type(value))
        if kind is None:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise _refused(path, f"is a {name}, which is not stored")
        if _nbytes(value) > self._room:  # before an array's bytes are copied
            raise _too_large(_text(path), self._max_bytes)
        try:
            inner = kind.encode(value)
        except ValueError as error:
            raise _refused(path, str(error)) from error
        if type(inner) is dict:
            return {f"${kind.tag}": self._dict(inner, path, depth, ".{}")}
        return {f"${kind.tag}": self.plain(inner, path, depth)}

    def _dict(self, value: dict[Any, Any], path: _Path, depth: int, step: str) -> Any:
        if not all(type(key) is str and not key.startswith("$") and is_utf8(key) for key in value):
            return {"$dict": self._pairs(value, path, depth)}
        self._spend(sum(map(len, value)), path)
        return {key: self.plain(item, (path, step.format(key)), depth) for key, item in value.items()}

    def _items(self, values: Iterable[Any], path: _Path, depth: int) -> list[Any]:
        return [self.plain(item, (path, f"[{index}]"), depth) for index, item in enumerate(values)]

    def _pairs(self, value: dict[Any, Any], path: _Path, depth: int) -> list[list[Any]]:
        pairs = []
        for key, item in value.items():
            shown = repr(key)[:40]
            pair = [self.plain(key, (path, f" key {shown}"), depth), self.plain(item, (path, f"[{shown}]"), depth)]
            pairs.append(pair)
        return pairs

    def _spend(self, count: int, path: _Path) -> None:
        self._room -= count
        if self._room < 0:
            raise _too_large(_text(path), self._max_bytes)


class _Reader:
    def __init__(self, types: ValueTypes) -> None:
        self._types = types
        self._core: dict[str, Callable[[Any, _Path, int], Any]] = {
            "str": lambda text, *_: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
            "int": lambda text, *_: int(_matched(_INTEGER, text), 16),
            "float": lambda text, *_: _float_of(text),
            "bytes": lambda text, *_: base64.b64decode(text, validate=True),
            "tuple": lambda items, *at: tuple(self._items(items, *at)),
            "set": lambda items, *at: _unique(items, set(self._items(items, *at))),
            "frozenset": lambda items, *at: _unique(items, frozenset(self._items(items, *at))),
            "dict": lambda pairs, *at: _unique(pairs, dict(self._pairs(pairs, *at))),
            "OrderedDict": lambda pairs, *at: _unique(pairs, OrderedDict(self._pairs(pairs, *at))),
            "Counter": lambda pairs, *at: _unique(pairs, Counter(dict(self._pairs(pairs, *at)))),
            "defaultdict": self._defaultdict,
            "deque": lambda fields, *at: _unique(
                fields["items"], deque(self._items(fields["items"], *at), _maxlen(fields["maxlen"]))
            ),
        }

    def value(self, plain: Any, path: _Path, depth: int) -> Any:
        """Return the value that `plain` stands for."""
        if depth > 2 * MAX_DEPTH:
            raise _broken(path, "is nested too deeply")
        if isinstance(plain, list):
            return self._items(plain, path, depth + 1)
        if not isinstance(plain, dict):
            return plain
        tag = next(iter(plain), "")
        if not tag.startswith("$") or len(plain) > 1:
            if any(key.startswith("$") for key in plain):
                raise _broken(path, f"mixes tags with keys: {sorted(plain)[:4]}")
            return {key: self.value(item, (path, f"[{key!r}]"), depth + 1) for key, item in plain.items()}
        return self._tagged(tag[1:], plain[tag], path, depth + 1)

    def _tagged(self, tag: str, inner: Any, path: _Path, depth: int) -> Any:
        kind = self._types.of_tag(tag)
        if kind is None and tag not in self._core:
            raise UnsupportedError(
                f"{_text(path)} was stored as {tag!r}, which is not registered here.",
                hint="Register the type under this name before loading, or install the ckptstore that wrote it.",
                path=_text(path),
                tag=tag,
            )
        try:
            return self._core[tag](inner, path, depth) if kind is None else kind.decode(self.value(inner, path, depth))
        except CkptStoreError:
            raise
        except Exception as error:  # whatever a broken document makes of a constructor
            raise _broken(path, f"is no {tag}: {error!r:.200}") from error

    def _items(self, items: list[Any], path: _Path, depth: int) -> list[Any]:
        if not isinstance(items, list):
            raise _broken(path, f"holds {items!r:.40} in place of a list")
        return [self.value(item, (path, f"[{index}]"), depth) for index, item in enumerate(items)]

    def _pairs(self, pairs: list[Any], path: _Path, depth: int) -> list[tuple[Any, Any]]:
        return [(self.value(k, (path, " key"), depth), self.value(v, (path, f"[{k!r:.40}]"), depth)) for k, v in pairs]

    def _defaultdict(self, fields: dict[str, Any], path: _Path, depth: int) -> Any:
        factory = None if fields["factory"] is None else FACTORIES[fields["factory"]]
        return _unique(fields["items"], defaultdict(factory, self._pairs(fields["items"], path, depth)))


def _text(path: _Path | None) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps))


def _nbytes(value: Any) -> int:
    """Return how many bytes a value says that it has; 0 if it does not say, as a sparse tensor does not."""
    try:
        return int(getattr(value, "nbytes", 0))
    except RuntimeError:
        return 0


def _spelled(plain: Any) -> bytes:
    return dump_json(plain, what="An entry of a set", sort_keys=False)


def _with_factory(value: Any, pairs: list[Any], path: _Path) -> dict[str, Any]:
    name = getattr(value.default_factory, "__name__", None)
    if value.default_factory is not (name and FACTORIES.get(name)):
        raise _refused(path, f"is a defaultdict of {value.default_factory!r:.80}, which is not stored")
    return {"factory": name, "items": pairs}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _name_of(value: float) -> str:
    """Return the name of a number that is not finite; of a NaN that is not the usual one, its bits."""
    for name, number in _NAMED_FLOATS.items():
        if struct.pack(">d", value) == struct.pack(">d", number):
            return name
    return struct.pack(">d", value).hex()


def _float_of(text: str) -> float:
    if text in _NAMED_FLOATS:
        return _NAMED_FLOATS[text]
    (value,) = struct.unpack(">d", bytes.fromhex(_matched(_NAN_BITS, text)))
    if not math.isnan(value):
        raise ValueError(f"{text} are not the bits of a NaN")
    return float(value)


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r:.40} is not spelled as it must be")
    return text


def _unique(given: list[Any], made: Any) -> Any:
    if len(made) != len(given):
        raise ValueError("two of its entries are one")
    return made


def _maxlen(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r:.40} is no length")
    return value


def _refused(path: _Path, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{_text(path)} {why}.",
        hint="Store plain values in its place, or register its type.",
        path=_text(path),
    )


def _broken(path: _Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{_text(path)} {why}.", hint="Run `ckptstore verify URL` and load an older checkpoint.", path=_text(path)
    )


def _too_large(what: str, max_bytes: int) -> InvalidInputError:
    return InvalidInputError(
        f"{what} takes more than {max_bytes} bytes as a document.",
        hint="Store large arrays as tensors.",
        max_bytes=max_bytes,
    )
