"""Every element type of torch, by name: what it is called elsewhere, and whether it can be stored.

torch itself is never imported here: a name is enough to move bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ckptstore.errors import UnsupportedError

BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type.

    Args:
        name: torch's name without the module, or `bytes`.
        itemsize: Bytes per element.
        code: What safetensors calls it; None where it has no name for it: then the bytes are stored as `U8`.
        array: NumPy's name, or ml_dtypes'; None where neither has it.
        refused: Why it cannot be stored; empty if it can.
    """

    name: str
    itemsize: int
    code: str | None
    array: str | None
    refused: str = ""


_SUB_BYTE = "torch pads it to whole bytes and DCP cannot plan it"
_QUANTISED = "its scale and zero point are not part of its bytes"

_STORED = (
    Dtype("float64", 8, "F64", "float64"),
    Dtype("float32", 4, "F32", "float32"),
    Dtype("float16", 2, "F16", "float16"),
    Dtype("bfloat16", 2, "BF16", "bfloat16"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3", "float8_e4m3fn"),
    Dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", "float8_e4m3fnuz"),
    Dtype("float8_e5m2", 1, "F8_E5M2", "float8_e5m2"),
    Dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", "float8_e5m2fnuz"),
    Dtype("float8_e8m0fnu", 1, "F8_E8M0", "float8_e8m0fnu"),
    Dtype("float4_e2m1fn_x2", 1, None, None),
    Dtype("complex128", 16, None, "complex128"),
    Dtype("complex64", 8, "C64", "complex64"),
    Dtype("complex32", 4, None, "complex32"),
    Dtype("int64", 8, "I64", "int64"),
    Dtype("int32", 4, "I32", "int32"),
    Dtype("int16", 2, "I16", "int16"),
    Dtype("int8", 1, "I8", "int8"),
    Dtype("uint64", 8, "U64", "uint64"),
    Dtype("uint32", 4, "U32", "uint32"),
    Dtype("uint16", 2, "U16", "uint16"),
    Dtype("uint8", 1, "U8", "uint8"),
    Dtype("bool", 1, "BOOL", "bool"),
)
_REFUSED = (
    *(Dtype(name, size, None, None, _QUANTISED) for name, size in (("qint32", 4), ("qint8", 1), ("quint8", 1))),
    *(Dtype(name, 1, None, None, _QUANTISED) for name in ("quint4x2", "quint2x4")),
    *(Dtype(f"{sign}int{bits}", 1, None, None, _SUB_BYTE) for sign in ("", "u") for bits in range(1, 8)),
    *(Dtype(name, 1, None, None, _SUB_BYTE) for name in ("bits8", "bits4x2", "bits2x4", "bits1x8")),
    Dtype("bits16", 2, None, None, _SUB_BYTE),
)

DTYPES: dict[str, Dtype] = {dtype.name: dtype for dtype in (*_STORED, *_REFUSED)}
"""All element types of torch 2.13, by name."""

_BY_NAME = {**DTYPES, BYTES: Dtype(BYTES, 1, "U8", "uint8")}


def dtype_named(name: str, *, of: str = "") -> Dtype:
    """Return the storable element type called `name` (`bytes` is one).

    Args:
        name: torch's name without the module.
        of: The tensor it is asked for, for the message.

    Raises:
        UnsupportedError: It is unknown, or cannot be stored.
    """
    dtype = _BY_NAME.get(name)
    if dtype is not None and not dtype.refused:
        return dtype
    reason = "no element type of this version" if dtype is None else dtype.refused
    raise UnsupportedError(
        f"The element type {name!r} of {of or 'a tensor'} cannot be stored: {reason}.",
        hint="Convert the tensor before it is saved, or install a newer ckptstore.",
        dtype=name,
        tensor=of,
    )


def array_dtype(name: str) -> np.dtype | None:
    """Return the NumPy element type (ml_dtypes' where NumPy has none) called `name`, or None if neither has it.

    Raises:
        UnsupportedError: The name is unknown, or cannot be stored.
    """
    array = dtype_named(name).array
    if array is None:
        return None
    kind = getattr(np, array, None) or getattr(ml_dtypes, array, None)  # complex32 needs a newer ml_dtypes
    return None if kind is None else np.dtype(kind)
