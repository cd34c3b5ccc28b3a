"""What the restricted unpickler may find by name, and what it may do with it: three closed tables.

A name that may be found is not yet one that may be called: `list` is there as a defaultdict may name it, and calling it
with a range would fill the memory. Each call is checked to be one that a genuine pickle of protocol 2 to 5 makes, so
that what it builds is bounded by the bytes that were stored.
"""

from __future__ import annotations

import collections
import datetime as dt
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage

from storage_writers import harmless_numpy
from storage_writers.harmless_numpy import ints, want

_FACTORIES: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
)
_CLASSES = (
    *(*_FACTORIES, slice, range, dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
    *(torch.Size, torch.device, torch.UntypedStorage),
)
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_LARGEST_KEY = (
    10_000  # parts of a key of a dict or a set; hashing a tuple takes the time, and the stack, of all its parts
)
_QUANTIZED = (torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4)


class StorageKind:
    """Stands for a class of storages, such as `torch.FloatStorage`: nothing but its dtype is needed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __reduce__(self) -> str:
        """Refuse to be a value: it would come back as something else than the class that was stored."""
        raise pickle.PicklingError("a class of storages is not a plain value")


def check_keys(keys: Any) -> None:
    """Refuse keys that take long to hash, such as a tuple of two of a tuple of two of a tuple, and so on.

    Raises:
        pickle.UnpicklingError: One has too many parts.
    """
    for key in keys:
        waiting, parts = [key], 0
        while waiting:
            part = waiting.pop()
            if isinstance(part, tuple | frozenset):
                parts += len(part)
                want(parts <= _LARGEST_KEY, "a key of so many parts")
                waiting.extend(part)


def _latin1(*args: Any) -> bytes:
    """Stand in for `_codecs.encode`, which is how protocol 2 writes bytes."""
    want(_are(args, str, str) and args[1] in ("latin1", "latin-1"), "text in place of bytes")
    return bytes(args[0].encode("latin1"))


def _are(args: tuple[Any, ...], *kinds: type) -> bool:
    return len(args) == len(kinds) and all(type(arg) is kind for arg, kind in zip(args, kinds, strict=True))


def _of(make: Callable[..., Any], *forms: tuple[type, ...]) -> Callable[..., Any]:
    """Return `make` for arguments of exactly the types of one of `forms`."""

    def checked(*args: Any) -> Any:
        want(any(_are(args, *form) for form in forms), f"a {getattr(make, '__name__', 'value')}")
        return make(*args)

    return checked


def _bytearray(*args: Any) -> bytearray:
    if _are(args, str, str):
        return bytearray(_latin1(*args))
    want(_are(args) or _are(args, bytes), "a bytearray")
    return bytearray(*args)


def _hashed(make: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        want(_are(args, list) or _are(args, tuple), "a set")
        check_keys(args[0])
        return make(args[0])

    return checked


def _deque(*args: Any) -> Any:
    want(_are(args[:1]) or _are(args[:1], list) or _are(args[:1], tuple), "a deque")
    want(len(args) < 2 or (len(args) == 2 and (args[1] is None or ints(args[1:]))), "a deque")  # noqa: PLR2004
    return collections.deque(*args)


def _defaultdict(*args: Any) -> Any:
    want(not args or (len(args) == 1 and (args[0] is None or args[0] in _FACTORIES)), "a defaultdict")
    return collections.defaultdict(*args)


def _slice(*args: Any) -> slice:
    """Make a slice of anything but containers: slices in slices, if deep, crash when they are freed."""
    nests = (slice, tuple, list, dict, set, frozenset, collections.deque)
    want(len(args) == 3 and not any(isinstance(arg, nests) for arg in args), "a slice")  # noqa: PLR2004
    return slice(*args)


def _moment(kind: type, size: int) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        zoned = len(args) == 2 and type(args[1]) is dt.timezone and kind is not dt.date  # noqa: PLR2004
        want((len(args) == 1 or zoned) and type(args[0]) is bytes and len(args[0]) == size, "a time or date")
        return kind(*args).replace()  # which checks what the bytes say; making it from them does not

    return make


def _path(kind: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        want(all(type(arg) is str for arg in args), "a path")
        return kind(*args)

    return make


def _size(*args: Any) -> Any:
    want(len(args) == 1 and type(args[0]) is tuple and all(type(n) is int for n in args[0]), "a torch.Size")
    return torch.Size(args[0])


def _view(storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a storage that the unpickler itself made, none of its elements outside of that."""
    want(type(dtype) is torch.dtype and dtype not in _QUANTIZED, "a tensor's dtype")
    want(ints((offset,)) and ints(size) and ints(stride) and len(size) == len(stride), "a tensor's shape")
    end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    bare = storage._untyped_storage  # noqa: SLF001  (as torch's own)
    want(end * dtype.itemsize <= bare.nbytes(), "a tensor larger than its storage")
    return torch.empty((0,), dtype=dtype).set_(bare, offset, size, stride)


def _no_hooks(hooks: Any) -> None:
    want(type(hooks) is collections.OrderedDict and not hooks, "a tensor with hooks")


def _finish(tensor: torch.Tensor, requires_grad: Any, hooks: Any, metadata: Any) -> torch.Tensor:
    _no_hooks(hooks)
    want(type(requires_grad) is bool, "a tensor")
    tensor.requires_grad = requires_grad
    if metadata is not None:
        want(type(metadata) is dict and all(type(value) is bool for value in metadata.values()), "a tensor's metadata")
        want(metadata.keys() <= ({"conj", "neg"} if tensor.is_complex() else {"neg"}), "a tensor's metadata")
        torch._C._set_tensor_metadata(tensor, metadata)  # type: ignore[attr-defined]  # noqa: SLF001  (as torch's own)
    return tensor


def _tensor_v2(*args: Any) -> torch.Tensor:
    want(len(args) in (6, 7) and type(args[0]) is TypedStorage, "a tensor")
    metadata = args[6] if args[6:] else None
    storage, offset, size, stride, requires_grad, hooks = args[:6]
    return _finish(_view(storage, offset, size, stride, storage.dtype), requires_grad, hooks, metadata)


def _tensor_v3(*args: Any) -> torch.Tensor:
    want(len(args) in (7, 8) and type(args[0]) is TypedStorage, "a tensor")
    metadata = args[7] if args[7:] else None
    storage, offset, size, stride, requires_grad, hooks, dtype = args[:7]
    return _finish(_view(storage, offset, size, stride, dtype), requires_grad, hooks, metadata)


def _sparse(*args: Any) -> Any:
    want(len(args) == 2 and type(args[0]) is torch.layout and type(args[1]) is tuple, "a sparse tensor")  # noqa: PLR2004
    layout, parts = args
    coo: Any = torch.sparse_coo_tensor
    compressed: Any = torch.sparse_compressed_tensor
    count = 2 if layout is torch.sparse_coo else 3
    tensors, rest = parts[:count], parts[count:]
    want(rest and type(rest[0]) in (torch.Size, tuple) and ints(tuple(rest[0])), "a sparse tensor's size")
    for tensor in tensors:
        want(type(tensor) is torch.Tensor and tensor.layout is torch.strided, "a part of a sparse tensor")
        bare = tensor.untyped_storage()  # one element of it, expanded, would take forever to validate
        want(tensor.numel() * tensor.itemsize <= bare.nbytes(), "a part of a sparse tensor")
    if layout is torch.sparse_coo:
        want(len(rest) in (1, 2) and all(each in (None, True, False) for each in rest[1:]), "a sparse tensor")
        coalesced = rest[1] if rest[1:] else None
        return coo(*tensors, rest[0], check_invariants=True, is_coalesced=coalesced)
    want(len(rest) == 1, "a sparse tensor")
    return compressed(*tensors, rest[0], layout=layout, check_invariants=True)


def _parameter(*args: Any) -> torch.nn.Parameter:
    want(len(args) in (3, 4) and type(args[0]) is torch.Tensor and type(args[1]) is bool, "a parameter")
    _no_hooks(args[2])
    made = torch.nn.Parameter(args[0], args[1])
    state = args[3] if args[3:] else {}
    want(type(state) is dict, "a parameter's state")
    for name, value in state.items():
        free = type(name) is str and not name.startswith("__") and not hasattr(torch.nn.Parameter, name)
        want(free, "an attribute of a parameter")
        setattr(made, name, value)
    return made


def _layout(*args: Any) -> Any:
    for layout in (value for value in vars(torch).values() if isinstance(value, torch.layout)):
        if _are(args, str) and args[0] == str(layout):
            return layout
    raise pickle.UnpicklingError("it is not a layout of torch")


_OURS = {
    ("_codecs", "encode"): _latin1,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_sparse_tensor"): _sparse,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch.serialization", "_get_layout"): _layout,
}


