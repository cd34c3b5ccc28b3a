"""Values that DCP's planner hands over as `torch.save` bytes, and the only unpickler that ever reads them.

The stock planner unpickles what it is given without any restriction. So stored bytes never reach it: they are read
here, where nothing but the short list below can be built, and it gets bytes that we make again from the result.

torch's own `weights_only` unpickler is not used: it cannot build a deque, a defaultdict or an integer of more than
2,040 bits, and its list of allowed types is one of the whole process. Ours is the standard library's in Python, with a
closed list of names, a check of every call, and no way to change what is on the list; see `restricted` and `harmless`.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from ckptstore.errors import IntegrityError, UnsafePickleError, UnsupportedError
from storage_writers import restricted


def restricted_load(data: bytes | memoryview, *, key: str) -> Any:
    """Return the value in `torch.save` bytes; tensors in it come to the CPU. Nothing else than the list can be built.

    Raises:
        UnsafePickleError: It holds anything that is not on the list, or is not what `torch.save` writes.
    """
    try:
        return restricted.load(data)
    except Exception as error:
        raise _unsafe(error, key) from error


def _unsafe(error: Exception, key: str) -> UnsafePickleError:
    reason = (str(error) or type(error).__name__).partition("\n")[0][:300]
    return UnsafePickleError(
        f"The value of {key} can only be read by unrestricted pickle: {reason}.",
        hint="Store plain values (dict, list, number, str, tensor, array), or allow_pickle=True on both sides.",
        key=key,
    )


def check(data: bytes | memoryview, *, key: str, allow_pickle: bool) -> bool:
    """Return whether `data` needs unrestricted pickle to be read, which must have been allowed.

    Raises:
        UnsafePickleError: It does, and it was not.
    """
    try:
        _rewritten(data, key)  # not only read: a load writes it again, and what a load would refuse is refused now
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
    return _rewritten(data, key)


def _rewritten(data: bytes | memoryview, key: str) -> io.BytesIO:
    stream, value = io.BytesIO(), restricted_load(data, key=key)
    try:
        torch.save(value, stream)
    except Exception as error:  # such as lists in lists, deeper than can be written
        raise _unsafe(error, key) from error
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
