r"""Objects as plain JSON, spelled one way: what two of them differ in can be named, and equal ones have equal digests.

Keys are sorted. `1.0` is `1`, and `-0.0` is `0`: one number, one spelling. `\r\n` is `\n`. What JSON has not is an
object whose keys begin with `$`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import numbers
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch

from ckptstore.errors import InvalidInputError
from ckptstore.format.canonical import canonical_json
from ckptstore.format.checksum import hexdigest
from ckptstore.format.strict_json import is_utf8

MAX_DEPTH = 48
MAX_TEXT_BYTES = 64 * 1024
"""What is longer stands there as its digest."""

_EXACT = 2**53
_SHOWN = 80

Steps = tuple[str | int, ...]


def plain(value: object, *, what: str = "it", without: Collection[str] = ()) -> Any:
    """Return `value` as plain JSON; an object counts as the name of its class and its plain attributes.

    Args:
        value: None, numbers, text, bytes, containers, enums, dates, paths, dataclasses, arrays, tensors, named
            functions and classes, and objects that say what they are: by `to_dict()`, `model_dump()`, or as a
            namespace.
        what: What it is, for messages.
        without: Paths such as `model.name_or_path` that say nothing of what it is, and are left out.

    Raises:
        InvalidInputError: It holds something that cannot be told, or two keys that are spelled alike; or it is nested
            more than 48 deep. Where is named.
    """
    return _Plain(what, frozenset(without)).of(value, ())


def spelled(document: Any) -> bytes:
    """Return a plain value as its only bytes: those that a digest is of."""
    return canonical_json(document, what="a document")


def path_of(steps: Iterable[str | int]) -> str:
    """Return the way to a value as text: `layers[2].width`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")


