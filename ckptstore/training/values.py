"""The types that a training's values may have beyond Python's own: the standard ones, and those of torch.

```python
types = value_types()
types.register_dataclass(Patience, "patience")
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptstore.format.dtypes import DTYPES
from ckptstore.format.value_types import ValueTypes, standard_types
from ckptstore.units import MIB
from storage_writers import tensors

MAX_TENSOR_BYTES = MIB
"""The largest tensor that a value may hold; larger ones are cut out and stored as tensors (`trees.split`)."""

_STORABLE = {getattr(torch, name): dtype for name, dtype in DTYPES.items() if not dtype.refused}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """What stands in a value where a tensor was cut out of it.

    Args:
        key: Under which the tensor is stored.
        dtype: As it was saved.
        shape: The whole tensor's.
    """

    key: str
    dtype: torch.dtype
    shape: torch.Size


def value_types() -> ValueTypes:
    """Return the standard types, torch's dtypes, devices, sizes and small tensors, and `TensorRef`.

    A tensor comes back bit by bit, on the CPU, contiguous, and without a gradient, whatever it was.
    """
    types = standard_types()
    types.register("torch.dtype", torch.dtype, encode=_from_dtype, decode=_to_dtype)
    types.register("torch.device", torch.device, encode=str, decode=_to_device)
    types.register("torch.size", torch.Size, encode=list, decode=_to_size)
    types.register("torch.tensor", torch.Tensor, encode=_from_tensor, decode=_to_tensor)
    types.register_dataclass(TensorRef, "ckptstore.tensor_ref")
    return types


def why_not_inline(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot stand in a value, or None if it can."""
    if type(tensor) is not torch.Tensor:
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return f"is a tensor of the layout {tensor.layout} on {tensor.device}, not a dense one on the CPU"
    if tensor.dtype not in _STORABLE:
        return f"is a tensor of the dtype {tensor.dtype}, whose bytes alone do not give it back"
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > MAX_TENSOR_BYTES:
        return f"is a tensor of {nbytes} bytes; a value holds up to {MAX_TENSOR_BYTES}, larger ones are stored apart"
    if nbytes and not tensor.untyped_storage().nbytes():
        return "is a tensor whose storage was freed"
    return None


def _from_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)  # `getattr` would import what torch imports on demand
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.40} is no dtype of torch {torch.__version__}")  # noqa: TRY004  (a document's fault)
    return dtype


def _to_device(name: str) -> torch.device:
    if type(name) is not str:
        raise ValueError(f"{name!r:.40} is no device")
    return torch.device(name)


def _to_size(lengths: list[int]) -> torch.Size:
    if type(lengths) is not list or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"{lengths!r:.40} is no shape")
    return torch.Size(lengths)


def _from_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if (reason := why_not_inline(tensor)) is not None:
        raise ValueError(reason)
    data = bytes(tensors.bytes_of(tensors.copyable(tensor.detach())))
    return {"dtype": _from_dtype(tensor.dtype), "shape": list(tensor.shape), "data": data}


def _to_tensor(fields: dict[str, Any]) -> torch.Tensor:
    dtype, shape, data = _to_dtype(fields["dtype"]), _to_size(fields["shape"]), fields["data"]
    stored = _STORABLE[dtype]
    if type(data) is not bytes or len(data) != math.prod(shape) * stored.itemsize:
        raise ValueError(f"{len(data)} bytes are not {list(shape)} elements of {dtype}")
    if dtype is torch.bool and data.strip(b"\0\1"):
        raise ValueError("a bool is a byte of 0 or 1")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # From NumPy's memory, because torch's own factories ask for the default device.
    flat = torch.from_numpy(np.ndarray(len(data), np.uint8, buffer=bytearray(data)).copy())
    return flat.view(dtype).view(shape)
