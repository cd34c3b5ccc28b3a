"""The states that are saved and loaded: what they hold can be made again, so that a load can be checked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptstore.units import KIB, MIB

State = dict[str, Any]
PARAMETERS_PER_TENSOR = 4 * MIB
# Mixed precision with Adam: bfloat16 parameters, and of each a float32 copy and two moments.
_OF_EACH_PARAMETER = {
    "model": torch.bfloat16,
    "optimizer.master": torch.float32,
    "optimizer.exp_avg": torch.float32,
    "optimizer.exp_avg_sq": torch.float32,
}
BYTES_PER_PARAMETER = 14
_SPREADS, _LOW = -1640531527, 0x7FFFFFFF  # Knuth's multiplier: no two neighbours look alike


@dataclass(frozen=True, slots=True)
class Shape:
    """What a state is made of: its tensors' names, shapes and dtypes, and whether ranks share each of them.

    Args:
        tensors: By name: the shape and the dtype.
        is_sharded: Each rank holds a piece of each tensor, by rows, as FSDP does; else one rank holds all.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    is_sharded: bool = False

    @property
    def nbytes(self) -> int:
        """Of all tensors, on all ranks."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())


def shape_of(kind: str, size: float) -> Shape:
    """Return the shape of a state.

    Args:
        kind: `dense`: few large tensors; `small`: many of 1 KiB; `sharded`: as `dense`, over all ranks; `llama-8b`:
            over all ranks, the tensors of Llama 3 8B with as many rows as `size` says.
        size: Bytes of `dense` and `sharded`; the number of tensors of `small`; a share of `llama-8b`.
    """
    if kind in ("dense", "sharded"):
        return Shape(_dense(int(size)), is_sharded=kind == "sharded")
    if kind == "small":
        return Shape({f"state.{i:06d}": ((KIB // 4,), torch.float32) for i in range(int(size))})
    if kind == "llama-8b":
        return Shape(_llama_8b(size), is_sharded=True)
    raise ValueError(f"{kind!r} is no kind of state.")


def make(shape: Shape, *, touched_only: bool = False) -> State:
    """Return a state of this shape: what is to be saved, or (`touched_only`) memory to load into."""
    state: State = {}
    for name, piece, start, wrap in _locals(shape):
        if touched_only:
            _bits(piece).fill_(1)
        else:
            _fill(_bits(piece), name, start)
        state[name] = wrap(piece)
    return state


def differing(shape: Shape, state: State) -> list[str]:
    """Return the names of the tensors of `state` that do not hold what `make` put there."""
    found = []
    for name, expected, start, _ in _locals(shape):
        _fill(_bits(expected), name, start)
        if not torch.equal(_bits(expected), _bits(plain(state[name]))):
            found.append(name)
    return found


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the piece of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of the piece of `tensor` that this rank holds."""
    array: Any = plain(tensor).view(torch.uint8).view(-1).numpy()
    return memoryview(array)


def _dense(size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    count = max(1, round(size / (BYTES_PER_PARAMETER * PARAMETERS_PER_TENSOR)))
    rows = max(64, size // (BYTES_PER_PARAMETER * count * KIB))
    return {
        f"{part}.layers.{layer}.weight": ((rows, KIB), dtype)
        for part, dtype in _OF_EACH_PARAMETER.items()
        for layer in range(count)
    }


def _llama_8b(share: float) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what MLPerf Storage's checkpoint of this model holds.

    Its workload `llama3-8b`: 32 layers, hidden size 4096, 14336 in the feed-forward net, 8 heads for keys and values,
    128256 words; half-precision parameters and float32 optimizer, all sharded over 8 ranks (ZeRO 3).
    """
    hidden, feed, keys, words = 4096, 14336, 1024, 128256
    layer = {
        "attention.wq": (hidden, hidden),
        "attention.wk": (keys, hidden),
        "attention.wv": (keys, hidden),
        "attention.wo": (hidden, hidden),
        "feed_forward.w1": (feed, hidden),
        "feed_forward.w2": (hidden, feed),
        "feed_forward.w3": (feed, hidden),
        "attention_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    whole: dict[str, tuple[int, ...]] = {
        "tok_embeddings": (words, hidden),
        "output": (words, hidden),
        "norm": (hidden,),
    }
    whole |= {f"layers.{i}.{name}": shape for i in range(32) for name, shape in layer.items()}
    scaled = {name: (max(8, round(shape[0] * share)), *shape[1:]) for name, shape in whole.items()}
    return {
        f"{part}.{name}": (shape, dtype) for part, dtype in _OF_EACH_PARAMETER.items() for name, shape in scaled.items()
    }


def _locals(shape: Shape) -> Iterator[tuple[str, torch.Tensor, int, Callable[[torch.Tensor], torch.Tensor]]]:
    """Yield of each tensor its name, fresh memory for this rank's piece, where that begins, and what wraps it."""
    if not shape.is_sharded:
        for name, (size, dtype) in shape.tensors.items():
            yield name, torch.empty(size, dtype=dtype), 0, lambda piece: piece
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for name, (size, dtype) in shape.tensors.items():
        each = -(-size[0] // world)  # as torch cuts: the last pieces may be smaller, or empty
        first = min(rank * each, size[0])
        rows, row = min(each, size[0] - first), math.prod(size[1:])
        yield name, torch.empty((rows, *size[1:]), dtype=dtype), first * row, _wrapper(mesh, size)


def _wrapper(mesh: DeviceMesh, size: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    stride = torch.empty(size, device="meta").stride()
    return lambda piece: DTensor.from_local(
        piece, mesh, [Shard(0)], run_check=False, shape=torch.Size(size), stride=stride
    )


def _fill(bits: torch.Tensor, name: str, start: int) -> None:
    """Fill with what the name and the place in the whole tensor say: each topology makes the same."""
    numbers = torch.arange(start, start + bits.numel(), dtype=torch.int32)
    numbers.mul_(_SPREADS).add_(zlib.crc32(name.encode()) & _LOW)
    bits.view(-1).copy_(numbers)  # of int16 the low half


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
