"""Tensors as bytes, without a copy of the whole: pieces to write, and views to read into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.dtypes import dtype_named
from ckptstore.units import MIB

PIECE_BYTES = 4 * MIB

_PLAIN = torch.Tensor.__torch_dispatch__


def dtype_name(dtype: torch.dtype, *, key: str) -> str:
    """Return the name under which tensors of `dtype` are stored, e.g. `bfloat16`.

    Raises:
        UnsupportedError: It is quantised, smaller than a byte, or unknown: its bytes alone do not give the values back.
    """
    return dtype_named(str(dtype).removeprefix("torch."), of=key).name


def dtype_of(name: str, *, key: str) -> torch.dtype:
    """Return the torch dtype called `name`.

    Raises:
        UnsupportedError: This torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"{key} was saved as {name}, which torch {torch.__version__} does not have.",
            hint="Load with a newer torch.",
            tensor=key,
            dtype=name,
        )
    return dtype


def byte_view(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a CPU tensor as uint8: one dimension more (the item size), any strides, no copy."""
    return tensor.detach().unsqueeze(-1).view(torch.uint8).numpy()


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Return whether bytes can go straight into the memory of `tensor`: on the CPU, no lazy conjugate or sign."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not _lazy(tensor)


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements and its storage no memory; to touch them would kill the process."""
    if type(tensor).__torch_dispatch__ is not _PLAIN or tensor.is_meta or tensor.layout is not torch.strided:
        return False  # what its storage holds says nothing
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def check_source(tensor: torch.Tensor, *, key: str) -> None:
    """Check that there is something to read.

    Raises:
        InvalidInputError: The storage was freed, as FSDP does between uses.
    """
    if is_freed(tensor):
        raise InvalidInputError(
            f"{key} has no memory: its storage was freed.",
            hint="Take the state from get_state_dict, or where the model is not sharded at this moment.",
            key=key,
        )


def check_target(tensor: torch.Tensor, *, key: str) -> None:
    """Check that values can be written into `tensor` at all.

    Raises:
        IncompatibleStateError: Several of its elements share memory, or it has none.
    """
    shared = any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    freed = is_freed(tensor)
    if tensor.is_meta or shared or freed:
        what = "is expanded: its elements share memory"
        if tensor.is_meta:
            what = "lies on the meta device and has no memory"
        elif freed:
            what = "has no memory: its storage was freed"
        raise IncompatibleStateError(f"The target of {key} {what}.", hint="Load into a tensor of its own.", key=key)


def blocks(tensor: torch.Tensor, *, block_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the elements of `tensor`, row-major, as views of it that hold at most `block_bytes` each."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        step = max(1, block_bytes // tensor.element_size())
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step]
    elif tensor.numel() * tensor.element_size() <= block_bytes:
        yield tensor
    else:
        row_bytes = tensor[0].numel() * tensor.element_size()
        if row_bytes > block_bytes:
            for row in tensor:
                yield from blocks(row, block_bytes=block_bytes)
        else:
            rows = block_bytes // row_bytes
            for start in range(0, tensor.shape[0], rows):
                yield tensor[start : start + rows]


def pieces(tensor: torch.Tensor, *, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of `tensor`, row-major and contiguous, in pieces of at most `piece_bytes`.

    A contiguous CPU tensor is not copied. Of any other no more than one piece is copied at a time.
    """
    for block in blocks(copyable(tensor.detach()), block_bytes=piece_bytes):
        yield bytes_of(block)


def lasting_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of `tensor` as `pieces` does, but those of a contiguous CPU tensor in one.

    What is yielded is its own memory or a copy that nobody else has, so it stays what it is while it is referred to.
    """
    if takes_bytes(tensor) and tensor.is_contiguous() and tensor.numel():
        yield bytes_of(copyable(tensor.detach()))
    else:
        yield from pieces(tensor)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a view of it with an element type that torch copies."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float4_e2m1fn_x2 else tensor


def bytes_of(block: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, row-major; a copy only if they do not stand so in host memory."""
    flat = block.resolve_conj().resolve_neg().contiguous().view(-1)
    return byte_view(flat.cpu()).reshape(-1).data


def place(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` into `target`, to its device and dtype. A complex source gives its real part to a real target."""
    if source.is_complex() and not target.is_complex():
        source = source.real
    with torch.no_grad():
        target.copy_(source)


def _lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()