@dataclasses.dataclass(frozen=True)
class _Plain:
    """One look at an object."""

    what: str
    without: frozenset[str]

    def of(self, value: Any, steps: Steps) -> Any:
        if len(steps) > MAX_DEPTH:
            raise self._refused(steps[:8], f"is nested more than {MAX_DEPTH} deep")
        spell = next((spell for kinds, spell in _SPELLINGS if isinstance(value, kinds)), None)
        return self._object(value, self._said(value, steps), steps) if spell is None else spell(self, value, steps)

    def itself(self, value: Any, steps: Steps) -> Any:
        del steps
        return value

    def enum(self, value: Any, steps: Steps) -> Any:
        if isinstance(value, str):
            return self.text(value, steps)
        return (
            self.number(value, steps) if isinstance(value, int) else {"$enum": f"{type(value).__name__}.{value.name}"}
        )

    def complex(self, value: Any, steps: Steps) -> Any:
        return {"$complex": [self.number(part, steps) for part in (value.real, value.imag)]}

    def bytes(self, value: Any, steps: Steps) -> Any:
        del steps
        return {"$bytes": f"blake3:{hexdigest(value)}", "size": memoryview(value).nbytes}

    def path(self, value: Any, steps: Steps) -> Any:
        return self.text(value.as_posix(), steps)

    def shown(self, value: Any, steps: Steps) -> Any:
        return self.text(str(value), steps)

    def list(self, value: Any, steps: Steps) -> Any:
        if hasattr(value, "_asdict"):  # a named tuple
            return self._object(value, value._asdict(), steps)
        return [self.of(inner, (*steps, place)) for place, inner in enumerate(value)]

    def set(self, value: Any, steps: Steps) -> Any:
        return {"$set": sorted((self.of(inner, (*steps, "$set")) for inner in value), key=spelled)}

    def _said(self, value: Any, steps: Steps) -> Mapping[Any, Any]:
        """Return what an object says of itself."""
        if dataclasses.is_dataclass(value):
            return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        for name in ("to_dict", "model_dump"):
            tell = getattr(value, name, None)
            if callable(tell):
                said = tell()
                if isinstance(said, Mapping):
                    return said
                raise self._refused(steps, f"has a {name}() that returns a {type(said).__name__}")
        if type(value).__name__.endswith("Namespace"):  # argparse's and types'
            return dict(vars(value))
        raise self._refused(
            steps, f"is a {type(value).__module__}.{type(value).__qualname__}, which says nothing of itself"
        )

    def _object(self, value: object, fields: Mapping[Any, Any], steps: Steps) -> dict[str, Any]:
        table = self.table(fields, steps)
        return {"$class": type(value).__name__, **table}

    def table(self, value: Mapping[Any, Any], steps: Steps) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, inner in value.items():
            name = self._key(key, steps)
            if self.without and path_of((*steps, name)) in self.without:
                continue
            if name in found:
                raise self._refused(steps, f"has two keys that are spelled {name!r:.80}")
            found[name] = self.of(inner, (*steps, name))
        return found

    def _key(self, key: object, steps: Steps) -> str:
        if isinstance(key, str):
            if len(key) > MAX_TEXT_BYTES or not is_utf8(key):
                raise self._refused(steps, "has a key that is too long, or no text")
            name = str.__str__(key)
            return f"${name}" if name.startswith("$") else name  # such keys are this file's own
        return json.dumps(self.of(key, steps), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def text(self, value: str, steps: Steps) -> Any:
        value = str.__str__(value)  # an enum that is text has a `str` of its own
        if not is_utf8(value):
            raise self._refused(steps, "is text that UTF-8 cannot hold")
        text = value.replace("\r\n", "\n")
        size = len(text.encode())
        return text if size <= MAX_TEXT_BYTES else {"$text": f"blake3:{hexdigest(text.encode())}", "size": size}

    def number(self, value: Any, steps: Steps) -> Any:
        if isinstance(value, numbers.Integral):
            if abs(int(value)) >= 10**1000:
                raise self._refused(steps, "is a number of more than 1,000 digits")
            return int(value)
        number = float(value)
        if not math.isfinite(number):
            return {"$float": "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"}
        return int(number) if number.is_integer() and abs(number) < _EXACT else number

    def array(self, value: Any, steps: Steps) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise self._refused(steps, f"is a {type(value).__name__} that is not plain")
            memory = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            body = memory.reshape(-1).view(torch.uint8).numpy().tobytes() if memory.numel() else b""
            return {"$tensor": f"blake3:{hexdigest(body)}", "dtype": str(value.dtype), "shape": list(value.shape)}
        if isinstance(value, np.generic) and value.dtype.kind in "mMSUV":
            return {"$scalar": str(value), "dtype": value.dtype.str}
        if isinstance(value, np.generic):
            return self.of(value.item(), steps)
        if value.dtype.hasobject:
            return self.of(value.tolist(), steps)
        body = np.ascontiguousarray(value).tobytes()
        return {"$array": f"blake3:{hexdigest(body)}", "dtype": value.dtype.str, "shape": list(value.shape)}

    def named(self, value: Any, steps: Steps) -> dict[str, str]:
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" in name:
            raise self._refused(steps, f"is {name}, which has no name that another process knows")
        return {"$name": name}

    def _refused(self, steps: Steps, fault: str) -> InvalidInputError:
        at = path_of(steps)
        return InvalidInputError(
            f"{self.what}{f' at {at[:_SHOWN]}' if at else ''} {fault}.",
            hint="Give what tells it apart as plain values: a dict, a dataclass, or an object with to_dict().",
            at=at[:_SHOWN],
        )


_SPELLINGS: tuple[tuple[Any, Callable[[_Plain, Any, Steps], Any]], ...] = (
    (enum.Enum, _Plain.enum),
    ((types.NoneType, bool), _Plain.itself),
    (str, _Plain.text),
    ((date, time, datetime, timedelta, Decimal, Fraction, UUID, torch.dtype, torch.device), _Plain.shown),
    (numbers.Real, _Plain.number),
    (complex, _Plain.complex),
    (Mapping, _Plain.table),
    ((list, tuple, range), _Plain.list),
    (AbstractSet, _Plain.set),
    ((bytes, bytearray, memoryview), _Plain.bytes),
    ((np.ndarray, np.generic, torch.Tensor), _Plain.array),
    (PurePath, _Plain.path),
    ((type, types.FunctionType, types.BuiltinFunctionType), _Plain.named),
)
"""The first that fits counts."""