def _names() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}
    for module in ("pathlib", "pathlib._local"):  # Python 3.13 moved them, 3.14 moved them back
        table |= {(module, kind.__name__): kind for kind in _PATHS}
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    table |= {("torch", str(kind).removeprefix("torch.")): kind for kind in dtypes}
    storages = torch.storage._storage_type_to_dtype_map()  # noqa: SLF001  (their names are nowhere else)
    table |= {("torch", name): StorageKind(kind) for name, kind in storages.items() if kind not in _QUANTIZED}
    table["torch.storage", "UntypedStorage"] = StorageKind(torch.uint8)
    return table | _OURS | harmless_numpy.names()


NAMES = _names()
CALLS: dict[Any, Callable[..., Any]] = {
    bytes: _of(bytes, ()),
    bytearray: _bytearray,
    complex: _of(complex, (float, float)),
    set: _hashed(set),
    frozenset: _hashed(frozenset),
    slice: _slice,
    range: _of(range, (int, int, int)),
    collections.OrderedDict: _of(collections.OrderedDict, ()),
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    collections.Counter: _of(collections.Counter, (), (dict,)),
    dt.datetime: _moment(dt.datetime, 10),
    dt.date: _moment(dt.date, 4),
    dt.time: _moment(dt.time, 6),
    dt.timedelta: _of(dt.timedelta, (int, int, int)),
    dt.timezone: _of(dt.timezone, (dt.timedelta,), (dt.timedelta, str)),
    **{kind: _path(kind) for kind in _PATHS},
    torch.Size: _size,
    torch.device: _of(torch.device, (str,), (str, int)),
    **{ours: ours for ours in _OURS.values()},
    **harmless_numpy.CALLS,
}
