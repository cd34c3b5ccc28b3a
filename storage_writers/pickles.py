"""Values that DCP's planner hands over as `torch.save` bytes, and the only unpickler that ever reads them.

The stock planner unpickles what it is given without any restriction. So stored bytes never reach it: they are read
here, where nothing but the short list below can be built, and it gets bytes that we make again from the result.

torch's own `weights_only` unpickler is not used: it cannot build a deque, a defaultdict or an integer of more than
2,040 bits, and its list of allowed types is one of the whole process. This one is the standard library's in Python,
with a closed list of names and no way to change what is on it.
"""

from __future__ import annotations

import _compat_pickle
import collections
import datetime as dt
import importlib
import io
import pathlib
import pickle
from types import ModuleType
from typing import Any

import torch

from ckptstore.errors import IntegrityError, UnsafePickleError, UnsupportedError

_CLASSES: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
    *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
    *(torch.Size, torch.device, torch.UntypedStorage),
)
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_FUNCTIONS = {
    "torch._utils": (
        *("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_sparse_tensor"),
        *("_rebuild_parameter", "_rebuild_parameter_with_state"),
    ),
    "torch.serialization": ("_get_layout",),
    "numpy": ("ndarray", "dtype"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.random._pickle": ("__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor"),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
    "numpy.random._mt19937": ("MT19937",),
    "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._philox": ("Philox",),
    "numpy.random._sfc64": ("SFC64",),
}
_NUMPY_1 = "numpy.core.multiarray"  # where numpy 1 keeps, and names, what numpy 2 keeps in numpy._core


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, which is how protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not allowed")
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}
    for module in ("pathlib", "pathlib._local"):  # Python 3.13 moved them, 3.14 moved them back
        table |= {(module, kind.__name__): kind for kind in _PATHS}
    table |= {("torch", str(kind).removeprefix("torch.")): kind for kind in _torch_dtypes()}
    table["_codecs", "encode"] = _latin1
    for module, names in _FUNCTIONS.items():
        for name in names:
            found = _find(module, name)
            if found is not None:
                table[module, name] = found
                if module == "numpy._core.multiarray":
                    table[_NUMPY_1, name] = found
    return table


def _torch_dtypes() -> set[torch.dtype]:
    return {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _find(module: str, name: str) -> Any:
    for place in (module, module.replace("numpy._core", "numpy.core")):
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    return None


_ALLOWED = _allowed()


_Python: Any = pickle._Unpickler  # noqa: SLF001  (the one written in Python: only there can BUILD be refused)


class _Restricted(_Python):  # type: ignore[misc]
    """Builds what is on the list and nothing else."""

    dispatch = _Python.dispatch.copy()

    def find_class(self, module: str, name: str) -> Any:
        """Return the allowed object called `name`, refusing any other."""
        if self.proto < 3:  # noqa: PLR2004  (where pickle says `__builtin__` for `builtins`)
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not on the list of harmless types") from None

    def load_build(self) -> None:
        """Set the state of an instance. Classes and functions are shared by the process and stay as they are."""
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError(f"{self.stack[-2]!r} cannot be changed")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _refuse(*_: object, **__: object) -> None:
    raise pickle.UnpicklingError("torch's format before 1.6 is not read")


_module = ModuleType("restricted_pickle")
_module.Unpickler = _Restricted  # type: ignore[attr-defined]
_module.load = _refuse  # type: ignore[attr-defined]


def restricted_load(data: bytes | memoryview, *, key: str) -> Any:
    """Return the value in `torch.save` bytes; tensors in it come to the CPU. Nothing else than the list can be built.

    Raises:
        UnsafePickleError: It holds anything that is not on the list, or is not what `torch.save` writes.
    """
    try:
        _refuse_script(data)
        return torch.load(io.BytesIO(data), map_location="cpu", pickle_module=_module, weights_only=False)
    except Exception as error:
        reason = str(error).partition("\n")[0][:300]
        raise UnsafePickleError(
            f"The value of {key} can only be read by unrestricted pickle: {reason}.",
            hint="Store plain values (dict, list, number, str, tensor, array), or allow_pickle=True on both sides.",
            key=key,
        ) from error


def _refuse_script(data: bytes | memoryview) -> None:
    """Refuse what `torch.load` would hand to `torch.jit.load`, seen through the same reader of archives."""
    if "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records():  # noqa: SLF001  (see above)
        raise pickle.UnpicklingError("it is a TorchScript archive")


def check(data: bytes | memoryview, *, key: str, allow_pickle: bool) -> bool:
    """Return whether `data` needs unrestricted pickle to be read, which must have been allowed.

    Raises:
        UnsafePickleError: It does, and it was not.
    """
    try:
        restricted_load(data, key=key)
    except UnsafePickleError:
        if not allow_pickle:
            raise
        return True
    return False


def remade(data: bytes | memoryview, *, key: str, pickled: bool, allow_pickle: bool) -> io.BytesIO:
    """Return what the stock planner may unpickle in place of the stored `data`.

    Args:
        data: As stored, verified.
        key: For messages.
        pickled: The save recorded that it needs unrestricted pickle.
        allow_pickle: The reader allows that. The stored bytes are handed on then, and run what they say.

    Raises:
        UnsafePickleError: It needs pickle and that is not allowed; or it should not need it and does.
    """
    if pickled and allow_pickle:
        return io.BytesIO(data)
    if pickled:
        raise UnsafePickleError(
            f"{key} was saved with allow_pickle=True; reading it runs whatever its bytes say.",
            hint="If you trust who wrote this run, pass allow_pickle=True to CkptStoreReader.",
            key=key,
        )
    stream = io.BytesIO()
    torch.save(restricted_load(data, key=key), stream)
    stream.seek(0)
    return stream


def saved_bytes(resolve: Any, *, key: str) -> bytes:
    """Return the bytes that a planner makes of a value, with the key in what goes wrong.

    Raises:
        UnsupportedError: The value cannot be pickled at all.
    """
    try:
        stream = resolve()
    except Exception as error:
        raise UnsupportedError(
            f"The value of {key} cannot be saved: {type(error).__name__}: {error}",
            hint="Leave it out of the state, or store plain values instead.",
            key=key,
        ) from error
    if not isinstance(stream, io.BytesIO):
        raise IntegrityError(f"The planner gave {type(stream).__name__} for {key}, not bytes.", key=key)
    return stream.getvalue()
